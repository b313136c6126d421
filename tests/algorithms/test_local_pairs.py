"""Local pairs: whole runs and single steps are those of plain numpy, and a class that a client lacks counts nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc.algorithms.local_pairs import LocalPairs
from fedauc.engines import engines
from fedauc.engines.draws import Draws
from fedauc.interfaces import Batch, BatchSize, Download, Model, Phase
from fedauc.network import ModuleNetwork
from fedauc.objectives import find_objectives
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.kinds import GapObjective
from fedauc.objectives.logistic import Logistic
from small_federations import (
    EMPTY,
    FEATURES,
    HOLDING,
    NEGATIVES,
    POSITIVES,
    assemble_small,
    linear_scorer,
    record_exchanges,
    small_federation,
    small_recipe,
)

SURROGATES = [kind for kind in find_objectives().values() if issubclass(kind, GapObjective)]
PHASE = Phase(0, 0, 0, 0.1, 1, BatchSize(2, 3))


def pair_gradient(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The gradient of the mean over pairs of 1 / (1 + e^t), with t = h_i - h_j and scores h that are linear."""
    above, below = rows[labels == 1], rows[labels == 0]
    if not len(above) or not len(below):
        return np.zeros_like(weights)
    total = np.zeros_like(weights)
    for positive in above:
        for negative in below:
            loss = 1 / (1 + np.exp((positive - negative) @ weights))
            total -= loss * (1 - loss) * (positive - negative)
    return total / (len(above) * len(below))


def client_weight(client: int, weighting: str) -> float:
    """What the positives of a client count, from the numbers of rows alone."""
    if weighting == "clients":
        return HOLDING / np.count_nonzero(POSITIVES)
    return HOLDING * POSITIVES[client] / sum(POSITIVES) if weighting == "pooled" else 1.0


@pytest.mark.parametrize("engine", sorted(set(engines()) - {"compiled"}))
@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
def test_every_round_is_the_twins(weighting: str, engine: str) -> None:
    recipe = small_recipe("cycp-local-pairs", weighting=weighting, engine=engine, cycles=3, local_steps=3)
    federation, module = small_federation(), linear_scorer()
    rounds, exchanges = record_exchanges(recipe, module)
    setting = assemble_small(recipe).training.setting
    draws = Draws(federation, setting, recipe.algorithm.objective.batch_kind)
    inputs = np.column_stack([federation.inputs.numpy(), np.ones(len(federation.labels))])
    labels = federation.labels.numpy()
    model = np.concatenate([module.weight.detach().numpy()[0], module.bias.detach().numpy()])
    came: set[int] = set()
    for finished, (download, cohort, upload) in zip(rounds, exchanges, strict=True):
        changes = []
        for client in cohort.clients:
            weights = model.copy()
            for rows in draws.draw_visit(client, download.phase).rows:
                gradient = pair_gradient(inputs[rows], labels[rows], weights)
                weights -= download.phase.learning_rate * client_weight(client, weighting) * gradient
            changes.append(weights - model)
        came |= set(cohort.clients)
        model = model + np.mean(changes, axis=0)
        np.testing.assert_allclose(finished.state.server.shared.weights.numpy(), model, rtol=1e-10, atol=1e-12)
        assert upload.pool == ()
        # A client of the first round lacks positives, one of the second negatives, one of the third positives again.
        lacking = [p for p, client in enumerate(cohort.clients) if not POSITIVES[client] or not NEGATIVES[client]]
        assert lacking
        assert not np.any([changes[position] for position in lacking])
        assert np.abs(np.mean(changes, axis=0)).max() > 1e-3
    assert came == set(range(len(POSITIVES))) - {EMPTY}


def take_step(objective: GapObjective, module: nn.Module, batch: Batch) -> tuple[np.ndarray, float]:
    """The change of the weights in one step at a learning rate of .1, and the loss before it."""
    network, algorithm = ModuleNetwork(module), LocalPairs(objective=objective)
    model = network.initial_model()
    local, emitted = algorithm.step(network, Download(PHASE, model), model, batch)
    assert emitted == ()
    loss = algorithm.monitored_loss(network, Download(PHASE, model), model, batch)
    return (local.weights - model.weights).numpy(), float(loss)


def make_batch(positive_weight: float, negative_weight: float) -> Batch:
    """Two positives and three negatives; the weights of the classes differ, as those of a client usually do."""
    inputs = torch.from_numpy(np.random.default_rng(7).normal(size=(5, FEATURES)))
    weights = torch.tensor([positive_weight / 2] * 2 + [negative_weight / 3] * 3, dtype=torch.float64)
    return Batch(inputs, torch.tensor([1.0, 1, 0, 0, 0], dtype=torch.float64), weights)


@pytest.mark.parametrize("kind", SURROGATES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("score", ["identity", "sigmoid"])
def test_a_step_is_the_gradient_of_the_weighted_mean_over_pairs(kind: Any, score: Any) -> None:
    objective, batch = kind(score=score), make_batch(1.7, 0.4)
    last = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(last.weight, 0.5)
    module = nn.Sequential(linear_scorer(outputs=3), nn.Tanh(), last)
    change, loss = take_step(objective, module, batch)
    scores = objective.to_scores(module(batch.inputs)[:, 0])
    expected = 1.7 * objective.pair_loss(scores[:2, None] - scores[None, 2:]).mean()
    gradient = torch.autograd.grad(expected, list(module.parameters()))
    flat = np.concatenate([part.numpy().ravel() for part in gradient])
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(change, -0.1 * flat, rtol=1e-9, atol=1e-14)
    assert np.abs(flat).max() > 1e-3


@pytest.mark.parametrize("weights", [(1.7, 0.0), (0.0, 0.4)], ids=["no negatives", "no positives"])
def test_rows_in_place_of_a_missing_class_do_not_count(weights: tuple[float, float]) -> None:
    """All rows are of one class, and those that fill the places of the other one have weight zero."""
    batch = make_batch(*weights)
    change, loss = take_step(LocalPairs().objective, linear_scorer(), batch)
    assert loss == 0
    assert not change.any()


def test_only_losses_of_a_gap_are_accepted() -> None:
    for objective in (Logistic(), Contrastive()):
        message = f"objective is '{objective.name}', which the algorithm local-pairs cannot use; use one of: "
        with pytest.raises(ValueError, match=message):
            LocalPairs(objective=objective)  # type: ignore[arg-type]


def test_the_change_of_the_model_is_all_that_is_uploaded() -> None:
    _, exchanges = record_exchanges(small_recipe("cycp-local-pairs"))
    for _, _, upload in exchanges:
        assert isinstance(upload.mean, Model)
        assert upload.mean.weights.shape == (FEATURES + 1,)
        assert (upload.pool, upload.mean.buffers.numel()) == ((), 0)
