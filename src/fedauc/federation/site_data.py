"""A site's own rows: read once, then memory-mapped, because every message starts a new process."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedauc import keys
from fedauc.data.checks import as_inputs, as_labels, label_tensor
from fedauc.data.clients import Clients, Examples, stack_items
from fedauc.data.io.memory import make_writable
from fedauc.data.io.readers import Columns, read_table
from fedauc.files import make_folder
from fedauc.interfaces import Census

ARRAY_NAMES = ("x", "y", "test_x", "test_y")

MAPPED_DTYPES = (np.float32, np.float64, np.uint8, np.int32, np.int64)
"""Types whose files are mapped without conversion."""


ROW_TYPES = {"uint8": torch.uint8, "integer": torch.int64, "float": torch.float32}
"""What a site says about its rows, and the type of the server's placeholders for them."""


def describe_row_type(dtype: torch.dtype) -> str:
    """The name in ROW_TYPES of a site's rows, whatever their width."""
    return "float" if dtype.is_floating_point else "uint8" if dtype == torch.uint8 else "integer"


class SiteData(NamedTuple):
    """Rows to train on with their labels 0/1, and held-out rows. A site may lack one class, and may lack test rows.

    `validation_rows` are the positions of rows among them that are held out of training in a run. They stay where they
    are, because the rows may be a file that is larger than the memory.
    """

    inputs: Tensor
    labels: np.ndarray
    test: Examples | None = None
    validation_rows: np.ndarray | None = None

    @property
    def training_rows(self) -> np.ndarray:
        """The positions of the rows to train on."""
        is_trained = np.ones(len(self.labels), dtype=bool)
        if self.validation_rows is not None:
            is_trained[self.validation_rows] = False
        return np.flatnonzero(is_trained)

    @property
    def training_labels(self) -> np.ndarray:
        """The labels of the rows to train on."""
        labels: np.ndarray = self.labels[self.training_rows]
        return labels

    @property
    def class_counts(self) -> tuple[int, int]:
        """The number of positives and of negatives to train on."""
        labels = self.training_labels
        positives = int((labels == 1).sum())
        return positives, len(labels) - positives

    @property
    def validation(self) -> Examples | None:
        """The validation rows; None where there are none."""
        rows = self.validation_rows
        if rows is None or not len(rows):
            return None
        return Examples(self.inputs[rows], label_tensor(self.labels[rows], self.inputs))

    def hold_out_validation(self, fraction: float) -> SiteData:
        """The same rows, a keyed fraction of each class of which is not trained on.

        >>> data = SiteData.from_arrays([[float(row)] for row in range(10)], [0, 1] * 5).hold_out_validation(0.2)
        >>> data.class_counts, len(data.validation.labels)
        ((4, 4), 2)
        """
        return self._replace(validation_rows=split_rows(self.labels, fraction, "validation")[1]) if fraction else self

    @staticmethod
    def from_arrays(inputs: Any, labels: Any, test_inputs: Any = None, test_labels: Any = None) -> SiteData:
        """A site's data from arrays; for files larger than memory give `np.load(path, mmap_mode="r")`.

        >>> SiteData.from_arrays([[0.5], [1.5]], [0, 1]).class_counts
        (1, 1)
        """
        rows = as_inputs(inputs)
        test = None
        if test_inputs is not None and len(test_inputs):
            test_rows = as_inputs(test_inputs)
            test = Examples(test_rows, label_tensor(as_labels(test_labels, len(test_rows)), test_rows))
        return SiteData(rows, as_labels(labels, len(rows)), test)

    @staticmethod
    def from_dataset(train: Dataset[Any], test: Dataset[Any] | None = None) -> SiteData:
        """A site's data from map-style datasets of (input, label) items."""
        return SiteData.from_arrays(*stack_items(train), *(() if test is None else stack_items(test)))

    @staticmethod
    def from_folder(folder: Path | str) -> SiteData:
        """A site's data from x.npy and y.npy, and test_x.npy and test_y.npy where they exist, memory-mapped."""
        paths = [Path(folder) / f"{name}.npy" for name in ARRAY_NAMES]
        if not paths[0].is_file():
            raise ValueError(f"{folder} holds no x.npy; write x.npy and y.npy into it with numpy.save")
        arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths if path.is_file()]
        inputs, labels, *test = arrays
        rows = _map_inputs(inputs)
        examples = (
            Examples(_map_inputs(test[0]), label_tensor(as_labels(test[1], len(test[0])), rows)) if test else None
        )
        return SiteData(rows, as_labels(labels, len(rows)), examples)

    @staticmethod
    def from_file(path: Path | str, cache: Path | str, label: str = "y", test_fraction: float = 0.3) -> SiteData:
        """A site's data from a CSV, Parquet or .npz file, whose numeric columns other than the label are the inputs.

        The first call splits the rows and writes them to `cache`; later calls map the cache. A file whose size or
        modification time has changed is read again.
        """
        file, folder = Path(path), Path(cache)
        if not file.is_file():
            raise ValueError(f"path is {str(file)!r}, but there is no such file: give the path of a file that exists")
        version = (file.stat().st_size, file.stat().st_mtime_ns, label, test_fraction)
        stamp = hashlib.blake2b(repr(version).encode(), digest_size=8).hexdigest()
        if not (folder / stamp).is_file():
            rows, _ = read_table(str(file), Columns(label, ""))
            train, test = (rows.take(indices) for indices in split_rows(rows.labels, test_fraction))
            arrays = (train.inputs, train.labels, test.inputs, test.labels)
            write_arrays(folder, dict(zip(ARRAY_NAMES, map(np.asarray, arrays), strict=True)), stamp)
        return SiteData.from_folder(folder)

    def as_only_client(self, client: int, clients: int) -> Clients:
        """The site's rows as those of one client among many; the others are empty here."""
        training = self.training_rows
        rows = training[np.argsort(self.labels[training] == 0, kind="stable")]
        numbers = np.arange(clients)
        offsets = np.where(np.arange(clients + 1) > client, len(rows), 0)
        census = Census(*(np.where(numbers == client, count, 0) for count in self.class_counts))
        return Clients(self.inputs, label_tensor(self.labels, self.inputs), rows, offsets, census, numbers)


def _map_inputs(array: np.ndarray) -> Tensor:
    # Checking for NaN would read the whole file for every message; `Site` does it once, when it registers.
    return torch.from_numpy(make_writable(array)) if array.dtype in MAPPED_DTYPES else as_inputs(array)


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray], stamp: str = "") -> None:
    """Write a folder of arrays, completely or not at all; the empty file `stamp` says which version was read."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(folder.parent, 0o700)
    # Rows are for the site's owner alone.
    part.mkdir(mode=0o700)
    for name, array in arrays.items():
        with open(part / f"{name}.npy", "wb", opener=_open_private) as file:
            np.save(file, array)
    if stamp:
        (part / stamp).touch()
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def count_held_out(rows: int, fraction: float) -> int:
    """How many rows of a class are held out: a fraction, to the nearest row, and never all.

    >>> count_held_out(10, 0.26), count_held_out(1, 0.9), count_held_out(0, 0.9)
    (3, 0, 0)
    """
    return max(0, min(round(fraction * rows), rows - 1))


def split_rows(labels: np.ndarray, fraction: float, purpose: str = "test") -> tuple[np.ndarray, np.ndarray]:
    """Training rows and a keyed fraction of each class, rounded to whole rows; a class may be small or missing.

    A class with rows keeps at least one to train on. The purpose (test, validation) is part of the key.
    """
    is_held_out = np.zeros(len(labels), dtype=bool)
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        if count := count_held_out(len(members), fraction):
            is_held_out[members[keys.sample_indices(len(members), count, 0, purpose, label)]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
