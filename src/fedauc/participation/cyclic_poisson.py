"""Groups take turns, and every client of the group decides by its own coin whether it takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedauc import keys
from fedauc.fields import option
from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._common import check_round, to_integer_rows
from fedauc.participation.cyclic import Cyclic


@dataclass(frozen=True)
class CyclicPoisson(Participation):
    """Round r visits group r mod K; each client of the group takes part with probability `rate`, independently.

    Sums are divided by the expected number of clients, rate times the size of the group, and not by how many came. Both
    are what amplification by sampling needs (`fedauc.privacy.accounting`): whether one client takes part tells nothing
    about any other, and the denominator does not depend on it. A cohort may be empty. Groups are made as in `cyclic`.

    >>> schedule = CyclicPoisson(rate=0.5, given=((0, 1), (2, 3))).bind(Roster(sizes=np.array([5, 5, 5, 5])), seed=0)
    >>> [schedule.cohort(round).clients for round in range(4)], schedule.cohort(0).expected_size
    ([(0, 1), (), (0,), ()], 1.0)
    """

    name: ClassVar[str] = "cyclic-poisson"

    rate: float = option(0.1, "Probability that a client takes part when its group has its turn.", above=0, at_most=1)
    groups: int | None = option(None, "Number of groups; by default one per group label, or 10.", at_least=1)
    assignment: Literal["auto", "metadata", "random", "given"] = option("auto", "How clients are put into groups.")
    given: tuple[tuple[int, ...], ...] = option((), "The clients of each group, for assignment='given'.")
    group_column: str = option("", "Column of the clients that holds their groups, such as a time zone.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", to_integer_rows("given", self.given))
        super().__post_init__()
        self._make_cyclic()

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Put the clients into groups."""
        return _PoissonSchedule(self._make_cyclic().bind(clients, seed).groups, self.rate, seed)

    def explain_groups(self, clients: Roster) -> str:
        """How the groups are made, as the end of a sentence."""
        return self._make_cyclic().explain_groups(clients)

    def _make_cyclic(self) -> Cyclic:
        """The schedule with the same groups; it checks the parameters that say how groups are made."""
        return Cyclic(groups=self.groups, assignment=self.assignment, given=self.given, group_column=self.group_column)


class _PoissonSchedule(Schedule):
    def __init__(self, groups: Sequence[np.ndarray], rate: float, seed: int) -> None:
        self.groups, self.cycle_length = groups, len(groups)
        self._rate, self._seed = rate, seed

    def cohort(self, round: int) -> Cohort:
        group = self.groups[check_round(round) % self.cycle_length]
        words = keys.client_words(group, self._seed, "poisson", round)
        # 53 bits are what a float64 in [0, 1) holds; rate 1 takes every client.
        chosen = group[(words >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self._rate]
        expected = self._rate * len(group)
        return Cohort(int(round), tuple(chosen.tolist()), (1 / expected,) * len(chosen), (), expected)
