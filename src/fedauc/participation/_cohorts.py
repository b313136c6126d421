"""From clients to a cohort: the one keyed draw of all schedules, and the uniform weights."""

from __future__ import annotations

import operator

import numpy as np

from fedauc import keys
from fedauc.interfaces import Cohort


def draw(group: np.ndarray, count: int | None, seed: int, round: int) -> np.ndarray:
    """`count` clients of an ascending group without replacement, ascending; None takes the whole group.

    The key names the round and not the schedule, so two schedules that face the same group draw the same cohort.
    """
    if count is None or count == len(group):
        return group
    return np.sort(group[keys.sample(len(group), count, seed, "cohort", round)])


def equal_cohort(round: int, clients: np.ndarray, absent: tuple[int, ...] = ()) -> Cohort:
    """A cohort whose clients weigh the same: each 1/M."""
    return Cohort(int(round), tuple(clients.tolist()), (1 / max(len(clients), 1),) * len(clients), absent)


def checked(round: int) -> int:
    """The round as a Python int, refused below 0."""
    if operator.index(round) < 0:
        raise ValueError(f"round is {round}; it must be at least 0: rounds count from 0")
    return int(round)
