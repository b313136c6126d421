"""Every round draws from all clients: the participation of the random-sampling baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedauc.fields import option
from fedauc.interfaces import Participation, Roster, Schedule
from fedauc.participation._common import SampledSchedule, default_groups, nonempty_clients


@dataclass(frozen=True)
class Uniform(Participation):
    """M of all N clients, drawn uniformly without replacement in every round.

    `groups` is the length of a cycle, as K groups would give it (None: the number of group labels, or min(10, N));
    `per_round` is M (None: ceil(N / groups), which a cyclic schedule of whole groups visits on average).

    >>> import numpy as np
    >>> schedule = Uniform(per_round=2).bind(Roster(sizes=np.array([5, 5, 0, 5])), seed=0)
    >>> len(schedule.cohort(0).clients), schedule.cycle_length
    (2, 3)
    """

    name: ClassVar[str] = "uniform"

    per_round: int | None = option(None, "Clients per round; by default all clients over a cycle.", at_least=1)
    groups: int | None = option(None, "Rounds per cycle; by default one per group label, or 10.", at_least=1)

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Derive what is not set from the clients, and check M against N."""
        nonempty = nonempty_clients(clients)
        cycle_length = self.groups or default_groups(clients)
        per_round = self.per_round or -(-len(nonempty) // cycle_length)
        if per_round > len(nonempty):
            raise ValueError(
                f"per_round is {per_round}; it must be at most the {len(nonempty)} non-empty clients: lower per_round"
            )
        return SampledSchedule([nonempty], cycle_length, per_round, seed)
