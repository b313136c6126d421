"""What the schedules share: lists of clients, the draw of a cohort, and what the roster says about the clients."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from fedauc import keys
from fedauc.interfaces import Cohort, Roster, Schedule

DEFAULT_GROUPS = 10
"""The number of groups where neither the configuration nor the labels of the clients give one."""

ROUNDS_AHEAD, CLIENTS_AHEAD = 16, 4096
"""Limits on the rounds, and on the clients in them, that are drawn at once: that costs little more than one round."""


class ClientLists(Sequence["np.ndarray"]):
    """Lists of clients of unequal length, kept as two sorted arrays; list i holds the clients whose owner is i.

    There is no Python object per list or per client, and a lookup is two bisections.

    >>> lists = ClientLists(owners=np.array([1, 0, 1]), clients=np.array([9, 4, 7]), length=3)
    >>> [clients.tolist() for clients in lists]
    [[4], [7, 9], []]
    """

    def __init__(self, owners: np.ndarray, clients: np.ndarray, length: int) -> None:
        order = np.lexsort((clients, owners))
        self._owners = np.asarray(owners, dtype=np.int64)[order]
        self._clients = np.asarray(clients, dtype=np.int64)[order]
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        owner = range(self._length)[index]
        return self._clients[self._owners.searchsorted(owner, "left") : self._owners.searchsorted(owner, "right")]

    def count_clients(self) -> np.ndarray:
        """The number of clients of each list, `[length]`."""
        return np.bincount(self._owners, minlength=self._length)


class SampledSchedule(Schedule):
    """Draws `count` clients of each round's group without replacement, in ascending order; None takes the whole group.

    The key of a draw names the round and not the schedule, so two schedules with the same group draw the same cohort.
    """

    def __init__(self, groups: Sequence[np.ndarray], cycle_length: int, count: int | None, seed: int) -> None:
        self.groups, self.cycle_length = groups, cycle_length
        self._count, self._seed = count, seed
        self._drawn: dict[int, np.ndarray] = {}

    def group_of_round(self, round: int) -> np.ndarray:
        """The group whose turn it is; here there is only one."""
        return self.groups[0]

    def cohort(self, round: int) -> Cohort:
        """The clients of one round."""
        round = check_round(round)
        if self._count is None:
            return make_cohort(round, self.group_of_round(round))
        if round not in self._drawn:
            rounds = range(round, round + max(1, min(ROUNDS_AHEAD, CLIENTS_AHEAD // self._count)))
            groups = [self.group_of_round(number) for number in rounds]
            sizes = np.array([len(group) for group in groups])
            indices = keys.sample_client_indices(sizes, self._count, rounds, self._seed, "cohort")
            draws = zip(rounds, groups, indices, strict=True)
            self._drawn = {number: np.sort(group[chosen]) for number, group, chosen in draws}
        return make_cohort(round, self._drawn[round])


def make_cohort(round: int, clients: np.ndarray, absent: tuple[int, ...] = ()) -> Cohort:
    """A cohort whose M clients have the same weight, 1/M."""
    return Cohort(int(round), tuple(clients.tolist()), (1 / max(len(clients), 1),) * len(clients), absent)


def check_round(round: int) -> int:
    """The round as a Python int; a negative one is refused."""
    if operator.index(round) < 0:
        raise ValueError(f"round is {round}; it must be at least 0: rounds count from 0")
    return int(round)


def nonempty_clients(clients: Roster) -> np.ndarray:
    """The clients that hold data, in ascending order, int64 `[N]`.

    >>> nonempty_clients(Roster(sizes=np.array([3, 0, 5]))).tolist()
    [0, 2]
    """
    nonempty = np.flatnonzero(np.asarray(clients.sizes) > 0)
    if len(nonempty) == 0:
        raise ValueError(f"all {len(clients.sizes)} clients are empty; at least 1 must hold data: give it rows")
    return nonempty


def group_labels(clients: Roster) -> tuple[np.ndarray, np.ndarray] | None:
    """The sorted distinct group labels, and the index of each client's label; None where clients have no labels."""
    if clients.groups is None:
        return None
    labels = np.asarray(clients.groups)
    if labels.shape != (len(clients.sizes),):
        raise ValueError(f"group labels have shape {labels.shape}; give one to each of {len(clients.sizes)} clients")
    if labels.dtype.kind == "f" and np.isnan(labels).any():
        raise ValueError(f"client {int(np.isnan(labels).argmax())} has no group label (nan); label every client")
    try:
        names, indices = np.unique(labels, return_inverse=True)
    except TypeError:
        types = ", ".join(sorted({type(label).__name__ for label in labels.tolist()}))
        raise ValueError(f"group labels mix {types}, which have no order: label every client in one type") from None
    return names, indices


def default_groups(clients: Roster) -> int:
    """The number of groups where none is given: one per label, or min(10, N) without labels."""
    labels = group_labels(clients)
    return len(labels[0]) if labels is not None else min(DEFAULT_GROUPS, len(nonempty_clients(clients)))


def to_integer_rows(name: str, rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Tuples of Python ints from rows of any integers, so that a configuration read from JSON can be hashed.

    >>> to_integer_rows("given", [[0, np.int64(1)], [2]])
    ((0, 1), (2,))
    """
    try:
        return tuple(tuple(operator.index(entry) for entry in row) for row in rows)
    except TypeError:
        raise ValueError(f"{name} is {rows!r}; it must hold rows of integers: change {name}") from None
