"""Every client's rows in one tensor, with an index: a million clients cost nothing but their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.data import frames, laid_out, readers
from fedauc.data.blocks import index_type, row_blocks
from fedauc.data.checks import as_array, as_inputs, as_labels, check_classes, check_evaluable, label_tensor
from fedauc.data.items import stack_items
from fedauc.data.mapped import give_back
from fedauc.data.names import as_names, enumerate_names, groups_of_clients
from fedauc.interfaces import Census, Roster

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 1 << 18
"""How many rows are sorted at once."""


class Examples(NamedTuple):
    """Rows to evaluate on: inputs `[n, ...]`, float labels 0/1 `[n]`, and each row's client for per-client metrics."""

    inputs: Tensor
    labels: Tensor
    clients: np.ndarray | None = None

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Examples:
        """The same rows in another float type (uint8 inputs stay) or on another device."""
        return self._replace(inputs=_move(self.inputs, dtype, device), labels=_move(self.labels, dtype, device))


def examples(inputs: Any, labels: Any, clients: Any = None) -> Examples:
    """Checked examples from arrays, tensors or nested lists; two rows of each class must be there.

    >>> examples([[0.5], [1.5], [2.5], [3.5]], [0, 1, 0, 1]).labels
    tensor([0., 1., 0., 1.], dtype=torch.float64)
    """
    rows = as_inputs(inputs)
    classes = as_labels(labels, len(rows))
    check_evaluable(classes)
    names = None if clients is None else as_names(clients, "client", len(rows))
    return Examples(rows, label_tensor(classes, rows), names)


@dataclass(frozen=True, eq=False, repr=False)
class Clients:
    """The training rows of N clients.

    `rows` lists row numbers client by client, positives first; client m's are `rows[offsets[m]:offsets[m + 1]]`.
    They are int32 where that is enough. Memory is O(rows + clients); `names` and `groups` are arrays `[N]`.

    >>> clients = Clients.from_arrays([[1.0], [2.0], [3.0]], [0, 1, 0], ["ann", "ann", "bob"])
    >>> len(clients), clients.positives(0).tolist(), clients.negatives(0).tolist()
    (2, [1], [0])
    """

    inputs: Tensor
    labels: Tensor
    rows: np.ndarray
    offsets: np.ndarray
    census: Census
    names: np.ndarray
    groups: np.ndarray | None = None

    @classmethod
    def from_arrays(cls, inputs: Any, labels: Any, client: Any, group: Any = None) -> Clients:
        """Clients from one client name per row, and perhaps one group label, the same for all rows of a client.

        Clients are numbered in the sorted order of their names. Inputs of floats or bytes are shared, not copied; for a
        table larger than memory give `np.load(path, mmap_mode="r")`.
        """
        return _settled(_by_name(as_inputs(inputs), labels, client, group))

    @classmethod
    def from_assignment(cls, inputs: Any, labels: Any, assignment: Any, names: Any, groups: Any = None) -> Clients:
        """Clients from one client number per row; a client in `names` without rows is empty."""
        rows = as_inputs(inputs)
        known = np.asarray(names)
        place = _as_assignment(assignment, len(rows), len(known))
        labels_of_clients = None if groups is None else np.asarray(groups)
        if labels_of_clients is not None and len(labels_of_clients) != len(known):
            raise ValueError(
                f"groups has {len(labels_of_clients)} labels; give one for each of the {len(known)} clients"
            )
        return _settled(_index(rows, as_labels(labels, len(rows)), place, known, labels_of_clients))

    @classmethod
    def from_dataset(cls, dataset: torch.utils.data.Dataset[Any], client: Any, group: Any = None) -> Clients:
        """Clients from a map-style dataset of (input, label) items, each read once."""
        inputs, labels = stack_items(dataset)
        return cls.from_arrays(inputs, labels, client, group)

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        label: str,
        client: str,
        features: Sequence[str] | None = None,
        group: str | None = None,
    ) -> Clients:
        """Clients from the columns of a frame; `features` defaults to every other numeric column."""
        columns = frames.Columns(label, client, group or "", tuple(features or ()))
        return cls.from_arrays(*frames.read(frame, frames.resolve(frame, columns)))

    @classmethod
    def from_file(
        cls,
        path: str,
        label: str,
        client: str,
        features: Sequence[str] | None = None,
        group: str | None = None,
    ) -> Clients:
        """Clients from a CSV, Parquet, Arrow or .npz file; `features` defaults to every other numeric column.

        A Parquet or Arrow file may be larger than memory: its rows are copied to disk once, and memory-mapped.
        """
        readers.check_suffix(path)
        rows = laid_out.read(path, frames.Columns(label, client, group or "", tuple(features or ())))
        return cls.from_arrays(rows.inputs, rows.labels, rows.client, rows.group)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Clients({len(self)} clients, {len(self.rows)} rows, {self.census.positives.sum()} positives)"

    @property
    def roster(self) -> Roster:
        """What participation may know."""
        return Roster(self.census.positives + self.census.negatives, self.groups)

    def positives(self, client: int) -> np.ndarray:
        """The row numbers of a client's positives, a view."""
        start = self.offsets[client]
        return self.rows[start : start + self.census.positives[client]]

    def negatives(self, client: int) -> np.ndarray:
        """The row numbers of a client's negatives, a view."""
        return self.rows[self.offsets[client] + self.census.positives[client] : self.offsets[client + 1]]

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Clients:
        """The same clients with data in another float type (uint8 inputs stay) or on another device."""
        return replace(self, inputs=_move(self.inputs, dtype, device), labels=_move(self.labels, dtype, device))


def _by_name(rows: Tensor, labels: Any, client: Any, group: Any) -> Clients:
    names, place = enumerate_names(as_names(client, "client", len(rows)))
    groups = None
    if group is not None:
        groups = groups_of_clients(place, names, as_names(group, "group", len(rows)))
    return _index(rows, as_labels(labels, len(rows)), place, names, groups)


def _settled(made: Clients) -> Clients:
    """The clients, without what was freed on the way to them: training would have to fit into the holes."""
    if len(made.rows) > BLOCK:
        give_back()
    return made


def _index(
    inputs: Tensor, labels: np.ndarray, place: np.ndarray, names: np.ndarray, groups: np.ndarray | None
) -> Clients:
    check_classes(labels)
    rows, counts = _listed(place, labels, len(names))
    offsets = np.concatenate([[0], np.cumsum(counts.sum(0))])
    return Clients(inputs, label_tensor(labels, inputs), rows, offsets, Census(*counts), names, groups)


def _listed(place: np.ndarray, labels: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers by client, positives first, in their old order; and each client's positives and negatives `[2, N]`.

    A counting sort, a block of rows at a time: sorting all of them at once takes four times the memory of the result.
    """
    bins = 2 * clients
    blocks = list(row_blocks(place.shape, max(BLOCK, bins)))

    def key(block: slice) -> np.ndarray:
        wide: np.ndarray = 2 * place[block].astype(np.int64) + (labels[block] == 0)
        # In the smallest type that holds it, the key of up to 2^15 clients is sorted in one pass per byte.
        return wide.astype(np.min_scalar_type(bins - 1))

    counts = sum((np.bincount(key(block), minlength=bins) for block in blocks), np.zeros(bins, dtype=np.int64))
    rows = np.empty(len(place), dtype=index_type(len(place)))
    free = np.cumsum(counts) - counts
    for block in blocks:
        mine = key(block)
        order = np.argsort(mine, kind="stable")
        sizes = np.bincount(mine, minlength=bins)
        rows[np.repeat(free - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(mine))] = block.start + order
        free += sizes
    return rows, np.ascontiguousarray(counts.reshape(clients, 2).T)


def _as_assignment(assignment: Any, rows: int, clients: int) -> np.ndarray:
    place = as_array(assignment, "assignment")
    if place.shape != (rows,) or place.dtype.kind not in "iu":
        raise ValueError(f"assignment is {place.dtype} {place.shape}; give one integer for each of the {rows} rows")
    outside = np.flatnonzero((place < 0) | (place >= clients))
    if len(outside):
        row = outside[0]
        raise ValueError(
            f"assignment is {place[row]} in row {row}; it must be at least 0 and below the {clients} names"
        )
    return place


def _move(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
