"""A run folder: configuration, environment, records, timing, checkpoints, result.

config.json        what was asked for
environment.json   where it ran, and on what
records.jsonl      one line per evaluated round, the same bits however often the run was interrupted
timing.jsonl       seconds so far, per evaluated round
checkpoints/       the last two states
result.json, model.pt, scores.npz   when the run is done
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, write_atomically
from fedauc.experiments.config import Config
from fedauc.version import VERSION

CHECKPOINTS_KEPT = 2
"""Checkpoints kept: a damaged last one still leaves one to resume from."""


class RunFolder:
    """Reads and writes a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(path: Path, config: Config, first: Checkpoint, fingerprint: str, note: str) -> RunFolder:
        """Make the folder, all at once: its configuration, the data's fingerprint and note, the first checkpoint."""
        refuse_existing(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "checkpoints").mkdir(parents=True)
        write_atomically(part / "config.json", config.to_json().encode())
        write_atomically(
            part / "environment.json", _encode_json({**describe_environment(), "data": fingerprint, "note": note})
        )
        RunFolder(part).write_checkpoint(first)
        part.rename(path)
        return RunFolder(path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run folder."""
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path} is not a run folder: it has no config.json; give the folder that `run --out` made"
            )
        return RunFolder(path)

    @property
    def config(self) -> Config:
        """What was asked for."""
        return Config.read(self.path / "config.json")

    def check_data(self, fingerprint: str) -> None:
        """Refuse to go on with other data than the run began with."""
        began = self._read_environment()["data"]
        if began != fingerprint:
            found = f"the data's fingerprint is {fingerprint}, but {self.path} began with {began}"
            raise ValueError(f"{found}: put the old data back, or start a new run")

    @property
    def note(self) -> str:
        """What the run was trained on; empty in unfinished folders that did not say it yet."""
        return str(self.read_result()["data"] if self.done else self._read_environment().get("note", ""))

    def _read_environment(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "environment.json").read_text())
        return found

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "result.json").is_file()

    def read_result(self) -> dict[str, Any]:
        """The finished run's result."""
        found: dict[str, Any] = json.loads((self.path / "result.json").read_text())
        return found

    def read_records(self) -> list[dict[str, Any]]:
        """Every whole record; a line torn by a crash is left out."""
        return _read_lines(self.path / "records.jsonl")

    def training_seconds(self) -> float:
        """Training seconds up to the last evaluated round, over all sittings."""
        lines = _read_lines(self.path / "timing.jsonl")
        return float(lines[-1]["seconds"]) if lines else 0.0

    def append_record(self, record: dict[str, Any], seconds: float) -> None:
        """Add an evaluated round."""
        _append_line(self.path / "records.jsonl", record)
        _append_line(self.path / "timing.jsonl", {"round": record["round"], "seconds": seconds})

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save a state and drop all but the last two."""
        folder = self.path / "checkpoints"
        save_checkpoint(folder / f"round-{checkpoint.state.round:08d}.pt", checkpoint)
        for old in sorted(folder.glob("round-*.pt"))[:-CHECKPOINTS_KEPT]:
            old.unlink()

    def rewind_to_checkpoint(self, device: str) -> Checkpoint:
        """The last checkpoint, with the records cut back to it."""
        found = sorted((self.path / "checkpoints").glob("round-*.pt"))
        if not found:
            raise ValueError(
                f"{self.path} holds 0 checkpoints; resuming needs at least 1: start the run again elsewhere"
            )
        checkpoint = load_checkpoint(found[-1], device)
        for name in ("records.jsonl", "timing.jsonl"):
            kept = [line for line in _read_lines(self.path / name) if line["round"] < checkpoint.state.round]
            write_atomically(self.path / name, b"".join(_encode_json(line, indent=None) for line in kept))
        return checkpoint

    def write_result(
        self, result: dict[str, Any], weights: dict[str, torch.Tensor], arrays: dict[str, np.ndarray]
    ) -> None:
        """Write the model and the test scores, then the result that marks the run as done."""
        model, scores = io.BytesIO(), io.BytesIO()
        torch.save(weights, model)
        np.savez(scores, allow_pickle=False, **arrays)
        write_atomically(self.path / "model.pt", model.getvalue())
        write_atomically(self.path / "scores.npz", scores.getvalue())
        write_atomically(self.path / "result.json", _encode_json(result))

    def read_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and raw scores of the test rows, from a finished run."""
        stored = np.load(self.path / "scores.npz", allow_pickle=False)
        return stored["labels"], stored["scores"]


def refuse_existing(path: Path) -> None:
    """Never write over a folder."""
    if path.exists():
        raise ValueError(f"{path} exists already; choose another --out, or go on with `fedauc resume {path}`")


def describe_environment() -> dict[str, Any]:
    """Versions and hardware that a result may depend on."""
    return {
        "fedauc": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _encode_json(value: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(value, indent=indent) + "\n").encode()


def _append_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(_encode_json(line, indent=None))
        file.flush()
        os.fsync(file.fileno())


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_parse_line(path, number, line) for number, line in enumerate(whole, 1)]


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} is damaged in line {number}: {error}; delete that line and resume") from error
    return found
