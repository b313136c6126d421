"""How often a row can occur in a visit, and what the noise of its steps amounts to."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from fedauc.engines.draws import Draws
from fedauc.interfaces import BatchKind, BatchSize, Census, Phase, Setting
from fedauc.privacy.example_accounting import (
    RowOccurrences,
    compose_multipliers,
    count_occurrences,
    example_account,
    row_occurrences,
)
from small_federations import EMPTY, NEGATIVES, POSITIVES, small_federation


def enumerate_occurrences(rows: int, batch_rows: int, local_steps: int) -> RowOccurrences:
    """The bounds by trying every position of a row in every shuffled pass."""
    total = local_steps * batch_rows
    passes = -(-total // rows)
    places = np.array([*itertools.product(range(rows), repeat=passes)]) + rows * np.arange(passes)
    counts = ((places // batch_rows)[..., None] == np.arange(local_steps)).sum(axis=1)
    squares = np.square(counts).sum(axis=1)
    return RowOccurrences(int(counts.sum(axis=1).max()), int(counts.max()), int(squares.max()))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7])
def test_the_bounds_are_those_of_all_arrangements(rows: int) -> None:
    """Every batch of up to 7 rows and visit of up to 4 steps with at most 4,096 arrangements; they are reached."""
    compared = 0
    for batch_rows, local_steps in itertools.product(range(1, 8), range(1, 5)):
        if rows ** -(-local_steps * batch_rows // rows) <= 4096:
            expected = enumerate_occurrences(rows, batch_rows, local_steps)
            assert count_occurrences(rows, batch_rows, local_steps) == expected
            assert expected.in_visit == math.ceil(local_steps * batch_rows / rows)
            assert expected.in_batch <= math.ceil(batch_rows / rows) + 1
            compared += 1
    assert compared >= 20


def test_a_row_is_counted_twice_in_a_batch_that_two_passes_share() -> None:
    """Of 5 rows in batches of 2, step 2 takes the last row of a pass and the first of the next one."""
    assert count_occurrences(5, 2, 2) == RowOccurrences(1, 1, 1)
    assert count_occurrences(5, 2, 3) == RowOccurrences(2, 2, 4)
    # Passes that end with a batch share none.
    assert count_occurrences(6, 2, 6) == RowOccurrences(2, 1, 2)


@pytest.mark.parametrize("kind", ["classes", "rows"])
@pytest.mark.parametrize("batch", [BatchSize(2, 3), BatchSize(6, 1), BatchSize(1, 1)])
def test_draws_stay_within_the_bounds(kind: BatchKind, batch: BatchSize) -> None:
    """Over 200 rounds, for every row with a weight; some row comes to the bound of its client in each number."""
    clients, steps = small_federation(), 4
    numbers = [client for client in range(len(clients)) if client != EMPTY]
    draws = Draws(clients, Setting(0, 3, batch, clients.census, "clients"), kind, needs_places=True)
    bounds = row_occurrences(clients.census, batch, steps, kind)
    largest = np.zeros((len(clients), 3), dtype=int)
    for round_number in range(200):
        drawn = draws.draw_cohort(numbers, Phase(round_number, 0, 0, 0.1, steps, batch))
        assert drawn.places is not None
        for position, client in enumerate(numbers):
            counted = drawn.places[position][:, drawn.weights[position] > 0]
            counts = np.stack([np.bincount(step, minlength=20) for step in counted])
            reached = (counts.sum(axis=0).max(), counts.max(), np.square(counts).sum(axis=0).max())
            largest[client] = np.maximum(largest[client], reached)
    for client in numbers:
        assert (largest[client] <= np.array(bounds[client])).all()
    assert (largest == np.array(bounds)).all(axis=1)[numbers].mean() >= 0.5


def test_the_account_of_each_client() -> None:
    batch, steps, sigma = BatchSize(2, 3), 4, 3.0
    census = Census(np.array(POSITIVES), np.array(NEGATIVES))
    by_class = example_account(census, batch, steps, "classes", sigma)
    expected = []
    for counts in zip(POSITIVES, NEGATIVES, strict=True):
        squares = [
            enumerate_occurrences(rows, size, steps).sum_of_squares
            for rows, size in zip(counts, batch, strict=True)
            if rows
        ]
        expected.append(sigma / math.sqrt(max(squares)) if squares else math.inf)
    np.testing.assert_allclose(by_class.noise_multipliers, expected)
    # Client 5 holds one negative, which is all three negatives of all four steps: 4 · 3² = 36.
    assert by_class.worst_multiplier == pytest.approx(by_class.noise_multipliers[5]) == pytest.approx(sigma / 6)
    assert by_class.noise_multipliers[EMPTY] == math.inf
    by_row = example_account(census, batch, steps, "rows", sigma)
    # Client 5 holds two rows in all; a batch of 5 takes two passes and a half, so 2 or 3 of each: 3² + 2² + 3² + 2².
    assert by_row.noise_multipliers[5] == pytest.approx(sigma / math.sqrt(26))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """ε of a Gaussian mechanism of sensitivity 1 (Balle and Wang, ICML 2018, Theorem 8)."""
    mu = 1 / noise_multiplier

    def excess(epsilon: float) -> float:
        tail = math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        return float(norm.cdf(mu / 2 - epsilon / mu) - tail - delta)

    return float(brentq(excess, 0, 100))


def test_steps_and_visits_compose_to_the_epsilon_of_the_accountant() -> None:
    """A row of 5 in batches of 2: in 3 steps it occurs twice in one batch at worst; 10 such visits."""
    sigma, visits, delta = 8.0, 10, 1e-5
    census = Census(np.array([2]), np.array([3]))
    account = example_account(census, BatchSize(1, 1), 3, "rows", sigma)
    total = compose_multipliers(np.full(visits, account.worst_multiplier))
    assert total == pytest.approx(sigma / (2 * math.sqrt(visits)))
    # Steps in which the row does not occur tell nothing; the one in which it occurs twice has sensitivity 2.
    worst = SelfComposedDpEvent(GaussianDpEvent(sigma / 2), visits)
    epsilon = PLDAccountant(value_discretization_interval=1e-3).compose(worst).get_epsilon(delta)
    assert gaussian_epsilon(total, delta) == pytest.approx(epsilon, abs=2e-3)
    # The other arrangement, once in each of two steps, costs less.
    spread = SelfComposedDpEvent(ComposedDpEvent([GaussianDpEvent(sigma)] * 2), visits)
    assert PLDAccountant(value_discretization_interval=1e-3).compose(spread).get_epsilon(delta) < epsilon


def test_multipliers_of_different_visits_compose() -> None:
    assert compose_multipliers(np.array([3.0, 4.0])) == pytest.approx(1 / math.sqrt(1 / 9 + 1 / 16))
    assert compose_multipliers(np.array([2.0, math.inf])) == pytest.approx(2.0)
    assert compose_multipliers(np.array([2.0, 0.0])) == 0.0
