"""Identity 3: φ(w) = min_{a,b} max_α f does not change when every score is shifted by one constant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.objectives.minimax import Duals, Minimax

POSITIVES, NEGATIVES = 5, 15
PRIOR = POSITIVES / (POSITIVES + NEGATIVES)

forms = pytest.mark.parametrize("prior", [None, PRIOR], ids=["normalised form", "paper's form"])


def make_batch(prior: float | None) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.from_numpy(np.random.default_rng(3).normal(size=POSITIVES + NEGATIVES))
    labels = (torch.arange(len(scores)) < POSITIVES).double()
    by_class = labels / POSITIVES + (1 - labels) / NEGATIVES
    return scores, labels, by_class if prior is None else torch.full_like(scores, 1 / len(scores))


def best_duals(scores: Tensor) -> Duals:
    a, b = scores[:POSITIVES].mean(), scores[POSITIVES:].mean()
    return Duals(a, b, b - a)


@forms
@pytest.mark.parametrize("shift", [-7.0, 0.01, 3.0])
def test_saddle_value_ignores_a_shift(prior: float | None, shift: float) -> None:
    objective, (scores, labels, weights) = Minimax(prior=prior), make_batch(prior)
    moved = scores + shift
    value = objective.saddle_value(scores, labels, weights, best_duals(scores)).item()
    assert objective.saddle_value(moved, labels, weights, best_duals(moved)).item() == pytest.approx(value, rel=1e-12)
    # At fixed duals f does change: (shift)² and a term in it enter, at least 1e-5 for the smallest shift here.
    assert abs(objective.saddle_value(moved, labels, weights, best_duals(scores)).item() - value) > 1e-6
    first, second = (
        objective.monitored_loss(shifted, labels, weights, best_duals(shifted)).item() for shifted in (scores, moved)
    )
    assert first == pytest.approx(second, rel=1e-12)


@forms
def test_slopes_at_the_saddle_sum_to_zero(prior: float | None) -> None:
    """The same fact in the small: the derivative along a common shift is Σᵢ ∂f/∂hᵢ."""
    objective, (scores, labels, weights) = Minimax(prior=prior), make_batch(prior)
    slope, _ = objective.saddle_slopes(scores, labels, weights, best_duals(scores))
    assert slope.sum().item() == pytest.approx(0, abs=1e-15)
    assert slope.abs().sum().item() > 0.1
