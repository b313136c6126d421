"""The minimax objective, whose methods differ from those of other objectives, against a numpy twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.objectives.minimax import Duals, Minimax
from fedauc.trees import tree_at

Array = np.ndarray

FORMS = [Minimax(), Minimax(margin=1.37, score="identity"), Minimax(prior=0.2), Minimax(prior=0.7, margin=0.5)]
"""The normalised and the paper's form, with margins at and off 1."""

EXTREMES = [-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4]
"""Raw scores as far out as any surrogate must bear: their squares stay inside float32."""

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


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def random_batch(*lead: int) -> tuple[Tensor, Tensor, Tensor, Duals]:
    """Scores, labels, weights of 7 examples, the first 3 positive, and duals."""
    labels = (torch.arange(7) < 3).long().expand(*lead, 7)
    return (
        random_normal(*lead, 7),
        labels,
        random_normal(*lead, 7, seed=1).abs(),
        Duals(*random_normal(3, *lead, seed=2)),
    )


@every_form
def test_value_agrees_with_its_twin(objective: Minimax) -> None:
    scores, labels, weights, duals = random_batch()
    a, b, alpha = (dual.item() for dual in duals)
    twin = minimax_twin(objective, scores.numpy(), labels.numpy(), weights.numpy(), (a, b, alpha))
    assert objective.saddle_value(scores, labels, weights, duals).item() == pytest.approx(twin, rel=1e-12)


@every_form
def test_slopes_are_the_derivatives(objective: Minimax) -> None:
    scores, labels, weights, duals = random_batch(4)
    points = [leaf.requires_grad_() for leaf in (scores, *duals)]
    total = objective.saddle_value(scores, labels, weights, duals).sum()
    slope, moves = objective.saddle_slopes(scores, labels, weights, duals)
    torch.testing.assert_close((slope, *moves), torch.autograd.grad(total, points), rtol=1e-12, atol=1e-13)


@every_form
def test_a_stack_is_each_client_alone(objective: Minimax) -> None:
    batch = random_batch(4)
    for method in (objective.saddle_value, objective.saddle_slopes, objective.monitored_loss):
        stacked, mapped = method(*batch), torch.func.vmap(method)(*batch)
        for client in range(4):
            alone = method(*tree_at(batch, client))
            torch.testing.assert_close(tree_at(stacked, client), alone)
            torch.testing.assert_close(tree_at(mapped, client), alone)


@every_form
def test_monitors_the_pairwise_square_whatever_the_class_shares(objective: Minimax) -> None:
    scores, labels, weights, duals = random_batch()
    pairs = (objective.margin - scores[:3, None] + scores[None, 3:]).square().numpy()
    first, second = (part.numpy() / part.sum().item() for part in (weights[:3], weights[3:]))
    monitored = objective.monitored_loss(scores, labels, weights, duals).item()
    assert monitored == pytest.approx(first @ pairs @ second, rel=1e-12)


@every_form
@pytest.mark.parametrize("held", [0, 1], ids=["no positives", "no negatives"])
def test_monitors_an_absent_class_at_its_dual(objective: Minimax, held: int) -> None:
    scores, labels, weights, duals = random_batch()
    held_scores = scores[labels == held].numpy()
    shares = weights[labels == held].numpy() / weights[labels == held].sum().item()
    monitored = objective.monitored_loss(scores, labels, torch.where(labels == held, weights, 0), duals).item()
    gap = shares @ held_scores - duals.b.item() if held else duals.a.item() - shares @ held_scores
    spread = shares @ (held_scores - shares @ held_scores) ** 2
    assert monitored == pytest.approx((objective.margin - gap) ** 2 + spread, rel=1e-12)


@every_form
@every_precision
def test_is_finite_at_extreme_scores(objective: Minimax, dtype: torch.dtype) -> None:
    scores = torch.tensor(EXTREMES, dtype=dtype)
    _, labels, weights, duals = random_batch()
    batch = scores, labels, weights.to(dtype), Duals(*(1e4 * dual.sign().to(dtype) for dual in duals))
    slope, moves = objective.saddle_slopes(*batch)
    for result in (objective.saddle_value(*batch), objective.monitored_loss(*batch), slope, *moves):
        assert result.dtype == dtype
        assert bool(result.isfinite().all())
    assert objective.monitored_loss(*batch).item() >= 0
