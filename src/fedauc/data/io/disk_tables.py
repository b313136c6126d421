"""Tables too large for memory: rewritten row by row on disk once, and memory-mapped from then on.

Arrow and Parquet files hold columns, but a batch takes random rows: gathering a row from 60 float32 columns is ten
times as slow as reading it from an array of rows, and takes sixty disk reads instead of one where the table is not in
memory. So a large file is copied once into rows, block by block, split and standardised as requested. The copy is in a
folder of `stored.cache_folders`. Its name depends on the file's size and modification time and on every option that
affects the copy, so that a changed file gets a new one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np

from fedauc.data.checks import counting_rows_from
from fedauc.data.dataset import Rows
from fedauc.data.io import readers
from fedauc.data.io.memory import index_type, row_blocks
from fedauc.data.io.readers import Columns
from fedauc.data.io.stored import File, ParsedArrays, cache_folders, files_fingerprint, load_or_build, resolve_folder
from fedauc.data.names import as_names, enumerate_names
from fedauc.data.standardization import BLOCK

LARGE = 1 << 28
"""From this many bytes of float32 on, a columnar file is copied to disk as rows instead of being read into memory."""

Parts = dict[str, Rows]
"""Parts of a table by name; before they are written, `inputs` holds row numbers in increasing order."""


def read_rows(path: str, columns: Columns) -> Rows:
    """All rows of a file: in memory, or memory-mapped if the file is large."""
    if not is_large(path):
        return readers.read_table(path, columns)[0]
    parsed = load_disk_table(
        (path,), repr(columns), lambda into: write_parts(into, path, columns, lambda rows: {"all": rows})
    )
    return read_part(parsed, "all")


def is_large(path: str) -> bool:
    """Whether a file is columnar and too large to be read into memory."""
    file = Path(path)
    if not readers.is_columnar(file):
        return False
    readers.check_exists(file)
    with readers.naming_file(file), readers.requiring_frames():
        rows, width = readers.columnar_size(file)
    return rows * width * np.dtype(np.float32).itemsize >= LARGE


def load_disk_table(paths: Sequence[str], key: str, build: Callable[[Path], object]) -> ParsedArrays:
    """The arrays that `build` writes for these files and this key; copies of older files are deleted."""
    files = tuple(File(Path(path).resolve(), "") for path in paths)
    prefix = f"table-{files_fingerprint((), repr([str(file.path) for file in files]) + key)}"
    name = f"{prefix}-{files_fingerprint(files, '')}"
    folder = cache_folders(resolve_folder(""))[-1]

    def fill(into: Path) -> dict[str, int]:
        build(into)
        for old in folder.glob(f"{prefix}-*"):
            # A folder of the same name comes from a process that was faster and is about to read it.
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)
        return {}

    return load_or_build(folder, name, fill)


def read_part(parsed: ParsedArrays, name: str) -> Rows:
    """One part of a table on disk, memory-mapped."""
    inputs, labels, *others = (parsed.arrays.get(f"{name}-{field}") for field in Rows._fields)
    if inputs is None or labels is None:
        raise ValueError(f"part {name!r} is not among {sorted(parsed.arrays)}: delete the folder of parsed tables")
    return Rows(inputs, labels, *others)


def write_parts(into: Path, path: str, columns: Columns, split: Callable[[Rows], Parts]) -> Columns:
    """Write the parts that `split` makes of a file's rows; returns the columns with the features listed."""
    file = Path(path)
    readers.check_exists(file)
    with readers.naming_file(file), readers.requiring_frames():
        if readers.is_columnar(file):
            resolved = readers.resolve_columns(next(readers.iterate_frames(file)), columns)
        else:
            resolved = readers.read_table(path, columns)[1]
        rows, clients, groups = _read_row_labels(file, resolved)
    parts = split(rows)
    for name, part in parts.items():
        np.save(into / f"{name}-labels.npy", part.labels)
        np.save(into / f"{name}-numbers.npy", np.asarray(part.inputs))
        write_names(into / f"{name}-client.npy", clients, part.client)
        write_names(into / f"{name}-group.npy", groups, part.group)
    with readers.naming_file(file):
        _write_inputs(into, file, resolved, parts)
    return resolved


def write_inputs(
    into: Path, name: str, shape: tuple[int, ...]
) -> AbstractContextManager[Callable[[np.ndarray], object]]:
    """Yields a function that appends rows to the inputs of a part."""
    return write_array(_inputs_path(into, name), np.dtype(np.float32), shape)


def _inputs_path(into: Path, name: str) -> Path:
    return into / f"{name}-inputs.npy"


def _iterate_blocks(file: Path, columns: Columns) -> Iterator[tuple[int, Rows]]:
    """The rows of a file block by block, each with the number of its first row."""
    if not readers.is_columnar(file):
        yield 0, readers.read_table(str(file), columns)[0]
        return
    names = [name for name in (columns.label, columns.client, columns.group, *columns.features) if name]
    start = 0
    for frame in readers.iterate_frames(file, names):
        with counting_rows_from(start):
            rows = readers.check_rows(readers.read_frame(frame, columns), columns)
        yield start, rows
        start += len(frame)


def _read_row_labels(file: Path, columns: Columns) -> tuple[Rows, NameCodes, NameCodes]:
    """Each row's number, label, and client and group codes, with the names that the codes stand for."""
    clients, groups, labels = NameCodes("client"), NameCodes("group"), []
    # One feature is enough for a block to know its number of rows.
    for _, rows in _iterate_blocks(file, columns._replace(features=columns.features[:1])):
        labels.append(rows.labels)
        clients.add_names(rows.client)
        groups.add_names(rows.group)
    joined = np.concatenate(labels)
    numbers = np.arange(len(joined), dtype=index_type(len(joined)))
    return Rows(numbers, joined, clients.all_codes(), groups.all_codes()), clients, groups


def _write_inputs(into: Path, file: Path, columns: Columns, parts: Parts) -> None:
    part_of_row = np.full(sum(len(rows.labels) for rows in parts.values()), -1, dtype=np.int8)
    with ExitStack() as stack:
        append_rows = []
        for number, (name, rows) in enumerate(parts.items()):
            part_of_row[np.asarray(rows.inputs)] = number
            shape = (len(rows.labels), len(columns.features))
            append_rows.append(stack.enter_context(write_inputs(into, name, shape)))
        for start, rows in _iterate_blocks(file, columns):
            numbers = part_of_row[start : start + len(rows.labels)]
            for number in range(len(parts)):
                append_rows[number](np.asarray(rows.inputs)[numbers == number])


def write_names(path: Path, names: NameCodes, codes: np.ndarray | None) -> None:
    """Write the names that codes stand for, a block at a time."""
    if codes is None:
        return
    distinct = np.array(list(names.code_of))
    with write_array(path, distinct.dtype, codes.shape) as append_rows:
        for block in row_blocks(codes.shape, BLOCK):
            append_rows(distinct[codes[block]])


class NameCodes:
    """The names of a column as integer codes, numbered by first appearance in `code_of`: a few bytes per row."""

    def __init__(self, column: str) -> None:
        self._column = column
        self.code_of: dict[int | str, int] = {}
        self._codes: list[np.ndarray] = []

    def add_names(self, names: np.ndarray | None) -> None:
        """Append the names of the next rows."""
        if names is None:
            return
        distinct, index = enumerate_names(as_names(names, self._column, len(names)))
        codes = [self.code_of.setdefault(name, len(self.code_of)) for name in distinct.tolist()]
        self._codes.append(np.array(codes, dtype=np.int32)[index])

    def all_codes(self) -> np.ndarray | None:
        """The code of each row; None if there is no such column."""
        return np.concatenate(self._codes) if self._codes else None


@contextmanager
def write_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], object]]:
    """Yields a function that appends rows to a new .npy file, so that the array is never in memory.

    Writing is safer than a mapping, because a full disk raises an error instead of killing the process.
    """
    with path.open("wb") as stream:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        yield lambda rows: stream.write(np.ascontiguousarray(rows, dtype=dtype).data)
