"""A site's own rows: read once, then memory-mapped, since every message starts a new process."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc import keys
from fedauc.data.checks import as_inputs, as_labels, label_tensor
from fedauc.data.clients import Clients, Examples, stack_items
from fedauc.data.dataset import Rows
from fedauc.data.io.memory import make_writable
from fedauc.data.io.readers import Columns, read_table
from fedauc.interfaces import Census

PARTS = ("x", "y", "test_x", "test_y")

SHARED = (np.float32, np.float64, np.uint8)
"""Types whose files are mapped as they are."""


class SiteData(NamedTuple):
    """Rows to train on with their labels 0/1, and held-out rows; a site may lack a class, and test rows."""

    inputs: Tensor
    labels: np.ndarray
    test: Examples | None = None

    @property
    def class_counts(self) -> tuple[int, int]:
        """Positives and negatives to train on."""
        positives = int((self.labels == 1).sum())
        return positives, len(self.labels) - positives


def from_arrays(inputs: Any, labels: Any, test_inputs: Any = None, test_labels: Any = None) -> SiteData:
    """A site's data from arrays; for files larger than memory give `np.load(path, mmap_mode="r")`.

    >>> from_arrays([[0.5], [1.5]], [0, 1]).held
    (1, 1)
    """
    rows = as_inputs(inputs)
    test = None
    if test_inputs is not None and len(test_inputs):
        held = as_inputs(test_inputs)
        test = Examples(held, label_tensor(as_labels(test_labels, len(held)), held))
    return SiteData(rows, as_labels(labels, len(rows)), test)


def from_dataset(dataset: torch.utils.data.Dataset[Any], test: torch.utils.data.Dataset[Any] | None = None) -> SiteData:
    """A site's data from map-style datasets of (input, label) items."""
    inputs, labels = stack_items(dataset)
    return from_arrays(inputs, labels) if test is None else from_arrays(inputs, labels, *stack_items(test))


def from_folder(folder: Path | str) -> SiteData:
    """A site's data from x.npy and y.npy, and test_x.npy and test_y.npy if they are there, memory-mapped."""
    home = Path(folder)
    if not (home / "x.npy").is_file():
        raise ValueError(f"{home} holds no x.npy; write x.npy and y.npy into it with numpy.save")
    inputs, labels, *test = [_map(home / f"{part}.npy") for part in PARTS if (home / f"{part}.npy").is_file()]
    rows = _share(inputs)
    held = Examples(_share(test[0]), label_tensor(as_labels(test[1], len(test[0])), rows)) if test else None
    return SiteData(rows, as_labels(labels, len(rows)), held)


def from_file(path: Path | str, cache: Path | str, label: str = "y", test_fraction: float = 0.3) -> SiteData:
    """A site's data from a CSV, Parquet or .npz file whose other numeric columns are the inputs.

    The first call writes the split rows into `cache`, later calls map them; a changed file is read again.
    """
    file, made = Path(path), Path(cache)
    mark = _mark(file, label, test_fraction)
    if not (made / mark).is_file():
        rows, _ = read_table(str(file), Columns(label, ""))
        _write(made, mark, rows, test_fraction)
    return from_folder(made)


def client_of_site(data: SiteData, client: int, census: Census) -> Clients:
    """The site's rows as those of one client among all; the others are empty here."""
    held, clients = data.class_counts, len(census.positives)
    rows = np.argsort(data.labels == 0, kind="stable")
    offsets = np.where(np.arange(clients + 1) > client, len(rows), 0)
    own = Census(*(np.where(np.arange(clients) == client, count, 0) for count in held))
    return Clients(data.inputs, label_tensor(data.labels, data.inputs), rows, offsets, own, np.arange(clients))


def _mark(file: Path, label: str, test_fraction: float) -> str:
    """Names the file's present state: a change of it is noticed by size and time."""
    if not file.is_file():
        raise ValueError(f"path is {str(file)!r}; no such file: check it")
    facts = (file.stat().st_size, file.stat().st_mtime_ns, label, test_fraction)
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _map(file: Path) -> np.ndarray:
    array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def _share(array: np.ndarray) -> Tensor:
    # Looking for NaN would read the whole file for every message; `Site` does it once, when it first answers.
    return torch.from_numpy(make_writable(array)) if array.dtype in SHARED else as_inputs(array)


def _split(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """The rest, and a keyed fraction of each class to the nearest row; a class may be small or missing."""
    held = np.zeros(len(labels), dtype=bool)
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        count = min(round(fraction * len(members)), len(members) - 1)
        if count > 0:
            held[members[keys.sample_indices(len(members), count, 0, "test", label)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _write(made: Path, mark: str, rows: Rows, test_fraction: float) -> None:
    train, test = (rows.take(part) for part in _split(rows.labels, test_fraction))
    part = made.with_name(f".{made.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, array in zip(PARTS, (train.inputs, train.labels, test.inputs, test.labels), strict=True):
        np.save(part / f"{name}.npy", np.asarray(array))
    (part / mark).touch()
    shutil.rmtree(made, ignore_errors=True)
    part.rename(made)


SiteDataLoader = Callable[[], SiteData]
"""How a site reads its data; called once per message."""
