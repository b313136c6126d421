"""Parsed arrays on disk: made once, whole or not at all, checked, and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

MANIFEST = "manifest.json"
"""Lists the arrays with their checksums; written last."""


class Parsed(NamedTuple):
    """Read-only memory-mapped arrays by name, and the counts that came with them."""

    arrays: dict[str, np.ndarray]
    counts: dict[str, int]


def cached(home: Path, name: str, build: Callable[[Path], dict[str, int]]) -> Parsed:
    """The arrays of the folder `home/name`, which `build` fills if it is not there yet."""
    folder = home / name
    if not (folder / MANIFEST).is_file():
        _make(folder, build)
    return read(folder)


def read(folder: Path) -> Parsed:
    """The arrays of a parsed folder; refuses one that has changed since it was written."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, checksum in manifest["arrays"].items():
        file = folder / f"{name}.npy"
        if not file.is_file() or _digest(file) != checksum:
            raise ValueError(f"{file} is damaged: delete the folder {folder}, it will be made again from its sources")
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in manifest["arrays"]}
    return Parsed(arrays, manifest["counts"])


def _make(folder: Path, build: Callable[[Path], dict[str, int]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as made:
        part = Path(made) / folder.name
        part.mkdir()
        counts = build(part)
        arrays = {file.stem: _digest(file) for file in sorted(part.glob("*.npy"))}
        (part / MANIFEST).write_text(json.dumps({"arrays": arrays, "counts": counts}, indent=2) + "\n")
        try:
            part.rename(folder)
        except OSError:
            # Another process was faster, which is as good.
            if not (folder / MANIFEST).is_file():
                raise


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
