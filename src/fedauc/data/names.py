"""Names of clients and groups: one per row, strings or integers, none missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedauc.data.checks import as_array, name_row
from fedauc.data.io.memory import index_type, row_blocks

DENSE = 2
"""Integer names whose range is below this many times the rows are counted instead of sorted."""

BLOCK = 1 << 18
"""How many names are numbered at once."""


def as_names(values: Any, column: str, rows: int) -> np.ndarray:
    """One name per row as integers or strings; floats with integer values become integers, everything else text.

    >>> as_names([3.0, 1.0], "client", 2)
    array([3, 1])
    """
    names = as_array(values, column)
    if names.shape != (rows,):
        raise ValueError(f"{column} has shape {names.shape} and inputs has {rows} rows; give one {column} name per row")
    missing = find_missing_names(names)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise ValueError(
            f"{column} is missing in {missing.sum()} rows, the first {name_row(row)}; name a {column} for each row"
        )
    if names.dtype.kind != "f":
        return names if names.dtype.kind in "iuU" else names.astype(str)
    fractional = np.flatnonzero(~np.isfinite(names) | (names != np.floor(names)))
    if len(fractional):
        row = fractional[0]
        raise ValueError(f"{column} is {names[row]} in {name_row(row)}; a {column} name must be an integer or a string")
    return names.astype(np.int64)


def enumerate_names(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct names in sorted order `[N]`, and the index of each row's name among them `[n]`.

    >>> enumerate_names(np.array([7, 3, 7]))
    (array([3, 7]), array([1, 0, 1], dtype=int32))
    """
    if names.dtype.kind in "iu" and len(names):
        low, high = int(names.min()), int(names.max())
        if high - low < DENSE * len(names) and high < 2**63:
            return _enumerate_dense(names, low, high)
    return _enumerate_sorted(names)


def _enumerate_dense(names: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """For integers in a small range: marking the ones that occur needs no sorting and a fraction of its memory."""
    blocks = list(row_blocks(names.shape, BLOCK))
    occurs = np.zeros(high - low + 1, dtype=bool)
    for block in blocks:
        occurs[names[block].astype(np.int64) - low] = True
    distinct = (np.flatnonzero(occurs) + low).astype(names.dtype)
    number = (np.cumsum(occurs) - 1).astype(index_type(len(distinct)))
    index = np.empty(len(names), dtype=number.dtype)
    for block in blocks:
        index[block] = number[names[block].astype(np.int64) - low]
    return distinct, index


def _enumerate_sorted(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For any names: sorted within blocks and then across blocks, because text is slow to sort and repeats."""
    blocks = list(row_blocks(names.shape, BLOCK))
    sorted_blocks = [np.unique(names[block], return_inverse=True) for block in blocks]
    distinct = np.unique(np.concatenate([names[:0], *(block_names for block_names, _ in sorted_blocks)]))
    index = np.empty(len(names), dtype=index_type(len(distinct)))
    for block, (block_names, inverse) in zip(blocks, sorted_blocks, strict=True):
        index[block] = np.searchsorted(distinct, block_names)[inverse.reshape(-1)]
    return distinct, index


def find_client_groups(client: np.ndarray, names: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The group of each client `[N]` from the client number and group of each row; refuses rows that disagree."""
    first_rows = np.unique(client, return_index=True)[1]
    groups: np.ndarray = group[first_rows]
    conflicts = np.flatnonzero(groups[client] != group)
    if len(conflicts):
        row = conflicts[0]
        name, expected, actual = names[client[row]].item(), groups[client[row]].item(), group[row].item()
        raise ValueError(f"client {name!r} has rows in groups {expected!r} and {actual!r}; give each client one group")
    return groups


def find_client_values(client: np.ndarray, names: np.ndarray, column: str, values: Any) -> np.ndarray:
    """The value of a column for each client `[N]`, numbers or text, from one value per row; refuses rows that disagree.

    >>> find_client_values(np.array([1, 0, 1]), np.array(["ann", "bob"]), "zone", [3, 2, 3])
    array([2, 3])
    """
    array = as_array(values, column)
    if array.shape != client.shape:
        raise ValueError(
            f"column {column!r} has shape {array.shape}; give one value for each of the {len(client)} rows"
        )
    missing = find_missing_names(array)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise ValueError(f"column {column!r} is missing in {missing.sum()} rows, the first {name_row(row)}; fill it in")
    array = array if array.dtype.kind in "iufU" else array.astype(str)
    client_values: np.ndarray = array[np.unique(client, return_index=True)[1]]
    conflicts = np.flatnonzero(client_values[client] != array)
    if len(conflicts):
        row = conflicts[0]
        name, expected, actual = names[client[row]].item(), client_values[client[row]].item(), array[row].item()
        raise ValueError(
            f"client {name!r} has {column} {expected!r} and {actual!r}; give all rows of a client the same {column}"
        )
    return client_values


def select_values(values: Mapping[int | str, Any], names: np.ndarray) -> np.ndarray:
    """The values of the clients of these names `[N]`."""
    return np.array([values[name] for name in names.tolist()])


def find_missing_names(names: np.ndarray) -> np.ndarray:
    """Which names are missing: NaN, None, pandas' NA, or an empty text."""
    if names.dtype.kind == "f":
        return np.asarray(np.isnan(names))
    if names.dtype.kind == "U":
        return np.asarray(names == "")
    if names.dtype.kind == "O":
        return np.asarray(np.frompyfunc(_is_missing, 1, 1)(names), dtype=bool)
    return np.zeros(names.shape, dtype=bool)


def _is_missing(value: Any) -> bool:
    # Only NaN differs from itself; pandas' NA refuses the comparison and is recognised by its text.
    return value is None or str(value) in ("", "<NA>", "NaT") or (isinstance(value, float) and value != value)
