"""Reading a table from a CSV, Parquet or NumPy file."""

from __future__ import annotations

import difflib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedauc.data import frames
from fedauc.data.checks import as_inputs
from fedauc.data.dataset import Rows
from fedauc.data.frames import Columns
from fedauc.discovery import lookup

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".parquet", ".npz")
"""The formats, told by how a file's name ends."""


def check_suffix(path: str) -> None:
    """Refuse a name that ends in no known format."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"path is {path!r}; it must end in {', '.join(SUFFIXES)}: convert the file")


def read(path: str, columns: Columns) -> tuple[Rows, Columns]:
    """The rows of a file, and the columns with the features spelled out (for a second file of the same layout)."""
    file = Path(path)
    if not file.is_file():
        nearby = [other.name for other in file.parent.glob("*") if other.suffix in SUFFIXES]
        near = difflib.get_close_matches(file.name, nearby, n=1)
        raise ValueError(f"path is {path!r}; no such file: " + (f"did you mean {near[0]!r}?" if near else "check it"))
    if file.suffix == ".npz":
        return _npz(file, columns), columns
    frame = _frame(file, columns)
    resolved = frames.resolve(frame, columns)
    return frames.read(frame, resolved), resolved


def _frame(file: Path, columns: Columns) -> pd.DataFrame:
    try:
        import pandas as pd

        if file.suffix == ".parquet":
            return pd.read_parquet(file)
        # Names stay text, so that 007 is not 7.
        return pd.read_csv(file, dtype={name: str for name in (columns.client, columns.group) if name})
    except ImportError:
        raise ValueError(f"reading {file.name!r} needs pandas and pyarrow: run pip install 'fedauc[frames]'") from None


def _npz(file: Path, columns: Columns) -> Rows:
    if columns.features:
        raise ValueError(f"features is {columns.features}; an .npz file has no column names: leave features empty")
    if not zipfile.is_zipfile(file):
        raise ValueError(f"path is {str(file)!r}; it is no .npz archive: write it with numpy.savez")
    with np.load(file, allow_pickle=False) as arrays:
        inputs = as_inputs(_array(arrays, "x")).numpy()
        client = _array(arrays, columns.client) if columns.client else None
        wanted = columns.group or ("group" if "group" in arrays.files else "")
        return Rows(inputs, _array(arrays, columns.label), client, _array(arrays, wanted) if wanted else None)


def _array(arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    lookup("array", name, dict.fromkeys(arrays.files, True))
    try:
        array: np.ndarray = arrays[name]
    except ValueError:
        raise ValueError(f"array {name!r} holds Python objects; save it as numbers or with dtype=str") from None
    return array
