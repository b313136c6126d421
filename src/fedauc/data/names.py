"""Names of clients and groups: one per row, strings or integers, none missing."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedauc.data.blocks import index_type, row_blocks
from fedauc.data.checks import as_array

DENSE = 2
"""Integer names whose range is below this many times the rows are counted, not sorted."""

BLOCK = 1 << 18
"""How many names are numbered at once."""


def as_names(values: Any, what: str, rows: int) -> np.ndarray:
    """One name per row as an array of integers or of strings; whole floats count as integers, the rest as text.

    >>> as_names([3.0, 1.0], "client", 2)
    array([3, 1])
    """
    array = as_array(values, what)
    if array.shape != (rows,):
        raise ValueError(f"{what} has shape {array.shape} and inputs has {rows} rows; give one {what} name per row")
    missing = _missing(array)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise ValueError(f"{what} is missing in {missing.sum()} rows, the first row {row}; name a {what} for each row")
    if array.dtype.kind == "f":
        return _whole(array, what)
    return array if array.dtype.kind in "iuU" else array.astype(str)


def enumerate_names(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct names in sorted order `[N]`, and the place of each row's name among them `[n]`.

    >>> enumerate_names(np.array([7, 3, 7]))
    (array([3, 7]), array([1, 0, 1], dtype=int32))
    """
    if names.dtype.kind in "iu" and len(names):
        low, high = int(names.min()), int(names.max())
        if high - low < DENSE * len(names) and high < 2**63:
            return _count(names, low, high)
    return _merge(names)


def _count(names: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for integers close together, by ticking them off: no sorting, and a fraction of its memory."""
    blocks = list(row_blocks(names.shape, BLOCK))
    seen = np.zeros(high - low + 1, dtype=bool)
    for block in blocks:
        seen[names[block].astype(np.int64) - low] = True
    distinct = (np.flatnonzero(seen) + low).astype(names.dtype)
    number = (np.cumsum(seen) - 1).astype(index_type(len(distinct)))
    place = np.empty(len(names), dtype=number.dtype)
    for block in blocks:
        place[block] = number[names[block].astype(np.int64) - low]
    return distinct, place


def _merge(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for any names, sorted block by block and then across blocks: text is slow to sort, and repeats."""
    blocks = list(row_blocks(names.shape, BLOCK))
    found = [np.unique(names[block], return_inverse=True) for block in blocks]
    distinct = np.unique(np.concatenate([names[:0], *(own for own, _ in found)]))
    place = np.empty(len(names), dtype=index_type(len(distinct)))
    for block, (own, inverse) in zip(blocks, found, strict=True):
        place[block] = np.searchsorted(distinct, own)[inverse.reshape(-1)]
    return distinct, place


def groups_of_clients(place: np.ndarray, names: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The group of each client `[N]` from one label per row; refuses a client whose rows disagree."""
    first = np.unique(place, return_index=True)[1]
    groups: np.ndarray = group[first]
    stray = np.flatnonzero(groups[place] != group)
    if len(stray):
        row = stray[0]
        name, mine, other = names[place[row]].item(), groups[place[row]].item(), group[row].item()
        raise ValueError(f"client {name!r} has rows in groups {mine!r} and {other!r}; give each client one group")
    return groups


def _missing(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        return np.asarray(np.isnan(array))
    if array.dtype.kind == "U":
        return np.asarray(array == "")
    if array.dtype.kind == "O":
        return np.asarray(np.frompyfunc(_absent, 1, 1)(array), dtype=bool)
    return np.zeros(array.shape, dtype=bool)


def _absent(value: Any) -> bool:
    # Only a missing value differs from itself; pandas' NA refuses the comparison, so it goes by its text.
    return value is None or str(value) in ("", "<NA>", "NaT") or (isinstance(value, float) and value != value)


def _whole(array: np.ndarray, what: str) -> np.ndarray:
    broken = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
    if len(broken):
        raise ValueError(
            f"{what} is {array[broken[0]]} in row {broken[0]}; a {what} name must be an integer or a string"
        )
    return array.astype(np.int64)
