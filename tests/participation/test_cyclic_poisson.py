"""Poisson draws within groups: frequencies, independence, and the fixed denominator."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedauc.interfaces import Roster, Schedule
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson

ROUNDS, GROUPS, CLIENTS, RATE = 1200, 3, 12, 0.3


def draw_attendance(schedule: Schedule) -> np.ndarray:
    """Who took part, 0 or 1 `[rounds, clients]`."""
    attendance = np.zeros((ROUNDS, CLIENTS), dtype=int)
    for round in range(ROUNDS):
        attendance[round, list(schedule.cohort(round).clients)] = 1
    return attendance


@pytest.fixture(scope="module")
def attendance() -> np.ndarray:
    participation = CyclicPoisson(rate=RATE, groups=GROUPS, assignment="random")
    return draw_attendance(participation.bind(Roster(np.full(CLIENTS, 5)), seed=4))


def test_a_client_comes_in_the_turns_of_its_group_only(attendance: np.ndarray) -> None:
    schedule = Cyclic(groups=GROUPS, assignment="random").bind(Roster(np.full(CLIENTS, 5)), seed=4)
    for round in range(60):
        assert set(np.flatnonzero(attendance[round])) <= set(schedule.groups[round % GROUPS].tolist())


def test_every_client_comes_with_the_rate(attendance: np.ndarray) -> None:
    """Of 400 turns a client takes part in 120 on average; the test allows what happens once in 10,000 runs."""
    turns = ROUNDS // GROUPS
    for count in attendance.sum(axis=0):
        assert stats.binomtest(int(count), turns, RATE).pvalue > 1e-4


def test_clients_decide_independently(attendance: np.ndarray) -> None:
    schedule = CyclicPoisson(rate=RATE, groups=GROUPS, assignment="random").bind(Roster(np.full(CLIENTS, 5)), seed=4)
    group = schedule.groups[0]
    correlations = np.corrcoef(attendance[::GROUPS, group].T)[np.triu_indices(len(group), 1)]
    # 400 turns give a standard error of 0.05.
    assert np.abs(correlations).max() < 0.2
    sizes = attendance[::GROUPS].sum(axis=1)
    observed = np.bincount(sizes, minlength=len(group) + 1)
    expected = stats.binom(len(group), RATE).pmf(np.arange(len(group) + 1)) * len(sizes)
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_sums_are_divided_by_the_expected_size_whoever_comes() -> None:
    schedule = CyclicPoisson(rate=0.25, given=((0, 1, 2, 3), (4, 5))).bind(Roster(np.full(6, 2)), seed=0)
    for round in range(20):
        cohort = schedule.cohort(round)
        expected = 1.0 if round % 2 == 0 else 0.5
        assert cohort.expected_size == cohort.divisor == expected
        assert cohort.weights == (1 / expected,) * len(cohort.clients)


@pytest.mark.parametrize("rate", [0.0, 1.5, float("nan")])
def test_rates_outside_their_bounds_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate is"):
        CyclicPoisson(rate=rate)


def test_groups_are_checked_as_those_of_the_cyclic_schedule() -> None:
    with pytest.raises(ValueError, match="groups is 3 but given lists 2 groups"):
        CyclicPoisson(groups=3, given=((0,), (1,)))
