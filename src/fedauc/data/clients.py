"""Every client's rows in one tensor, with an index: a million clients need little more memory than their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedauc.data.checks import as_array, as_inputs, as_labels, check_classes, check_evaluable, label_tensor, name_row
from fedauc.data.classes import ClassCensus, as_class_labels, check_every_class, class_label_tensor
from fedauc.data.columns import as_pandas_frame
from fedauc.data.io.disk_tables import read_rows
from fedauc.data.io.memory import index_type, release_freed_memory, row_blocks
from fedauc.data.io.readers import Columns, check_suffix, read_client_columns, read_frame, resolve_columns
from fedauc.data.names import as_names, enumerate_names, find_client_groups, find_client_values, select_values
from fedauc.interfaces import Census, Roster

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 18
"""How many rows are sorted at once, and above how many freed memory is returned."""


class Examples(NamedTuple):
    """Rows to evaluate on: inputs `[n, ...]`, float labels 0/1 `[n]`, and each row's client for per-client metrics.

    `rows` are the numbers of the rows in the file that they come from, where there is one.
    """

    inputs: Tensor
    labels: Tensor
    clients: np.ndarray | None = None
    rows: np.ndarray | None = None

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Examples:
        """The same rows in another float type (integers stay) or on another device."""
        return self._replace(
            inputs=_move_tensor(self.inputs, dtype, device), labels=_move_tensor(self.labels, dtype, device)
        )


def examples(inputs: Any, labels: Any, clients: Any = None) -> Examples:
    """Checked examples from arrays, tensors or nested lists, with at least two rows of each class.

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
    They are int32 where that is enough. Memory is O(rows + clients); `names`, `groups` and each
    of `columns` (what else schedules may use) are arrays `[N]`. `feature_names` are those of a frame's columns.

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
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()

    @classmethod
    def from_arrays(
        cls, inputs: Any, labels: Any, client: Any, group: Any = None, columns: Mapping[str, Any] | None = None
    ) -> Clients:
        """Clients from one client name per row, and optionally one group label, the same for all rows of a client.

        `columns` are what else a schedule may use, such as a time zone: one value per row, by the column's name.
        Clients are numbered in the sorted order of their names. Inputs of floats or bytes are shared, not copied; for a
        table larger than memory give `np.load(path, mmap_mode="r")`.
        """
        return _compact_memory(_build_by_name(as_inputs(inputs), labels, client, group, columns or {}))

    @classmethod
    def from_assignment(
        cls,
        inputs: Any,
        labels: Any,
        assignment: Any,
        names: Any,
        groups: Any = None,
        columns: Mapping[str, Any] | None = None,
    ) -> Clients:
        """Clients from one client number per row; a client in `names` without rows is empty.

        `names`, `groups` and `columns` have one entry per client.
        """
        rows = as_inputs(inputs)
        client_names = np.asarray(names)
        client = _check_assignment(assignment, len(rows), len(client_names))
        client_groups = None if groups is None else np.asarray(groups)
        if client_groups is not None and len(client_groups) != len(client_names):
            raise ValueError(
                f"groups has {len(client_groups)} labels; give one for each of the {len(client_names)} clients"
            )
        client_columns = {name: np.asarray(values) for name, values in (columns or {}).items()}
        for name, values in client_columns.items():
            if values.shape != client_names.shape:
                raise ValueError(f"column {name!r} has shape {values.shape}; give it one value per client")
        clients = _build_clients(rows, as_labels(labels, len(rows)), client, client_names, client_groups)
        return _compact_memory(replace(clients, columns=client_columns))

    @classmethod
    def from_classes(cls, inputs: Any, labels: Any, client: Any, group: Any = None) -> Clients:
        """Clients from labels that are numbers of classes, 0 to C - 1, for methods that train an output per class.

        Names and groups are those of `from_arrays`. A client's rows are in the order of their classes.

        >>> clients = Clients.from_classes([[1.0], [2.0], [3.0]], [2, 0, 1], ["ann", "ann", "bob"])
        >>> clients.rows.tolist(), clients
        ([1, 0, 2], Clients(2 clients, 3 rows, 3 classes))
        """
        rows = as_inputs(inputs)
        classes = as_class_labels(labels, len(rows))
        check_every_class(classes, max(int(classes.max()) + 1, 2))
        names, owner = enumerate_names(as_names(client, "client", len(rows)))
        groups = None if group is None else find_client_groups(owner, names, as_names(group, "group", len(rows)))
        count = int(classes.max()) + 1
        counts = np.bincount(owner * count + classes, minlength=len(names) * count).reshape(len(names), count).T
        order = np.lexsort((classes, owner)).astype(index_type(len(rows)))
        offsets = np.concatenate([[0], np.cumsum(counts.sum(0))])
        census = ClassCensus(np.ascontiguousarray(counts))
        return cls(rows, class_label_tensor(classes, rows), order, offsets, census, names, groups)

    @classmethod
    def from_dataset(cls, dataset: torch.utils.data.Dataset[Any], client: Any, group: Any = None) -> Clients:
        """Clients from a map-style dataset of (input, label) items, each read once."""
        inputs, labels = stack_items(dataset)
        return cls.from_arrays(inputs, labels, client, group)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        label: str,
        client: str,
        features: Sequence[str] | None = None,
        group: str | None = None,
        columns: Sequence[str] = (),
    ) -> Clients:
        """Clients from numeric columns of a pandas or polars frame or a pyarrow table, as they are.

        `features` defaults to every other numeric column; `fedauc.Table` also takes categories, dates and missing
        values, and standardises. `columns` are those that a schedule may use: one value for all rows of a client.
        """
        frame = as_pandas_frame(frame)
        roles = resolve_columns(frame, Columns(label, client, group or "", tuple(features or ()), tuple(columns)))
        clients = cls.from_arrays(*read_frame(frame, roles)[:4], {name: frame[name] for name in columns})
        return replace(clients, feature_names=roles.features)

    @classmethod
    def from_file(
        cls,
        path: str,
        label: str,
        client: str,
        features: Sequence[str] | None = None,
        group: str | None = None,
        columns: Sequence[str] = (),
    ) -> Clients:
        """Clients from a CSV, Parquet, Arrow or .npz file; `features` defaults to every other numeric column.

        A Parquet or Arrow file may be larger than memory: its rows are copied to disk once, and memory-mapped.
        """
        check_suffix(path)
        roles = Columns(label, client, group or "", tuple(features or ()), tuple(columns))
        clients = cls.from_arrays(*read_rows(path, roles)[:4])
        values = read_client_columns(path, roles) if columns else {}
        return replace(clients, columns={name: select_values(values[name], clients.names) for name in columns})

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        labels = f"{self.census.positives.sum()} positives"
        if isinstance(self.census, ClassCensus):
            labels = f"{len(self.census.counts)} classes"
        return f"Clients({len(self)} clients, {len(self.rows)} rows, {labels})"

    @property
    def roster(self) -> Roster:
        """What a participation schedule may know about the clients."""
        return Roster(self.census.positives + self.census.negatives, self.groups, self.columns)

    def positives(self, client: int) -> np.ndarray:
        """The row numbers of a client's positives, a view."""
        start = self.offsets[client]
        return self.rows[start : start + self.census.positives[client]]

    def negatives(self, client: int) -> np.ndarray:
        """The row numbers of a client's negatives, a view."""
        return self.rows[self.offsets[client] + self.census.positives[client] : self.offsets[client + 1]]

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Clients:
        """The same clients with data in another float type (integers stay) or on another device."""
        return replace(
            self, inputs=_move_tensor(self.inputs, dtype, device), labels=_move_tensor(self.labels, dtype, device)
        )


def _build_by_name(rows: Tensor, labels: Any, client: Any, group: Any, columns: Mapping[str, Any]) -> Clients:
    names, client_number = enumerate_names(as_names(client, "client", len(rows)))
    row_groups = None if group is None else as_names(group, "group", len(rows))
    groups = None if row_groups is None else find_client_groups(client_number, names, row_groups)
    client_columns = {
        column: find_client_values(client_number, names, column, values) for column, values in columns.items()
    }
    clients = _build_clients(rows, as_labels(labels, len(rows)), client_number, names, groups)
    return replace(clients, columns=client_columns)


def _build_clients(
    inputs: Tensor, labels: np.ndarray, client: np.ndarray, names: np.ndarray, groups: np.ndarray | None
) -> Clients:
    check_classes(labels)
    rows, counts = _sort_rows(client, labels, len(names))
    offsets = np.concatenate([[0], np.cumsum(counts.sum(0))])
    return Clients(inputs, label_tensor(labels, inputs), rows, offsets, Census(*counts), names, groups)


def _compact_memory(clients: Clients) -> Clients:
    """The same clients, after the memory of temporaries is returned, which training could not use otherwise."""
    if len(clients.rows) > BLOCK:
        release_freed_memory()
    return clients


def _sort_rows(client: np.ndarray, labels: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers by client, positives first, stably; and each client's numbers of positives and negatives `[2, N]`.

    A counting sort, a block of rows at a time: sorting all rows at once takes four times the memory of the result.
    """
    bins = 2 * clients
    blocks = list(row_blocks(client.shape, max(BLOCK, bins)))

    def sort_keys(block: slice) -> np.ndarray:
        wide: np.ndarray = 2 * client[block].astype(np.int64) + (labels[block] == 0)
        # In the smallest type that holds them, the keys of up to 2^15 clients are sorted in one pass per byte.
        return wide.astype(np.min_scalar_type(bins - 1))

    counts = sum((np.bincount(sort_keys(block), minlength=bins) for block in blocks), np.zeros(bins, dtype=np.int64))
    rows = np.empty(len(client), dtype=index_type(len(client)))
    next_free = np.cumsum(counts) - counts
    for block in blocks:
        block_keys = sort_keys(block)
        order = np.argsort(block_keys, kind="stable")
        sizes = np.bincount(block_keys, minlength=bins)
        shifts = np.repeat(next_free - (np.cumsum(sizes) - sizes), sizes)
        rows[shifts + np.arange(len(block_keys))] = block.start + order
        next_free += sizes
    return rows, np.ascontiguousarray(counts.reshape(clients, 2).T)


def _check_assignment(assignment: Any, rows: int, clients: int) -> np.ndarray:
    client = as_array(assignment, "assignment")
    if client.shape != (rows,) or client.dtype.kind not in "iu":
        raise ValueError(f"assignment is {client.dtype} {client.shape}; give one integer for each of the {rows} rows")
    outside = np.flatnonzero((client < 0) | (client >= clients))
    if len(outside):
        row = outside[0]
        raise ValueError(
            f"assignment is {client[row]} in {name_row(row)}; it must be at least 0 and below the {clients} names"
        )
    return client


def _move_tensor(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def stack_items(dataset: torch.utils.data.Dataset[Any]) -> tuple[Tensor, list[Any]]:
    """Inputs `[n, ...]` and labels `[n]` of a map-style dataset, each item read once."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{type(dataset).__name__} has no length or items; give a map-style dataset, or arrays")
    items = [_read_item(dataset, row) for row in range(len(dataset))]
    if not items:
        raise ValueError(f"{type(dataset).__name__} has no rows; give at least one positive and one negative")
    inputs, labels = zip(*items, strict=True)
    for row, value in enumerate(inputs):
        if value.shape != inputs[0].shape:
            shapes = f"shape {tuple(value.shape)} and item 0 has {tuple(inputs[0].shape)}"
            raise ValueError(
                f"dataset item {row} has {shapes}; make them the same, for example with a resize transform"
            )
    return torch.stack(inputs), list(labels)


def _read_item(dataset: torch.utils.data.Dataset[Any], row: int) -> tuple[Tensor, Any]:
    try:
        value, label = dataset[row]
        return torch.as_tensor(value), label.item() if isinstance(label, torch.Tensor) else label
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"dataset item {row} is no pair of a tensor and a label ({reason}); add a transform"
        ) from error
