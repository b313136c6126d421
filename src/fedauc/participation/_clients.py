"""What the schedules share: which clients hold data, what their group labels say, and checks of parameters."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import numpy as np

from fedauc.interfaces import Roster

DEFAULT_GROUPS = 10
"""The paper's K, where neither the configuration nor the clients' labels say."""


def nonempty_clients(clients: Roster) -> np.ndarray:
    """The clients that hold data, ascending: int64 `[N]`.

    >>> nonempty_clients(Roster(sizes=np.array([3, 0, 5]))).tolist()
    [0, 2]
    """
    holding = np.flatnonzero(np.asarray(clients.sizes) > 0)
    if len(holding) == 0:
        raise ValueError(f"all {len(clients.sizes)} clients are empty; at least 1 must hold data: give it rows")
    return holding


def group_labels(clients: Roster) -> tuple[np.ndarray, np.ndarray] | None:
    """The distinct group labels in order, and each client's place among them; None where clients carry no label."""
    if clients.groups is None:
        return None
    given = np.asarray(clients.groups)
    if given.shape != (len(clients.sizes),):
        raise ValueError(f"group labels have shape {given.shape}; give one to each of {len(clients.sizes)} clients")
    if given.dtype.kind == "f" and np.isnan(given).any():
        raise ValueError(f"client {int(np.isnan(given).argmax())} has no group label (nan); label every client")
    try:
        names, places = np.unique(given, return_inverse=True)
    except TypeError:
        types = ", ".join(sorted({type(label).__name__ for label in given.tolist()}))
        raise ValueError(f"group labels mix {types}, which have no order: label every client in one type") from None
    return names, places


def default_groups(clients: Roster) -> int:
    """The number of groups where none is asked for: one per label; without labels min(10, N)."""
    known = group_labels(clients)
    return len(known[0]) if known is not None else min(DEFAULT_GROUPS, len(nonempty_clients(clients)))


def to_integer_rows(name: str, rows: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Rows of Python ints from any integers, so that a configuration read from JSON hashes and serialises.

    >>> to_integer_rows("given", [[0, np.int64(1)], [2]])
    ((0, 1), (2,))
    """
    try:
        return tuple(tuple(operator.index(entry) for entry in row) for row in rows)
    except TypeError:
        raise ValueError(f"{name} is {rows!r}; it must hold rows of integers: change {name}") from None


def check_count(name: str, value: int | None) -> None:
    """Refuse anything but None or a Python int of at least 1 (numpy's would not serialise)."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{name} is {value!r}; it must be a Python int of at least 1: change {name}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(repr, choices))}")
