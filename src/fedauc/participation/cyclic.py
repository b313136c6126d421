"""Groups of clients take turns: the paper's cyclic participation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedauc import keys
from fedauc.discovery import UnknownName, lookup
from fedauc.fields import option
from fedauc.interfaces import Participation, Roster, Schedule
from fedauc.participation._common import (
    ClientLists,
    SampledSchedule,
    default_groups,
    group_labels,
    nonempty_clients,
    to_integer_rows,
)


@dataclass(frozen=True)
class Cyclic(Participation):
    """N clients in K groups; round r visits group r mod K and draws M of its clients without replacement.

    `groups` is K, and `per_round` is M (None: the whole group). `assignment` says how groups are made:

    - "auto": the groups in `given` if any, else one per label if the clients have labels, else as "random";
    - "metadata": one group per label, in sorted order;
    - "random": nearly equal parts of a keyed permutation (without `groups`: as many as labels, else min(10, N));
    - "given": the tuples in `given`, which are disjoint and contain every non-empty client.

    With `group_column`, the values of that column are the labels, instead of the clients' own.
    With order "reshuffled" each cycle visits the groups in a new random order.

    >>> schedule = Cyclic(given=((0, 1), (2, 3))).bind(Roster(sizes=np.array([5, 5, 5, 5])), seed=0)
    >>> [schedule.cohort(round).clients for round in range(3)]
    [(0, 1), (2, 3), (0, 1)]
    """

    name: ClassVar[str] = "cyclic"

    groups: int | None = option(None, "Number of groups; by default one per group label, or 10.", at_least=1)
    per_round: int | None = option(None, "Clients per round; by default the whole group.", at_least=1)
    assignment: Literal["auto", "metadata", "random", "given"] = option("auto", "How clients are put into groups.")
    order: Literal["fixed", "reshuffled"] = option("fixed", "Whether every cycle visits the groups in the same order.")
    given: tuple[tuple[int, ...], ...] = option((), "The clients of each group, for assignment='given'.")
    group_column: str = option("", "Column of the clients that holds their groups, such as a time zone.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", to_integer_rows("given", self.given))
        super().__post_init__()
        if self.given and self.assignment not in ("auto", "given"):
            raise ValueError(f"assignment is {self.assignment!r} but given lists groups: use 'given', or drop given")
        if self.assignment == "given" and not self.given:
            raise ValueError("assignment is 'given' but given is empty: list each group's clients")
        if self.given and self.groups not in (None, len(self.given)):
            raise ValueError(f"groups is {self.groups} but given lists {len(self.given)} groups: drop groups")
        if self.group_column and (self.given or self.assignment == "random"):
            conflict = "given lists groups" if self.given else "assignment is 'random'"
            raise ValueError(f"group_column is {self.group_column!r} but {conflict}: drop either")

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Put the clients into groups, and check M against the smallest group."""
        if self.group_column:
            clients = clients._replace(groups=_find_column(clients, self.group_column))
        groups = self._assign_groups(clients, seed)
        smallest = int(groups.count_clients().min())
        if self.per_round is not None and self.per_round > smallest:
            raise ValueError(
                f"per_round is {self.per_round}; it must be at most the {smallest} non-empty clients of the smallest "
                f"group: lower per_round, or use fewer groups"
            )
        return _CyclicSchedule(groups, self.per_round, seed, reshuffled=self.order == "reshuffled")

    def explain_groups(self, clients: Roster) -> str:
        """How the groups are made, as the end of a sentence."""
        if self.given:
            return "as the configuration lists them"
        if self.group_column:
            return f"by the column {self.group_column!r}"
        if self.assignment == "metadata" or (self.assignment == "auto" and clients.groups is not None):
            return "by the group labels of the data"
        return "at random"

    def _assign_groups(self, clients: Roster, seed: int) -> ClientLists:
        if self.given:
            return _group_as_given(clients, self.given)
        labelled = self.assignment == "auto" and clients.groups is not None
        if labelled or self.assignment == "metadata":
            return _group_by_label(clients, self.groups, self.group_column)
        return _group_at_random(clients, self.groups or default_groups(clients), seed)


class _CyclicSchedule(SampledSchedule):
    def __init__(self, groups: ClientLists, per_round: int | None, seed: int, *, reshuffled: bool) -> None:
        super().__init__(groups, len(groups), per_round, seed)
        self._reshuffled = reshuffled
        # The order of the last cycle is cached, so that K rounds in sequence cost one shuffle of K groups and not K.
        self._cached_order = (-1, np.empty(0, dtype=np.int64))

    def group_of_round(self, round: int) -> np.ndarray:
        cycle, position = divmod(round, self.cycle_length)
        if not self._reshuffled:
            return self.groups[position]
        cached_cycle, order = self._cached_order
        if cached_cycle != cycle:
            order = keys.sample_indices(self.cycle_length, self.cycle_length, self._seed, "order", cycle)
            self._cached_order = (cycle, order)
        return self.groups[int(order[position])]


# --------------------------------------------------------------------------- assigning the non-empty clients to groups


def _find_column(clients: Roster, name: str) -> np.ndarray:
    """The values of a column of the clients; an unknown one is refused with a way to add it."""
    remedy = f"use --data.roster-columns {name}, or Clients.from_arrays(..., columns={{{name!r}: ...}})"
    if not clients.columns:
        raise ValueError(f"group_column is {name!r}, but the clients have no columns; to give them this one, {remedy}")
    try:
        return lookup("column", name, clients.columns)
    except UnknownName as error:
        raise ValueError(f"group_column: {error}; to give the clients another column, {remedy}") from error


def _group_by_label(clients: Roster, count: int | None, column: str = "") -> ClientLists:
    """One group per label, in the order of the sorted labels, which come from a column if that is named."""
    labels = group_labels(clients)
    if labels is None:
        raise ValueError("clients carry no group label; use assignment='random' with groups=K, or give a group column")
    distinct_labels, label_of_client = labels
    group_count = len(distinct_labels)
    if column and count not in (None, group_count):
        raise ValueError(
            f"groups is {count}; the column {column!r} has {group_count} different values, and each is a group: leave "
            f"out groups, or leave out group_column"
        )
    if count not in (None, group_count):
        raise ValueError(
            f"groups is {count}; the clients carry {group_count} group labels: use groups={group_count}, "
            f"or assignment='random' to ignore the labels"
        )
    nonempty = nonempty_clients(clients)
    return _require_clients(ClientLists(label_of_client[nonempty], nonempty, group_count), distinct_labels.tolist())


def _group_at_random(clients: Roster, count: int, seed: int) -> ClientLists:
    """`count` groups whose sizes differ by at most one, from a keyed permutation of the clients."""
    nonempty = nonempty_clients(clients)
    if count > len(nonempty):
        raise ValueError(f"groups is {count}; it must be at most the {len(nonempty)} non-empty clients: lower groups")
    permutation = keys.sample_indices(len(nonempty), len(nonempty), seed, "groups")
    # Position i of the permutation goes to group floor(i * count / N), which gives parts of nearly equal size.
    return ClientLists(np.arange(len(nonempty)) * count // len(nonempty), nonempty[permutation], count)


def _group_as_given(clients: Roster, groups: Sequence[Sequence[int]]) -> ClientLists:
    """The groups that a user lists: they are disjoint, and every non-empty client is in one of them."""
    group_of_listed = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    listed = np.array([client for group in groups for client in group], dtype=np.int64)
    total = len(clients.sizes)
    unknown = listed[(listed < 0) | (listed >= total)]
    if len(unknown):
        raise ValueError(f"given lists client {unknown[0]}; clients run from 0 to {total - 1}: correct the index")
    distinct, times = np.unique(listed, return_counts=True)
    if len(distinct) < len(listed):
        raise ValueError(
            f"given lists {_name_clients(distinct[times > 1])} more than once: put each client in one group"
        )
    nonempty = nonempty_clients(clients)
    missing = np.setdiff1d(nonempty, listed)
    if len(missing):
        raise ValueError(f"given leaves out non-empty {_name_clients(missing)}: put each in a group")
    holds_data = np.isin(listed, nonempty)
    return _require_clients(
        ClientLists(group_of_listed[holds_data], listed[holds_data], len(groups)), list(range(len(groups)))
    )


def _require_clients(groups: ClientLists, names: list[object]) -> ClientLists:
    """Refuse groups without clients."""
    empty = np.flatnonzero(groups.count_clients() == 0)
    if len(empty):
        raise ValueError(f"group {names[empty[0]]!r} has no client with data; it must have at least 1: drop the group")
    return groups


def _name_clients(clients: np.ndarray) -> str:
    """The first five clients, and how many more there are."""
    shown = ", ".join(map(str, clients[:5]))
    noun = "client" if len(clients) == 1 else "clients"
    return f"{noun} {shown}" + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
