"""Parsed arrays on disk: made once, whole or not at all, checked, and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.locks import Busy, locked

MANIFEST = "manifest.json"
"""Lists the arrays with their checksums; written last."""

PART = ".part-"
"""How the name of a folder begins that is being filled."""

LOCK = ".lock"
"""How the name of a part's lock ends."""


class Parsed(NamedTuple):
    """Read-only memory-mapped arrays by name, and the counts that came with them."""

    arrays: dict[str, np.ndarray]
    counts: dict[str, int]


def cached(
    home: Path, name: str, build: Callable[[Path], dict[str, int]], record: Callable[[], dict[str, str]] = dict
) -> Parsed:
    """The arrays of the folder `home/name`, which `build` fills if it is not there yet; `record` tells its sources."""
    folder = home / name
    if not folder.is_dir():
        _make(folder, build, record)
    return read(folder)


def read(folder: Path) -> Parsed:
    """The arrays of a parsed folder; refuses one that has changed since it was written."""
    manifest = _manifest(folder)
    for name, checksum in manifest["arrays"].items():
        file = folder / f"{name}.npy"
        if not file.is_file() or _digest(file) != checksum:
            raise _damaged(file)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in manifest["arrays"]}
    return Parsed(arrays, manifest["counts"])


def recorded(folder: Path) -> dict[str, str]:
    """The checksums, by name, of the files that a folder was made from; nothing where they were not kept."""
    sources: dict[str, str] = _manifest(folder).get("sources", {})
    return sources


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        found: Any = json.loads(file.read_text())
    except (FileNotFoundError, IsADirectoryError, ValueError):
        raise _damaged(file) from None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("arrays", "counts")):
        raise _damaged(file)
    if not found["arrays"] or not {array.stem for array in folder.glob("*.npy")} <= set(found["arrays"]):
        raise _damaged(file)
    return found


def _damaged(file: Path) -> ValueError:
    remedy = f"delete the folder {file.parent}, it will be made again from its sources"
    return ValueError(f"{file} is damaged: {remedy}")


def _make(folder: Path, build: Callable[[Path], dict[str, int]], record: Callable[[], dict[str, str]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    with _part(folder) as part:
        sources = record()
        counts = build(part)
        arrays = {file.stem: _digest(file) for file in sorted(part.glob("*.npy"))}
        manifest = {"arrays": arrays, "counts": counts, "sources": sources}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        try:
            part.rename(folder)
        except OSError:
            # Another process was faster, which is as good.
            if not folder.is_dir():
                raise


@contextmanager
def _part(folder: Path) -> Iterator[Path]:
    """A folder to fill, removed afterwards. Its lock, taken before it is made, shows that it is in use."""
    part = folder.with_name(f"{PART}{uuid.uuid4().hex}")
    # Nobody else has this name, but that another process may just be looking whether it is in use.
    with locked(part.with_name(part.name + LOCK), f"{part} is in use", seconds=60):
        (part / folder.name).mkdir(parents=True)
        try:
            yield part / folder.name
        finally:
            shutil.rmtree(part)


def _sweep(home: Path) -> None:
    """Remove what processes that were killed have left: the parts whose lock nobody holds."""
    for part in {path.with_name(path.name.removesuffix(LOCK)) for path in home.glob(f"{PART}*")}:
        try:
            with locked(part.with_name(part.name + LOCK), f"{part} is in use") as sure:
                if sure:
                    shutil.rmtree(part, ignore_errors=True)
        except (Busy, OSError):
            continue


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
