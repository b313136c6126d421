"""Lines of JSON that grow round by round, and arrays without pickle."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.experiments.checkpoint import write_atomically


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line; it is on the disk when this returns."""
    with path.open("ab") as file:
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; one torn by a crash is left out."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in whole]


def cut(path: Path, round: int) -> None:
    """Keep the lines of earlier rounds."""
    kept = [line for line in read(path) if line["round"] < round]
    write_atomically(path, b"".join((json.dumps(line) + "\n").encode() for line in kept))


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An .npz file that is there whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())
