"""Identity 5: one group with everyone in it, one local step and full batches make CyCp-Minimax descent-ascent.

That is, centralised gradient descent-ascent of the mean objective, step by step. The twin knows the objective's value
only, as the specification prints it, and differentiates it by complex steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Score
from fedauc.objectives.minimax import Minimax
from fedauc.stages import Geometric
from identities.identity_runs import Rows, gaussian_clients, linear_module, make_clients, run_recipe, shared_path
from identities.identity_twins import complex_gradient

COUNTS = [(4, 6), (2, 3), (1, 1), (0, 2)]
"""Every count divides its batch (4 positives, 6 negatives, 10 rows), so wrapping around sees each row equally often:
a full batch. The clients differ in size and imbalance, and the last holds one class only."""

FEATURES, CYCLES, STEP = 3, 8, 0.05
PRIOR = 7 / 19
"""7 of the 19 rows are positive."""

STAGES = [0, 0, 1, 1, 1, 1, 2, 2]
"""Geometric(initial=2, decay=0.5, scale=2): 2, 4 and then the remaining 2 of 8 cycles."""


def row_weights(federation: list[Rows], weighting: str, by_class: bool) -> list[tuple[float, float]]:
    """What one positive and one negative of each client weigh in the mean objective, from the specification."""
    sizes = np.array([(len(r.positives), len(r.negatives)) for r in federation], dtype=float)
    if not by_class:
        sizes = np.repeat(sizes.sum(1, keepdims=True), 2, axis=1)
    clients, holders, total = len(sizes), (sizes > 0).sum(0), sizes.sum(0)
    share = {
        "clients": np.where(sizes > 0, 1.0, 0.0) / holders,
        "pooled": sizes / total,
        "paper": np.where(sizes > 0, 1.0, 0.0) / clients,
    }[weighting]
    up, down = (share / np.maximum(sizes, 1)).T
    return list(zip(up.tolist(), down.tolist(), strict=True))


def mean_objective(
    federation: list[Rows], score: Score, weighting: str, prior: float | None
) -> Callable[[np.ndarray], complex]:
    """f(w, a, b, α): the normalised form, or the paper's with prior p."""
    weights = row_weights(federation, weighting, by_class=prior is None)
    up, down, curvature = (1.0, 1.0, 1.0) if prior is None else (1 - prior, prior, prior * (1 - prior))

    def saddle_value(point: np.ndarray) -> complex:
        w, (a, b, alpha) = point[:-3], point[-3:]
        total = -curvature * alpha**2
        for rows, (heavy, light) in zip(federation, weights, strict=True):
            h, g = rows.positives @ w, rows.negatives @ w
            if score == "sigmoid":
                h, g = 1 / (1 + np.exp(-h)), 1 / (1 + np.exp(-g))
            total = total + heavy * up * ((h - a) ** 2 - 2 * (1 + alpha) * h).sum()
            total = total + light * down * ((g - b) ** 2 + 2 * (1 + alpha) * g).sum()
        return complex(total)

    return saddle_value


def descent_ascent(
    saddle_value: Callable[[np.ndarray], complex], start: np.ndarray, stages: list[int], prox: float, decay: float
) -> np.ndarray:
    """v ← v - η(∇_v f + γ(v - v_s)), α ← α + η∂_α f, both at the old point; v_s is where stage s began."""
    point, reference, path = start, start, []
    for number, stage in enumerate(stages):
        if number and stage != stages[number - 1]:
            reference = point
        direction = complex_gradient(saddle_value, point)
        direction[:-1] += prox * (point - reference)[:-1]
        direction[-1] *= -1
        point = point - STEP * decay**stage * direction
        path.append(point)
    return np.array(path)


@pytest.mark.parametrize("prox", [0.0, 0.7])
@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
@pytest.mark.parametrize("prior", [None, PRIOR], ids=["normalised form", "paper's form"])
@pytest.mark.parametrize("score", ["identity", "sigmoid"])
@pytest.mark.parametrize("method", ["cycp-minimax", "coda-plus"])
def test_one_full_group_is_centralised_descent_ascent_step_by_step(
    method: str, score: Score, prior: float | None, weighting: str, prox: float
) -> None:
    federation, start = gaussian_clients(COUNTS, FEATURES, seed=5), np.array([0.3, -0.2, 0.1])
    recipe = Recipe.of(
        method,
        **({"groups": 1} if method == "cycp-minimax" else {}),
        objective=Minimax(score=score, prior=prior),
        prox=prox,
        stages=Geometric(initial=2, decay=0.5, scale=2),
        cycles=CYCLES,
        learning_rate=STEP,
        local_steps=1,
        positives=4,
        negatives=6,
        weighting=weighting,
        dtype="float64",
    )
    path = shared_path(run_recipe(recipe, linear_module(start), make_clients(federation)))
    saddle_value = mean_objective(federation, score, weighting, prior)
    # a and b start at the score of a raw output of 0.
    level = 0.5 if score == "sigmoid" else 0.0
    twin = descent_ascent(saddle_value, np.concatenate([start, [level, level, 0.0]]), STAGES, prox, 0.5)
    # Eight steps of some twenty sums each: rounding only.
    np.testing.assert_allclose(path, twin, rtol=1e-12, atol=1e-14)
    # The run goes somewhere: agreement is not that of two points at rest.
    assert np.abs(twin[-1] - twin[0]).max() > 1e-3


def test_the_proximal_pull_is_felt() -> None:
    federation, start = gaussian_clients(COUNTS, FEATURES, seed=5), np.array([0.3, -0.2, 0.1, 0, 0, 0])
    saddle_value = mean_objective(federation, "identity", "clients", None)
    free, pulled = (descent_ascent(saddle_value, start, STAGES, prox, 0.5) for prox in (0.0, 0.7))
    # The reference is the first point, so the first step is free of it and the second is not.
    np.testing.assert_array_equal(free[0], pulled[0])
    assert np.abs(free[1] - pulled[1]).max() > 1e-3
