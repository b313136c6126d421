"""From clients to a cohort: the one keyed draw of all schedules, and the uniform weights."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from fedauc import keys
from fedauc.interfaces import Cohort

AHEAD, MOST = 16, 4096
"""Rounds that are drawn at once, and the clients in them: in one pass they cost little more than one round."""


class CohortSampler:
    """`count` clients of each round's ascending group without replacement, ascending; None takes the whole group.

    The key names the round and not the schedule, so two schedules that face the same group draw the same cohort.
    """

    def __init__(self, group: Callable[[int], np.ndarray], count: int | None, seed: int) -> None:
        self._group_of_round, self._count, self._seed = group, count, seed
        self._drawn: dict[int, np.ndarray] = {}

    def draw_clients(self, round: int) -> np.ndarray:
        """Those of one round."""
        if self._count is None:
            return self._group_of_round(round)
        if round not in self._drawn:
            self._drawn = self._draw_rounds(self._count, range(round, round + max(1, min(AHEAD, MOST // self._count))))
        return self._drawn[round]

    def _draw_rounds(self, count: int, rounds: range) -> dict[int, np.ndarray]:
        groups = [self._group_of_round(round) for round in rounds]
        places = keys.sample_client_indices(
            np.array([len(group) for group in groups]), count, rounds, self._seed, "cohort"
        )
        return {round: np.sort(group[chosen]) for round, group, chosen in zip(rounds, groups, places, strict=True)}


def equal_cohort(round: int, clients: np.ndarray, absent: tuple[int, ...] = ()) -> Cohort:
    """A cohort whose clients weigh the same: each 1/M."""
    return Cohort(int(round), tuple(clients.tolist()), (1 / max(len(clients), 1),) * len(clients), absent)


def check_round(round: int) -> int:
    """The round as a Python int, refused below 0."""
    if operator.index(round) < 0:
        raise ValueError(f"round is {round}; it must be at least 0: rounds count from 0")
    return int(round)
