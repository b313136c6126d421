"""Read a recorded availability trace: a table of (round, client), from CSV or .npz."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import numpy as np

COLUMNS = ("round", "client")


def read_trace(path: str) -> np.ndarray:
    """The trace's rows, int64 `[rows, 2]`: round, client. Other columns and arrays are ignored."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"path is {path!r}, which is no file: give a CSV or .npz with round and client")
    try:
        return _read_npz(file) if file.suffix == ".npz" else _read_csv(file)
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read trace {path!r} ({reason}): it needs columns round,client of integers") from None


def _read_npz(file: Path) -> np.ndarray:
    # numpy leaves a broken file open when it is given a path.
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        columns = [arrays[name] for name in COLUMNS]
    if any(column.dtype.kind not in "iu" for column in columns):
        raise ValueError("arrays are not integers")
    return np.stack(columns, axis=1).astype(np.int64)


def _read_csv(file: Path) -> np.ndarray:
    with file.open(encoding="utf-8-sig") as lines:
        header = [word.strip() for word in lines.readline().split(",")]
        places = [header.index(name) for name in COLUMNS]
        body = (line for line in lines if line.strip())
        first = list(itertools.islice(body, 1))
        # numpy warns on an empty table; the caller has a better message.
        if not first:
            return np.empty((0, 2), dtype=np.int64)
        whole = itertools.chain(first, body)
        return np.loadtxt(whole, dtype=np.int64, delimiter=",", comments=None, usecols=places, ndmin=2)
