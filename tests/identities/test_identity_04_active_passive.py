"""Identity 4: with the full pool as passive scores at the same w, G1 + G2 is the exact pairwise gradient, with no ½."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc.interfaces import Score
from fedauc.objectives import find_objectives
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.kinds import Active, GapObjective, PairObjective, Passive

POSITIVES, NEGATIVES, FEATURES = 4, 9, 5

SURROGATES = [kind for kind in find_objectives().values() if issubclass(kind, GapObjective)]


def score_network(outputs: int) -> nn.Module:
    """A small model in float64 whose parameters come from their own stream."""
    rng = np.random.default_rng(4)
    built = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    for parameter in built.parameters():
        parameter.data = torch.from_numpy(rng.normal(0, 0.7, parameter.shape))
    return built


def random_examples() -> Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=(POSITIVES + NEGATIVES, FEATURES)))


def active_passive(objective: PairObjective, model: nn.Module, raw: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The value, and G1 + G2 pulled back through the model, when all active scores are also the whole pool."""
    scores = objective.to_scores(raw.detach())
    rate = objective.to_output_slopes(scores, torch.ones_like(scores))
    shares = [torch.full((count,), 1 / count, dtype=torch.float64) for count in (POSITIVES, NEGATIVES)]
    pool = Passive(scores[:POSITIVES], scores[POSITIVES:])
    active = Active(*pool, *shares)
    value, slopes = objective.monitored_loss(active, pool), objective.active_slopes(active, pool)
    cotangent = torch.cat([slopes.positives, slopes.negatives]) * rate
    return value, torch.autograd.grad(raw, tuple(model.parameters()), cotangent, retain_graph=True)


def assert_agrees(objective: PairObjective, model: nn.Module, raw: Tensor, loss: Tensor) -> None:
    value, gradient = active_passive(objective, model, raw)
    exact = torch.autograd.grad(loss, tuple(model.parameters()))
    torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(value, loss.detach(), rtol=1e-12, atol=0)
    # A stray ½ would show: the gradient itself is far from zero.
    assert float(torch.cat([part.flatten() for part in exact]).norm()) > 1e-2


@pytest.mark.parametrize("kind", SURROGATES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("score", ["identity", "sigmoid"])
def test_every_surrogate_gives_the_exact_pairwise_gradient(kind: Any, score: Score) -> None:
    objective: GapObjective = kind(score=score)
    model = score_network(1)
    raw = model(random_examples()).flatten()
    scores = torch.sigmoid(raw) if score == "sigmoid" else raw
    assert_agrees(
        objective, model, raw, objective.pair_loss(scores[:POSITIVES, None] - scores[None, POSITIVES:]).mean()
    )


@pytest.mark.parametrize("margin", [1.0, 4.0], ids=["few dissimilar pairs within it", "most within it"])
def test_contrastive_gives_the_exact_pairwise_gradient(margin: float) -> None:
    model = score_network(3)
    raw = model(random_examples())
    assert_agrees(Contrastive(margin=margin), model, raw, contrastive_loss(raw, margin))


def contrastive_loss(embeddings: Tensor, margin: float) -> Tensor:
    """½E₊E₊'[½d²] + ½E₋E₋'[½d²] + E₊E₋[½(m - d)₊²]."""
    up, down = embeddings[:POSITIVES], embeddings[POSITIVES:]
    alike = [(side[:, None] - side[None]).square().sum(-1).mean() / 2 for side in (up, down)]
    distance = (up[:, None] - down[None]).square().sum(-1).sqrt()
    different_loss = torch.relu(margin - distance).square().mean() / 2
    return (alike[0] + alike[1]) / 2 + different_loss
