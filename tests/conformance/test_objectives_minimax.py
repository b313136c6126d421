"""The minimax objective, whose methods differ from those of other objectives, against a numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedauc.objectives.minimax import Minimax
from fedauc.testing.objective import check_extreme_scores, check_saddle_slopes, check_saddle_stack, random_saddle

Array = np.ndarray

FORMS = [Minimax(), Minimax(margin=1.37, score="identity"), Minimax(prior=0.2), Minimax(prior=0.7, margin=0.5)]
"""The normalised and the paper's form, with margins at and off 1."""

every_form = pytest.mark.parametrize("objective", FORMS, ids=repr)
every_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def minimax_twin(objective: Minimax, h: Array, y: Array, w: Array, duals: tuple[float, float, float]) -> float:
    a, b, alpha = duals
    p = objective.prior
    up, down, curvature = (1.0, 1.0, 1.0) if p is None else (1 - p, p, p * (1 - p))
    total = -curvature * alpha**2
    for score, label, weight in zip(h, y, w, strict=True):
        if label:
            total += weight * up * ((score - a) ** 2 - 2 * (objective.margin + alpha) * score)
        else:
            total += weight * down * ((score - b) ** 2 + 2 * (objective.margin + alpha) * score)
    return total


@every_form
def test_value_agrees_with_its_twin(objective: Minimax) -> None:
    scores, labels, weights, duals = random_saddle()
    a, b, alpha = (dual.item() for dual in duals)
    twin = minimax_twin(objective, scores.numpy(), labels.numpy(), weights.numpy(), (a, b, alpha))
    assert objective.saddle_value(scores, labels, weights, duals).item() == pytest.approx(twin, rel=1e-12)


@every_form
def test_slopes_are_the_derivatives(objective: Minimax) -> None:
    check_saddle_slopes(objective)


@every_form
def test_a_stack_is_each_client_alone(objective: Minimax) -> None:
    check_saddle_stack(objective)


@every_form
def test_monitors_the_pairwise_square_whatever_the_class_shares(objective: Minimax) -> None:
    scores, labels, weights, duals = random_saddle()
    pairs = (objective.margin - scores[:3, None] + scores[None, 3:]).square().numpy()
    first, second = (part.numpy() / part.sum().item() for part in (weights[:3], weights[3:]))
    monitored = objective.monitored_loss(scores, labels, weights, duals).item()
    assert monitored == pytest.approx(first @ pairs @ second, rel=1e-12)


@every_form
@pytest.mark.parametrize("held", [0, 1], ids=["no positives", "no negatives"])
def test_monitors_an_absent_class_at_its_dual(objective: Minimax, held: int) -> None:
    scores, labels, weights, duals = random_saddle()
    held_scores = scores[labels == held].numpy()
    shares = weights[labels == held].numpy() / weights[labels == held].sum().item()
    monitored = objective.monitored_loss(scores, labels, torch.where(labels == held, weights, 0), duals).item()
    gap = shares @ held_scores - duals.b.item() if held else duals.a.item() - shares @ held_scores
    spread = shares @ (held_scores - shares @ held_scores) ** 2
    assert monitored == pytest.approx((objective.margin - gap) ** 2 + spread, rel=1e-12)


@every_form
@every_precision
def test_is_finite_at_extreme_scores(objective: Minimax, dtype: torch.dtype) -> None:
    check_extreme_scores(objective, dtype)
