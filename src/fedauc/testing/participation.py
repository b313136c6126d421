"""The suite of a participation: its cohorts are valid and a pure function of the seed and the round."""

from __future__ import annotations

import math

import numpy as np

from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.testing._expectations import check_configuration, expect, untouched_generators

CLIENTS = 30
SIZES = np.where(np.arange(CLIENTS) % 10 == 0, 0, 4)
LABELS = np.arange(CLIENTS) % 3
"""30 clients, of which every tenth is empty (0, 10, 20), in three groups of 9 that hold data."""

ROUNDS = 24


def check_participation(participation: Participation, clients: Roster | None = None, rounds: int = ROUNDS) -> None:
    """Check a participation for clients of your own, or for 30 clients without and with group labels."""
    check_configuration(participation, Participation)
    for roster in [clients] if clients is not None else [Roster(SIZES), Roster(SIZES, LABELS)]:
        check_cohorts(participation, roster, rounds)
        check_groups(participation, roster)
        check_purity(participation, roster, rounds)


def list_cohorts(schedule: Schedule, rounds: int = ROUNDS) -> list[Cohort]:
    """The first cohorts."""
    return [schedule.cohort(round) for round in range(rounds)]


def check_cohorts(participation: Participation, clients: Roster, rounds: int = ROUNDS) -> None:
    """Cohorts name clients that hold data, once each and in order, with weights that sum to 1.

    Where a cohort has an expected size, each weight is one over it.
    """
    holding = set(np.flatnonzero(clients.sizes).tolist())
    for round, cohort in enumerate(list_cohorts(participation.bind(clients, 0), rounds)):
        where = f"round {round}"
        expect(cohort.round == round, f"the cohort of {where} says that it is of round {cohort.round}")
        are_integers = all(type(client) is int for client in (*cohort.clients, *cohort.absent))
        expect(are_integers, f"{where}: clients must be plain integers, not those of numpy")
        expect(list(cohort.clients) == sorted(set(cohort.clients)), f"{where}: clients must ascend, each once")
        expect(set(cohort.clients) | set(cohort.absent) <= holding, f"{where}: a client without rows takes part")
        expect(not set(cohort.clients) & set(cohort.absent), f"{where}: a client is present and absent")
        expect(len(cohort.weights) == len(cohort.clients), f"{where}: every client needs one weight")
        if cohort.expected_size is not None:
            fixed = all(math.isclose(weight, 1 / cohort.expected_size) for weight in cohort.weights)
            expect(fixed, f"{where}: every weight must be one over the expected size {cohort.expected_size}")
            continue
        # A few dozen terms of relative error 2**-53 each: far below 1e-14. Only an empty cohort sums to 0.
        total = sum(cohort.weights)
        expect(math.isclose(total, bool(cohort.clients), abs_tol=1e-14), f"{where}: the weights sum to {total}, not 1")


def check_groups(participation: Participation, clients: Roster) -> None:
    """Every client that holds data is in one group."""
    schedule = participation.bind(clients, 0)
    listed = [client for group in schedule.groups for client in group.tolist()]
    expect(sorted(listed) == np.flatnonzero(clients.sizes).tolist(), "the groups must split the clients that hold data")
    expect(schedule.cycle_length >= 1, f"cycle_length is {schedule.cycle_length}; it must be at least 1")
    integers = all(isinstance(group, np.ndarray) and group.dtype == np.int64 for group in schedule.groups)
    expect(integers, "the groups must be arrays of int64")


def check_purity(participation: Participation, clients: Roster, rounds: int = ROUNDS) -> None:
    """No answer depends on an earlier question, on a global generator, or on a change of the roster."""
    with untouched_generators("the participation"):
        expected = list_cohorts(participation.bind(clients, 3), rounds)
    again = participation.bind(clients, 3)
    backwards = [again.cohort(round) for round in reversed(range(rounds))]
    expect(backwards == expected[::-1], "a cohort depends on the rounds that were asked for before")
    middle = rounds // 3
    expect(again.cohort(middle) == again.cohort(middle) == expected[middle], "a cohort changes when it is asked twice")
    fresh = participation.bind(clients, 3).cohort(np.int64(rounds - 1))  # type: ignore[arg-type]
    expect(fresh == expected[-1], "a cohort depends on the rounds that were asked for before")
    locked = clients._replace(
        sizes=_lock_array(clients.sizes), groups=None if clients.groups is None else _lock_array(clients.groups)
    )
    expect(list_cohorts(participation.bind(locked, 3), rounds) == expected, "the roster must only be read")


def _lock_array(array: np.ndarray) -> np.ndarray:
    """A copy that cannot be written to."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy
