"""Reading a table from a CSV, Parquet, Arrow or NumPy file."""

from __future__ import annotations

import difflib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from fedauc.data import columnar, frames
from fedauc.data.checks import as_float32, as_inputs, as_labels
from fedauc.data.dataset import Rows
from fedauc.data.frames import Columns
from fedauc.discovery import lookup

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", *columnar.SUFFIXES, ".npz")
"""The formats, told by how a file's name ends, in upper or lower case."""


def check_suffix(path: str) -> None:
    """Refuse a name that ends in no known format."""
    file = Path(path)
    if _suffix(file) in SUFFIXES:
        return
    _refuse_directory(file)
    raise ValueError(f"path is {path!r}; it must end in {', '.join(SUFFIXES)}: convert the file")


def read(path: str, columns: Columns) -> tuple[Rows, Columns]:
    """The rows of a file, and the columns with the features spelled out (for a second file of the same layout).

    Inputs are finite float32, labels are zeros and ones; every error names the file.
    """
    file = Path(path)
    check_exists(file)
    with named(file):
        rows, resolved = _npz(file, columns) if _suffix(file) == ".npz" else _table(file, columns)
        return as_rows(rows, resolved), resolved


def as_rows(rows: Rows, columns: Columns) -> Rows:
    """Rows as they come from a file, with their values checked."""
    inputs = as_float32(np.asarray(rows.inputs), columns.features)
    return rows._replace(inputs=inputs, labels=as_labels(rows.labels, len(inputs)))


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def check_exists(file: Path) -> None:
    """Refuse a file that is not there."""
    _refuse_directory(file)
    if not file.is_file():
        nearby = [other.name for other in file.parent.glob("*") if _suffix(other) in SUFFIXES]
        near = difflib.get_close_matches(file.name, nearby, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "check it"
        raise ValueError(f"path is {str(file)!r}; no such file: {hint}")


def _refuse_directory(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f"path is {str(file)!r}; it is a directory: name one file in it")


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Have every error name the file, in one line."""
    try:
        yield
    except ValueError as error:
        # Names of columns and reasons given by other libraries may hold line breaks.
        raise ValueError(f"file {str(file)!r}: {' '.join(str(error).split())}") from error


# ------------------------------------------------------------------------------------------------ CSV, Parquet, Arrow


def _table(file: Path, columns: Columns) -> tuple[Rows, Columns]:
    frame = _frame(file, columns)
    resolved = frames.resolve(frame, columns)
    return frames.read(frame, resolved), resolved


def _frame(file: Path, columns: Columns) -> pd.DataFrame:
    with needs_frames():
        return columnar.frame(file) if columnar.is_columnar(file) else _csv(file, columns)


@contextmanager
def needs_frames() -> Iterator[None]:
    """Say how to get what reading a table needs, where it is missing."""
    try:
        yield
    except ImportError:
        raise ValueError("reading it needs pandas and pyarrow: run pip install 'fedauc[frames]'") from None


def _csv(file: Path, columns: Columns) -> pd.DataFrame:
    import pandas as pd

    # Names stay text, so that 007 is not 7.
    names = {name: str for name in (columns.client, columns.group) if name}
    try:
        frame = pd.read_csv(file, dtype=names)
    except pd.errors.EmptyDataError:
        raise ValueError("it is empty: write one line of column names, then one line per row") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text: save the table as CSV in UTF-8") from None
    except pd.errors.ParserError as error:
        reason = str(error).rpartition("C error: ")[2].strip()
        raise ValueError(f"it is no regular CSV ({reason}): give every line as many values as the first") from error
    if len(frame) and not isinstance(frame.index, pd.RangeIndex):
        # The reader takes values without a column name for row names, which moves every other value one column on.
        raise ValueError("its lines hold more values than its first line has names: name every column")
    return frame


# --------------------------------------------------------------------------------------------------------------- NumPy

DAMAGE = (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error)
"""What numpy raises on a damaged archive, depending on which byte is wrong."""


def _npz(file: Path, columns: Columns) -> tuple[Rows, Columns]:
    if columns.features:
        raise ValueError(f"features is {columns.features}; an .npz file has no column names: leave features empty")
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no .npz archive: write it with numpy.savez")
    # The file is opened here because numpy leaves it open when the archive is damaged.
    with file.open("rb") as stream, _archive(stream) as arrays:
        inputs = as_inputs(_array(arrays, "x")).numpy()
        client = _array(arrays, columns.client) if columns.client else None
        wanted = columns.group or ("group" if "group" in arrays.files else "")
        group = _array(arrays, wanted) if wanted else None
        return Rows(inputs, _array(arrays, columns.label), client, group), columns


def _archive(stream: BinaryIO) -> np.lib.npyio.NpzFile:
    try:
        arrays: np.lib.npyio.NpzFile = np.load(stream, allow_pickle=False)
    except DAMAGE as error:
        raise ValueError(f"it is a damaged .npz archive ({error}): write it again with numpy.savez") from error
    return arrays


def _array(arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    lookup("array", name, dict.fromkeys(arrays.files, True))
    try:
        array: np.ndarray = arrays[name]
    except DAMAGE as error:
        if "allow_pickle" in str(error):
            raise ValueError(f"array {name!r} holds Python objects; save it as numbers or with dtype=str") from None
        raise ValueError(f"array {name!r} is damaged ({error}): write it again with numpy.savez") from error
    return array
