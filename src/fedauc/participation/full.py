"""Every client takes part in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._common import check_round, make_cohort, nonempty_clients


@dataclass(frozen=True)
class Full(Participation):
    """Every client that holds data takes part in every round; a cycle is one round.

    >>> Full().bind(Roster(sizes=np.array([5, 0, 5])), seed=0).cohort(7)
    Cohort(round=7, clients=(0, 2), weights=(0.5, 0.5), absent=())
    """

    name: ClassVar[str] = "full"

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """A schedule of all clients that hold data."""
        return _FullSchedule(nonempty_clients(clients))


class _FullSchedule(Schedule):
    def __init__(self, clients: np.ndarray) -> None:
        self.groups = (clients,)
        self.cycle_length = 1

    def cohort(self, round: int) -> Cohort:
        return make_cohort(check_round(round), self.groups[0])
