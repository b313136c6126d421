"""Identity 1: the saddle of f is at a = E₊h, b = E₋h, α = b - a, where m² + f = L = E₊E₋(m - h + h')².

The paper's form is p(1 - p) times the normalised one, with the same saddle.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar, root
from torch import Tensor

from fedauc.objectives.minimax import Duals, Minimax

POSITIVES, NEGATIVES = 3, 9
"""An imbalanced pool of scores: the prior is 3/12."""

PRIOR = POSITIVES / (POSITIVES + NEGATIVES)
FACTOR = PRIOR * (1 - PRIOR)

forms = pytest.mark.parametrize(
    ("prior", "factor"), [(None, 1.0), (PRIOR, FACTOR)], ids=["normalised form", "paper's form"]
)
margins = pytest.mark.parametrize("margin", [1.0, 0.4])


def random_pool() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(0.8, 1.0, POSITIVES), rng.normal(-0.3, 0.7, NEGATIVES)


def make_batch(prior: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The pool as one batch: shares 1/B per class in a `classes` draw, 1/B over all rows in a `rows` draw."""
    up, down = random_pool()
    scores = torch.from_numpy(np.concatenate([up, down]))
    labels = (torch.arange(len(scores)) < POSITIVES).double()
    by_class = labels / POSITIVES + (1 - labels) / NEGATIVES
    return scores, labels, by_class if prior is None else torch.full_like(scores, 1 / len(scores))


def pairwise_square(margin: float) -> float:
    up, down = random_pool()
    return float(((margin - up[:, None] + down[None, :]) ** 2).mean())


def saddle_twin(a: float, b: float, alpha: float, margin: float, paper: bool) -> float:
    """f from the equations: the specification's normalised form, or the paper's F averaged over all examples."""
    up, down = random_pool()
    if not paper:
        first = ((up - a) ** 2 - 2 * (margin + alpha) * up).mean()
        return float(first + ((down - b) ** 2 + 2 * (margin + alpha) * down).mean() - alpha**2)
    p = PRIOR
    first = (1 - p) * (up - a) ** 2 - 2 * (margin + alpha) * (1 - p) * up
    second = p * (down - b) ** 2 + 2 * (margin + alpha) * p * down
    return float(np.concatenate([first, second]).mean() - p * (1 - p) * alpha**2)


def closed_form() -> Duals:
    up, down = random_pool()
    return Duals(*torch.tensor([up.mean(), down.mean(), down.mean() - up.mean()], dtype=torch.float64))


@forms
@margins
def test_closed_form_saddle_has_zero_slopes_and_the_pairwise_value(
    prior: float | None, factor: float, margin: float
) -> None:
    objective, data, saddle = Minimax(margin=margin, prior=prior), make_batch(prior), closed_form()
    square = pairwise_square(margin)
    np.testing.assert_allclose(torch.stack([*objective.saddle_slopes(*data, saddle)[1]]).numpy(), 0, atol=1e-15)
    assert objective.saddle_value(*data, saddle).item() == pytest.approx(factor * (square - margin**2), rel=1e-13)
    assert objective.monitored_loss(*data, saddle).item() == pytest.approx(square, rel=1e-13)
    a, b, alpha = (dual.item() for dual in saddle)
    assert saddle_twin(a, b, alpha, margin, prior is not None) == pytest.approx(
        factor * (square - margin**2), rel=1e-13
    )


@forms
@margins
def test_numeric_optimisation_of_the_twin_finds_it(prior: float | None, factor: float, margin: float) -> None:
    paper = prior is not None

    def inner_maximum(a: float, b: float) -> tuple[float, float]:
        result = minimize_scalar(lambda alpha: -saddle_twin(a, b, alpha, margin, paper), bracket=(-1, 1))
        return float(result.x), -float(result.fun)

    def best_duals(duals: np.ndarray) -> float:
        return inner_maximum(duals[0], duals[1])[1]

    outer = minimize(best_duals, [0.0, 0.0], method="Nelder-Mead", tol=1e-13)
    alpha, value = inner_maximum(outer.x[0], outer.x[1])
    # A minimum is flat, so its place is known to the square root of the precision of its value: 1e-6.
    np.testing.assert_allclose([*outer.x, alpha], [dual.item() for dual in closed_form()], atol=1e-6)
    assert value == pytest.approx(factor * (pairwise_square(margin) - margin**2), abs=1e-10)


@forms
@margins
def test_root_of_the_librarys_dual_slopes_is_it(prior: float | None, factor: float, margin: float) -> None:
    objective, data = Minimax(margin=margin, prior=prior), make_batch(prior)

    def dual_slopes(duals: np.ndarray) -> np.ndarray:
        return torch.stack([*objective.saddle_slopes(*data, Duals(*torch.from_numpy(duals)))[1]]).numpy()

    result = root(dual_slopes, np.array([5.0, -5.0, 5.0]), tol=1e-12)
    np.testing.assert_allclose(result.x, [dual.item() for dual in closed_form()], atol=1e-10)


@forms
def test_it_is_a_minimum_in_a_and_b_and_a_maximum_in_alpha(prior: float | None, factor: float) -> None:
    objective, data, saddle = Minimax(prior=prior), make_batch(prior), closed_form()
    level = objective.saddle_value(*data, saddle).item()
    for step in (-0.3, 0.3):
        assert objective.saddle_value(*data, saddle._replace(a=saddle.a + step)).item() > level
        assert objective.saddle_value(*data, saddle._replace(b=saddle.b + step)).item() > level
        # f is quadratic in α with curvature 2·factor: a step of 0.3 costs exactly factor·0.09.
        moved = objective.saddle_value(*data, saddle._replace(alpha=saddle.alpha + step)).item()
        assert level - moved == pytest.approx(factor * step**2, rel=1e-10)
