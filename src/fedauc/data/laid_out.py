"""A table too large for memory: laid out once on disk, row by row, and memory-mapped from then on.

Arrow and Parquet files hold columns, and a batch takes rows at random: from 60 columns of float32 that is ten times as
slow as from rows, and sixty reads instead of one where the table is not in memory. So a large file is copied once into
rows, block by block, split and standardised as asked for. The copy lies in the folder of `sources.home`, under a name
that holds the file's size and time of change and everything the copy depends on: a changed file gets a new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from fedauc.data import columnar, frames, readers
from fedauc.data.blocks import index_type, row_blocks
from fedauc.data.cache import Parsed, cached
from fedauc.data.dataset import Rows
from fedauc.data.frames import Columns
from fedauc.data.names import as_names, enumerate_names
from fedauc.data.sources import File, fingerprint, home, shelves
from fedauc.data.standardize import BLOCK, moments, scale

LARGE = 1 << 28
"""Bytes of float32 from which a file stored by column is laid out on disk and not read into memory."""

Parts = dict[str, Rows]
"""Parts of a table by name; while they are laid out, `inputs` are row numbers, in rising order."""


def read(path: str, columns: Columns) -> Rows:
    """All rows of a file: in memory, or memory-mapped if the file is large."""
    if not is_large(path):
        return readers.read(path, columns)[0]
    parsed = stored((path,), repr(columns), lambda into: _whole(into, path, columns))
    return part(parsed, "all")


def is_large(path: str) -> bool:
    """Whether a file is stored by column and too large to be read into memory lightly."""
    file = Path(path)
    if not columnar.is_columnar(file):
        return False
    readers.check_exists(file)
    with readers.named(file), readers.needs_frames():
        rows, width = columnar.size(file)
    return rows * width * np.dtype(np.float32).itemsize >= LARGE


def stored(paths: Sequence[str], key: str, build: Callable[[Path], None]) -> Parsed:
    """What `build` has written for these files and this key, or writes now; what it wrote for older ones is dropped."""
    files = tuple(File(Path(path).resolve(), "") for path in paths)
    place = repr([str(file.path) for file in files])
    name = f"table-{fingerprint((), place + key)}"
    mine = f"{name}-{fingerprint(files, '')}"
    shelf = shelves(home(""))[-1]

    def fill(into: Path) -> dict[str, int]:
        build(into)
        for old in shelf.glob(f"{name}-*"):
            # Another process may have been faster, and be about to read what it wrote.
            if old.name != mine:
                shutil.rmtree(old, ignore_errors=True)
        return {}

    return cached(shelf, mine, fill)


def part(parsed: Parsed, name: str) -> Rows:
    """One part of what was laid out, memory-mapped."""
    found = [parsed.arrays.get(f"{name}-{what}") for what in Rows._fields]
    inputs, labels, client, group = found
    if inputs is None or labels is None:
        raise ValueError(f"part {name!r} is not among {sorted(parsed.arrays)}: delete the folder of parsed tables")
    return Rows(inputs, labels, client, group)


def lay_out(into: Path, path: str, columns: Columns, deal: Callable[[Rows], Parts]) -> Columns:
    """Write the parts that `deal` makes of a file's rows; returns the columns with the features spelled out."""
    file = Path(path)
    readers.check_exists(file)
    with readers.named(file), readers.needs_frames():
        resolved = _resolve(file, columns)
        marks, clients, groups = _marks(file, resolved)
    parts = deal(marks)
    for name, rows in parts.items():
        np.save(into / f"{name}-labels.npy", rows.labels)
        _write_names(into / f"{name}-client.npy", clients, rows.client)
        _write_names(into / f"{name}-group.npy", groups, rows.group)
    with readers.named(file):
        _write_inputs(into, file, resolved, parts)
    return resolved


def standardize(into: Path, names: Sequence[str]) -> None:
    """Shift and scale the parts in their files by the moments of the first of them."""
    mean, deviation = moments(np.load(_inputs(into, names[0]), mmap_mode="r"))
    for name in names:
        for block in row_blocks(np.load(_inputs(into, name), mmap_mode="r").shape, BLOCK):
            # A mapping for each block: pages that were written to pile up in memory while they are mapped.
            rows = np.load(_inputs(into, name), mmap_mode="r+")
            rows[block] = scale(rows[block], mean, deviation)


def _whole(into: Path, path: str, columns: Columns) -> None:
    lay_out(into, path, columns, lambda marks: {"all": marks})


def _inputs(into: Path, name: str) -> Path:
    return into / f"{name}-inputs.npy"


# ------------------------------------------------------------------------------------------------------ block by block


def _resolve(file: Path, columns: Columns) -> Columns:
    if not columnar.is_columnar(file):
        return readers.read(str(file), columns)[1]
    return frames.resolve(next(columnar.frames(file)), columns)


def _blocks(file: Path, columns: Columns) -> Iterator[tuple[int, Rows]]:
    """The rows of a file, some at a time, and the number of the first of them."""
    if not columnar.is_columnar(file):
        yield 0, readers.read(str(file), columns)[0]
        return
    wanted = [name for name in (columns.label, columns.client, columns.group, *columns.features) if name]
    start = 0
    for frame in columnar.frames(file, wanted):
        try:
            yield start, readers.as_rows(frames.read(frame, columns), columns)
        except ValueError as error:
            raise ValueError(f"counted from row {start}: {error}") from error
        start += len(frame)


def _marks(file: Path, columns: Columns) -> tuple[Rows, _Names, _Names]:
    """Each row's number, label, and the numbers of its client and group, with the names that these stand for."""
    clients, groups, labels = _Names("client"), _Names("group"), []
    # Of the features one is enough, for a block to know its rows.
    for _, rows in _blocks(file, columns._replace(features=columns.features[:1])):
        labels.append(rows.labels)
        clients.add(rows.client)
        groups.add(rows.group)
    joined = np.concatenate(labels)
    numbers = np.arange(len(joined), dtype=index_type(len(joined)))
    return Rows(numbers, joined, clients.codes(), groups.codes()), clients, groups


def _write_inputs(into: Path, file: Path, columns: Columns, parts: Parts) -> None:
    width = len(columns.features)
    owner = np.full(sum(len(rows.labels) for rows in parts.values()), -1, dtype=np.int8)
    with ExitStack() as stack:
        writers = []
        for place, (name, rows) in enumerate(parts.items()):
            owner[np.asarray(rows.inputs)] = place
            shape = (len(rows.labels), width)
            writers.append(stack.enter_context(_Writer(_inputs(into, name), np.dtype(np.float32), shape)))
        for start, rows in _blocks(file, columns):
            mine = owner[start : start + len(rows.labels)]
            for place, writer in enumerate(writers):
                writer.add(np.asarray(rows.inputs)[mine == place])


def _write_names(path: Path, names: _Names, codes: np.ndarray | None) -> None:
    if codes is None:
        return
    known = names.known()
    with _Writer(path, known.dtype, codes.shape) as writer:
        for block in row_blocks(codes.shape, BLOCK):
            writer.add(known[codes[block]])


class _Names:
    """The names of a column as numbers, in the order in which they first appear: a few bytes per row."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._places: dict[int | str, int] = {}
        self._codes: list[np.ndarray] = []

    def add(self, names: np.ndarray | None) -> None:
        """The names of the next rows."""
        if names is None:
            return
        distinct, place = enumerate_names(as_names(names, self._what, len(names)))
        codes = [self._places.setdefault(name, len(self._places)) for name in distinct.tolist()]
        self._codes.append(np.array(codes, dtype=np.int32)[place])

    def codes(self) -> np.ndarray | None:
        """Each row's number, if there is such a column."""
        return np.concatenate(self._codes) if self._codes else None

    def known(self) -> np.ndarray:
        """The name of each number."""
        return np.array(list(self._places))


class _Writer:
    """An .npy file written from its beginning to its end, without having it in memory."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._stream = dtype, path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._stream, header)

    def add(self, block: np.ndarray) -> None:
        """The next rows."""
        self._stream.write(np.ascontiguousarray(block, dtype=self._dtype).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.close()
