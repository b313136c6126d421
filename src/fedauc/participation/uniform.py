"""A fresh uniform draw from all clients every round: the random-sampling baselines' participation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._clients import check_count, default_groups, nonempty_clients
from fedauc.participation._cohorts import CohortSampler, check_round, equal_cohort


@dataclass(frozen=True)
class Uniform(Participation):
    """M clients uniformly without replacement from all N, every round.

    `groups` is the cycle length, what K groups would give (None: the number of group labels, or min(10, N) without);
    `per_round` is M (None: ceil(N / groups), what a cyclic schedule of whole groups visits on average).

    >>> schedule = Uniform(per_round=2).bind(Roster(sizes=np.array([5, 5, 0, 5])), seed=0)
    >>> len(schedule.cohort(0).clients), schedule.cycle_length
    (2, 3)
    """

    name: ClassVar[str] = "uniform"

    per_round: int | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        check_count("per_round", self.per_round)
        check_count("groups", self.groups)

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Fill what is left open from the clients and check M against N."""
        holding = nonempty_clients(clients)
        cycle_length = self.groups or default_groups(clients)
        per_round = self.per_round or -(-len(holding) // cycle_length)
        if per_round > len(holding):
            raise ValueError(
                f"per_round is {per_round}; it must be at most the {len(holding)} non-empty clients: lower per_round"
            )
        return _UniformSchedule(holding, per_round, cycle_length, seed)


class _UniformSchedule(Schedule):
    def __init__(self, holding: np.ndarray, per_round: int, cycle_length: int, seed: int) -> None:
        self.groups = (holding,)
        self.cycle_length = cycle_length
        self._sampler = CohortSampler(self._group_of_round, per_round, seed)

    def cohort(self, round: int) -> Cohort:
        round = check_round(round)
        return equal_cohort(round, self._sampler.draw_clients(round))

    def _group_of_round(self, round: int) -> np.ndarray:
        return self.groups[0]
