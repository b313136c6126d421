"""Identity 7: with a linear scorer and full batches, a cycle of CyCp-Minimax is an affine map of z = (w, a, b, α).

A client's field (∇_w, ∂_a, ∂_b, -∂_α) f is Az - c, so I steps, the mean of a group and K groups in turn are affine too.
The run's limit is that map's fixed point; its distance from the saddle of the mean objective is proportional to ηI.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.experiments.recipe import Recipe
from fedauc.objectives.minimax import Minimax
from fedauc.participation.cyclic import Cyclic
from fedauc.stages import Constant
from identities.identity_runs import Rows, gaussian_clients, linear_module, make_clients, run_recipe, shared_path

FEATURES = 2
COUNTS = [(3, 4)] * 6
"""Equal counts and batches of 3 + 4: every step sees each of a client's rows once."""

GROUPS = ((0, 1), (2, 3), (4, 5))
K = len(GROUPS)
START = np.array([0.4, -0.3])


def make_federation() -> list[Rows]:
    return gaussian_clients(COUNTS, FEATURES, seed=7)


def saddle_field(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """A and c of one client, from f = E₊[(h - a)² - 2(1 + α)h] + E₋[(h - b)² + 2(1 + α)h] - α² with h = w·x."""
    up, down = rows
    first, second = up.mean(0), down.mean(0)
    gap = first - second
    slope = np.zeros((FEATURES + 3, FEATURES + 3))
    w, a, b, alpha = slice(0, FEATURES), FEATURES, FEATURES + 1, FEATURES + 2
    slope[w, w] = up.T @ up / len(up) + down.T @ down / len(down)
    slope[w, a] = slope[a, w] = -first
    slope[w, b] = slope[b, w] = -second
    slope[w, alpha], slope[alpha, w] = -gap, gap
    slope[[a, b, alpha], [a, b, alpha]] = 1
    constant = np.zeros(FEATURES + 3)
    constant[w] = gap
    return 2 * slope, 2 * constant


def solve_saddle() -> np.ndarray:
    """Where the mean field vanishes."""
    slopes, constants = zip(*map(saddle_field, make_federation()), strict=True)
    return np.linalg.solve(np.mean(slopes, axis=0), np.mean(constants, axis=0))


def cycle_map(learning_rate: float, local_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, t) with z ← Tz + t over a cycle."""
    size = FEATURES + 3
    fields = [saddle_field(rows) for rows in make_federation()]
    product, shift = np.eye(size), np.zeros(size)
    for group in GROUPS:
        maps, shifts = [], []
        for slope, constant in (fields[client] for client in group):
            matrix, offset = np.eye(size), np.zeros(size)
            for _ in range(local_steps):
                matrix, offset = (
                    matrix - learning_rate * slope @ matrix,
                    offset - learning_rate * (slope @ offset - constant),
                )
            maps.append(matrix)
            shifts.append(offset)
        mean = np.mean(maps, axis=0)
        product, shift = mean @ product, mean @ shift + np.mean(shifts, axis=0)
    return product, shift


def resting_point(learning_rate: float, local_steps: int) -> np.ndarray:
    matrix, offset = cycle_map(learning_rate, local_steps)
    return np.linalg.solve(np.eye(len(offset)) - matrix, offset)


def cycles_to_rest(learning_rate: float, local_steps: int, digits: int) -> int:
    """A cycle shrinks the error by the map's spectral radius; two digits more allow for its first growth."""
    radius = np.abs(np.linalg.eigvals(cycle_map(learning_rate, local_steps)[0])).max()
    assert radius < 1
    return int(np.ceil((digits + 2) * np.log(10) / -np.log(radius)))


def run_cycles(learning_rate: float, local_steps: int, cycles: int) -> np.ndarray:
    """z after each cycle."""
    recipe = Recipe.of(
        "cycp-minimax",
        participation=Cyclic(given=GROUPS),
        objective=Minimax(score="identity"),
        stages=Constant(),
        cycles=cycles,
        learning_rate=learning_rate,
        local_steps=local_steps,
        positives=3,
        negatives=4,
        dtype="float64",
    )
    return shared_path(run_recipe(recipe, linear_module(START), make_clients(make_federation())))[K - 1 :: K]


@pytest.mark.parametrize(("learning_rate", "local_steps"), [(0.05, 1), (0.02, 5), (0.002, 12)])
def test_a_cycle_is_the_affine_map(learning_rate: float, local_steps: int) -> None:
    points = run_cycles(learning_rate, local_steps, cycles=5)
    matrix, offset = cycle_map(learning_rate, local_steps)
    point = np.concatenate([START, np.zeros(3)])
    for observed in points:
        point = matrix @ point + offset
        np.testing.assert_allclose(observed, point, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("learning_rate", "local_steps"), [(0.08, 1), (0.05, 4)])
def test_the_runs_limit_is_the_maps_fixed_point(learning_rate: float, local_steps: int) -> None:
    points = run_cycles(learning_rate, local_steps, cycles_to_rest(learning_rate, local_steps, digits=11))[-1]
    np.testing.assert_allclose(points, resting_point(learning_rate, local_steps), rtol=0, atol=1e-11)


def test_the_runs_bias_is_proportional_to_the_learning_rate() -> None:
    """Three halvings of η at I = 4, on runs to four digits, of a bias that is a few per cent."""
    sizes = [0.02, 0.01, 0.005]
    limits = [run_cycles(size, 4, cycles_to_rest(size, 4, digits=4))[-1] for size in sizes]
    biases = [np.linalg.norm(limit - solve_saddle()) for limit in limits]
    slope = np.polyfit(np.log(sizes), np.log(biases), 1)[0]
    # The next order is relative ηIK times the curvature, up to a tenth here.
    assert slope == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("which", ["learning rate", "local steps"])
def test_the_fixed_points_bias_is_proportional_to_learning_rate_times_local_steps(which: str) -> None:
    """The map itself can be followed to tiny ηI.

    A visit drifts by η(I - 1)/2 of its curvature and a group by ηI, so in I the law holds up to 1/I: hence 64 and
    more local steps.
    """
    factors = [1, 2, 4, 8]
    grid = [(1e-6 * f, 64) if which == "learning rate" else (1e-6, 64 * f) for f in factors]
    biases = [np.linalg.norm(resting_point(*pair) - solve_saddle()) for pair in grid]
    slope = np.polyfit(np.log(factors), np.log(biases), 1)[0]
    assert slope == pytest.approx(1, abs=0.01)
    # Far above what solving for a fixed point of a map this close to the identity can lose, 1e-16 / 1e-4.
    assert biases[0] > 1e-6


def test_one_full_group_has_no_bias_with_one_local_step() -> None:
    """The bias comes from drift: the mean of single steps is the mean field, whose rest is the saddle."""
    recipe = Recipe.of(
        "coda-plus",
        objective=Minimax(score="identity"),
        stages=Constant(),
        cycles=150,
        learning_rate=0.15,
        local_steps=1,
        positives=3,
        negatives=4,
        dtype="float64",
    )
    points = shared_path(run_recipe(recipe, linear_module(START), make_clients(make_federation())))[-1]
    np.testing.assert_allclose(points, solve_saddle(), rtol=0, atol=1e-8)
