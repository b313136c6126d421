"""Clients in groups that take turns: the paper's cyclic participation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedauc import keys
from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation import _groups
from fedauc.participation._clients import check_choice, check_count, default_groups, to_integer_rows
from fedauc.participation._cohorts import CohortSampler, check_round, equal_cohort
from fedauc.participation._ragged import ClientLists


@dataclass(frozen=True)
class Cyclic(Participation):
    """N clients in K groups; round r visits group r mod K and draws M of its clients without replacement.

    `groups` is K, `per_round` is M (None: the whole group). `assignment` says how groups are made:

    - "auto": the groups in `given` if any, else one per label if the clients carry labels, else as "random";
    - "metadata": one per label, in sorted order;
    - "random": nearly equal parts of a keyed permutation (`groups` left open: as many as labels, else min(10, N));
    - "given": the tuples in `given`, disjoint, covering every non-empty client.

    With order "reshuffled" each cycle visits the groups in a new keyed order.

    >>> schedule = Cyclic(given=((0, 1), (2, 3))).bind(Roster(sizes=np.array([5, 5, 5, 5])), seed=0)
    >>> [schedule.cohort(round).clients for round in range(3)]
    [(0, 1), (2, 3), (0, 1)]
    """

    name: ClassVar[str] = "cyclic"

    groups: int | None = None
    per_round: int | None = None
    assignment: Literal["auto", "metadata", "random", "given"] = "auto"
    order: Literal["fixed", "reshuffled"] = "fixed"
    given: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", to_integer_rows("given", self.given))
        check_count("groups", self.groups)
        check_count("per_round", self.per_round)
        check_choice("assignment", self.assignment, ("auto", "metadata", "random", "given"))
        check_choice("order", self.order, ("fixed", "reshuffled"))
        self._check_given()

    def _check_given(self) -> None:
        if self.given and self.assignment not in ("auto", "given"):
            raise ValueError(f"assignment is {self.assignment!r} but given lists groups: use 'given', or drop given")
        if self.assignment == "given" and not self.given:
            raise ValueError("assignment is 'given' but given is empty: list each group's clients")
        if self.given and self.groups not in (None, len(self.given)):
            raise ValueError(f"groups is {self.groups} but given lists {len(self.given)} groups: drop groups")

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Put the clients into groups and check M against the smallest."""
        groups = self._assign_groups(clients, seed)
        smallest = int(groups.client_counts().min())
        if self.per_round is not None and self.per_round > smallest:
            raise ValueError(
                f"per_round is {self.per_round}; it must be at most the {smallest} non-empty clients of the smallest "
                f"group: lower per_round, or use fewer groups"
            )
        return _CyclicSchedule(groups, self.per_round, seed, reshuffled=self.order == "reshuffled")

    def _assign_groups(self, clients: Roster, seed: int) -> ClientLists:
        if self.given:
            return _groups.group_as_given(clients, self.given)
        labelled = self.assignment == "auto" and clients.groups is not None
        if labelled or self.assignment == "metadata":
            return _groups.group_by_label(clients, self.groups)
        return _groups.group_at_random(clients, self.groups or default_groups(clients), seed)


class _CyclicSchedule(Schedule):
    def __init__(self, groups: ClientLists, per_round: int | None, seed: int, *, reshuffled: bool) -> None:
        self.groups = groups
        self.cycle_length = len(groups)
        self._seed = seed
        self._reshuffled = reshuffled
        # One cycle's order is kept, so that K rounds in sequence cost one shuffle of K and not K.
        self._order = (-1, np.empty(0, dtype=np.int64))
        self._sampler = CohortSampler(self._group_of_round, per_round, seed)

    def cohort(self, round: int) -> Cohort:
        round = check_round(round)
        return equal_cohort(round, self._sampler.draw_clients(round))

    def _group_of_round(self, round: int) -> np.ndarray:
        return self.groups[self._group_index(*divmod(round, self.cycle_length))]

    def _group_index(self, cycle: int, place: int) -> int:
        if not self._reshuffled:
            return place
        kept, order = self._order
        if kept != cycle:
            order = keys.sample_indices(self.cycle_length, self.cycle_length, self._seed, "order", cycle)
            self._order = (cycle, order)
        return int(order[place])
