"""Every client takes part in every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedauc.interfaces import Participation, Roster, Schedule
from fedauc.participation._common import SampledSchedule, nonempty_clients


@dataclass(frozen=True)
class Full(Participation):
    """Every client that holds data takes part in every round; a cycle is one round.

    >>> import numpy as np
    >>> Full().bind(Roster(sizes=np.array([5, 0, 5])), seed=0).cohort(7)
    Cohort(round=7, clients=(0, 2), weights=(0.5, 0.5), absent=(), expected_size=None)
    """

    name: ClassVar[str] = "full"

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """A schedule of all clients that hold data."""
        return SampledSchedule([nonempty_clients(clients)], 1, None, seed)
