"""Identity 2 (Danskin): at the best duals, ∇_w f = ∇_w L with L = E₊E₋(m - h + h')².

The paper's form gives p(1 - p) times that gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc.interfaces import Score
from fedauc.objectives.minimax import Duals, Minimax

POSITIVES, NEGATIVES, FEATURES = 4, 8, 5
PRIOR = POSITIVES / (POSITIVES + NEGATIVES)


def score_network(seed: int) -> nn.Module:
    """A small scorer in float64 whose parameters come from their own stream."""
    rng = np.random.default_rng(seed)
    built = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)).double()
    for parameter in built.parameters():
        parameter.data = torch.from_numpy(rng.normal(0, 0.7, parameter.shape))
    return built


def raw_outputs(scorer: nn.Module) -> Tensor:
    inputs = torch.from_numpy(np.random.default_rng(2).normal(size=(POSITIVES + NEGATIVES, FEATURES)))
    outputs: Tensor = scorer(inputs)
    return outputs


def exact_gradient(scorer: nn.Module, margin: float, score: Score) -> tuple[Tensor, ...]:
    """Autograd through every pair."""
    raw = raw_outputs(scorer)
    scores = torch.sigmoid(raw) if score == "sigmoid" else raw
    loss = (margin - scores[:POSITIVES, None] + scores[None, POSITIVES:]).square().mean()
    return torch.autograd.grad(loss, tuple(scorer.parameters()))


def chained_gradient(scorer: nn.Module, objective: Minimax, offset: float) -> tuple[Tensor, ...]:
    """The library's slopes pulled back by hand, with the duals moved off their best by `offset`."""
    raw = raw_outputs(scorer)
    scores = objective.to_scores(raw.detach())
    rate = objective.to_output_slopes(scores, torch.ones_like(scores))
    labels = (torch.arange(len(scores)) < POSITIVES).double()
    by_class = labels / POSITIVES + (1 - labels) / NEGATIVES
    weights = by_class if objective.batch_kind == "classes" else torch.full_like(scores, 1 / len(scores))
    a, b = scores[:POSITIVES].mean(), scores[POSITIVES:].mean()
    slope, _ = objective.saddle_slopes(scores, labels, weights, Duals(a + offset, b, b - a))
    return torch.autograd.grad(raw, tuple(scorer.parameters()), slope * rate)


@pytest.mark.parametrize("score", ["identity", "sigmoid"])
@pytest.mark.parametrize("prior", [None, PRIOR], ids=["normalised form", "paper's form"])
@pytest.mark.parametrize("margin", [1.0, 0.4])
def test_gradient_at_the_best_duals_is_the_pairwise_gradient(score: Score, prior: float | None, margin: float) -> None:
    scorer, objective = score_network(3), Minimax(score=score, margin=margin, prior=prior)
    factor = 1.0 if prior is None else prior * (1 - prior)
    expected = tuple(factor * part for part in exact_gradient(scorer, margin, score))
    torch.testing.assert_close(chained_gradient(scorer, objective, 0.0), expected, rtol=1e-11, atol=1e-14)
    # Off the best duals the two differ, so the agreement above is not an accident of a vanishing gradient.
    moved = torch.cat([part.flatten() for part in chained_gradient(scorer, objective, 0.1)])
    assert float((moved - torch.cat([part.flatten() for part in expected])).norm()) > 1e-3
