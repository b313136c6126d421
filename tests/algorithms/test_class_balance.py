"""FedAvg for rare positives: balanced batches, the focal loss, adjusted logits, and Adam at the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedauc
from fedauc.algorithms import find_methods
from fedauc.algorithms.fedavg import FedAvg
from fedauc.algorithms.logit_adjusted import LogitAdjustedFedAvg
from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import BatchSize, Census, Cohort, Model, Phase, Setting
from fedauc.objectives.focal import Focal
from fedauc.objectives.logistic import Logistic
from fedauc.server_optimizers.adaptive import Adam
from fedauc.server_optimizers.plain import Plain


def make_rows(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Six clients of 40 rows; client 0 has no positive, the others have from 2 to 20."""
    generator, positives = np.random.default_rng(seed), [0, 2, 5, 10, 15, 20]
    labels = np.concatenate([np.repeat([1, 0], [count, 40 - count]) for count in positives])
    inputs = generator.normal(size=(240, 3)) + 0.7 * labels[:, None]
    return inputs, labels, np.repeat(np.arange(6), 40)


def sigmoid(values: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-values)))


def train_one_round(method: str, **settings: Any) -> fedauc.Fitted:
    inputs, labels, client = make_rows()
    clients = fedauc.Clients.from_arrays(inputs, labels, client=client)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    options: dict[str, Any] = {
        "groups": 1,
        "cycles": 1,
        "local_steps": 1,
        "dtype": "float64",
        "learning_rate": 0.5,
        **settings,
    }
    return fedauc.fit(model, clients, method, **options)


def model_weights(fitted: fedauc.Fitted) -> np.ndarray:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in fitted.module.parameters()])


@pytest.mark.parametrize("weighting", ["clients", "pooled"])
def test_balanced_batches_give_the_sum_of_both_class_means(weighting: str) -> None:
    """All rows of a class in a batch: one step per client is a gradient step on mean over positives + over negatives.

    With batches of 40 positives a client's rows are drawn several times, but equally often where 40 is a multiple of
    their number, as 2, 5, 10 and 20 are; 15 is left out by giving that client 20 positives as well.
    """
    inputs, labels, client = make_rows()
    labels[4 * 40 : 4 * 40 + 20] = 1
    clients = fedauc.Clients.from_arrays(inputs, labels, client=client)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    negatives = np.lcm.reduce([40, 38, 35, 30, 20])
    fitted = fedauc.fit(
        model,
        clients,
        "cycp-fedavg-balanced",
        groups=1,
        cycles=1,
        local_steps=1,
        positives=40,
        negatives=int(negatives),
        dtype="float64",
        learning_rate=0.5,
        weighting=weighting,
    )
    rows = np.column_stack([inputs, np.ones(len(inputs))])
    counts = np.array([[np.sum((client == m) & (labels == y)) for m in range(6)] for y in (1, 0)])
    gradient = np.zeros(4)
    for m in range(6):
        for side, y in enumerate((1, 0)):
            held = rows[(client == m) & (labels == y)]
            if len(held) == 0:
                continue
            holders = np.count_nonzero(counts[side])
            scale = 6 / holders if weighting == "clients" else 6 * len(held) / counts[side].sum()
            # The logistic slope at a score of 0 is 1/2 - y.
            gradient += scale * (0.5 - y) * held.mean(0) / 6
    np.testing.assert_allclose(model_weights(fitted), -0.5 * gradient, atol=1e-12)


def test_the_balanced_method_draws_both_classes_in_equal_numbers() -> None:
    inputs, labels, client = make_rows()
    clients = Clients.from_arrays(inputs, labels, client=client)
    objective = Recipe.of("cycp-fedavg-balanced").algorithm.objective
    assert objective == Logistic(draw="classes")
    setting = Setting(0, 1, BatchSize(4, 4), clients.census, "clients")
    drawn = Draws(clients, setting, objective.batch_kind).draw_visit(3, Phase(0, 0, 0, 0.1, 5, BatchSize(4, 4)))
    drawn_labels = clients.labels.numpy()[drawn.rows]
    assert drawn_labels[:, :4].min() == 1
    assert drawn_labels[:, 4:].max() == 0


def test_the_focal_loss_is_that_of_its_paper() -> None:
    """-(1 - p)^γ log p of the right class, and its derivative by differences."""
    scores, labels = np.linspace(-6, 6, 41), np.arange(41) % 2
    for gamma in (0.0, 0.5, 2.0):

        def twin(values: np.ndarray, gamma: float = gamma) -> np.ndarray:
            right = sigmoid(np.where(labels == 1, values, -values))
            return np.asarray(-((1 - right) ** gamma) * np.log(right))

        objective = Focal(gamma=gamma)
        given = torch.tensor(scores), torch.tensor(labels)
        np.testing.assert_allclose(objective.example_loss(*given), twin(scores), rtol=1e-10)
        step = 1e-6
        slope = (twin(scores + step) - twin(scores - step)) / (2 * step)
        np.testing.assert_allclose(objective.example_slope(*given), slope, atol=1e-8)


def test_the_focal_loss_without_focus_is_the_logistic_loss() -> None:
    scores, labels = torch.linspace(-50, 50, 21, dtype=torch.float64), torch.arange(21) % 2
    torch.testing.assert_close(Focal(gamma=0).example_loss(scores, labels), Logistic().example_loss(scores, labels))
    torch.testing.assert_close(Focal(gamma=0).example_slope(scores, labels), Logistic().example_slope(scores, labels))


def test_each_client_is_sent_the_log_of_its_own_class_odds() -> None:
    census = Census(np.array([0, 2, 30]), np.array([40, 38, 10]))
    setting = Setting(0, 1, BatchSize(4, 4), census, "clients")
    algorithm = LogitAdjustedFedAvg(tau=0.5)
    model = Model(torch.zeros(4, dtype=torch.float64), torch.zeros(0))
    phase = Phase(0, 0, 0, 0.1, 3, BatchSize(4, 4))
    sent = algorithm.dispatch(setting, algorithm.init(setting, model), Cohort(0, (2, 0), (0.5, 0.5)), phase)
    expected = 0.5 * np.log([31 / 11, 1 / 41])
    np.testing.assert_allclose(sent.per_client, np.repeat(expected[:, None], 3, axis=1))


def test_logit_adjustment_adds_the_log_odds_to_every_score() -> None:
    """One step from w = (.1, .1, .1) and bias 0 on all 40 rows of each client, in numpy."""
    inputs, labels, client = make_rows()
    fitted = train_one_round("cycp-fedavg-logit-adjusted", positives=20, negatives=20)
    rows, start = np.column_stack([inputs, np.ones(len(inputs))]), np.array([0.1, 0.1, 0.1, 0.0])
    gradient = np.zeros(4)
    for m in range(6):
        held, truth = rows[client == m], labels[client == m]
        odds = np.log((truth.sum() + 1) / (len(truth) - truth.sum() + 1))
        gradient += held.T @ (sigmoid(held @ start + odds) - truth) / 40 / 6
    # The model's constant .1 was given in float32.
    np.testing.assert_allclose(model_weights(fitted), start - 0.5 * gradient, atol=1e-8)


def test_no_adjustment_is_fedavg() -> None:
    settings: dict[str, Any] = {"cycles": 3, "groups": 2, "local_steps": 4}
    adjusted = train_one_round("cycp-fedavg-logit-adjusted", tau=0.0, **settings)
    np.testing.assert_array_equal(model_weights(adjusted), model_weights(train_one_round("cycp-fedavg", **settings)))


def test_adjusted_logits_need_raw_outputs() -> None:
    class SquashedLoss(Logistic):
        def __post_init__(self) -> None:
            pass

    with pytest.raises(ValueError, match=r"objective\.score is 'sigmoid'; logits are raw outputs"):
        LogitAdjustedFedAvg(objective=SquashedLoss(score="sigmoid"))


def test_a_method_may_bring_settings_of_the_recipe_which_options_replace() -> None:
    assert find_methods()["cycp-fedadam"].algorithm is FedAvg
    assert Recipe.of("cycp-fedadam").server_optimizer == Adam(learning_rate=0.1)
    assert Recipe.of("cycp-fedadam", server_optimizer="plain").server_optimizer == Plain()


@pytest.mark.parametrize("wrapper", ["fedprox", "momentum", "adam"])
def test_wrappers_reach_the_adjusted_steps(wrapper: str) -> None:
    """Without adjustment, a wrapped run is that of wrapped FedAvg; with it, the run is another one."""
    settings: dict[str, Any] = {"cycles": 2, "groups": 2, "local_steps": 3, "wrappers": wrapper}
    plain = model_weights(train_one_round("cycp-fedavg", **settings))
    none, some = (train_one_round("cycp-fedavg-logit-adjusted", tau=tau, **settings) for tau in (0.0, 1.0))
    np.testing.assert_array_equal(model_weights(none), plain)
    assert not np.allclose(model_weights(some), plain)
