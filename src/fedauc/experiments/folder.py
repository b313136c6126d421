"""A run folder: configuration, environment, records, timing, checkpoints, result.

config.json        the configuration
environment.json   versions, hardware, and a fingerprint of the data
roster.json        clients, groups, rows and positives
data.json          rows, positives, features, columns left out and why, bytes of the preparation
privacy.json       what a private run promises, and which noise it adds
records.jsonl      one line per evaluated round, the same bits however often the run was interrupted
timing.jsonl       training seconds so far, per evaluated round
checkpoints/       the last two states
noise.key          the secret from which a private run draws its noise, where the recipe asks for one; never share it
stopped.txt        why training had to be stopped
result.json, model.pt, scores.npz   when the run is done; also
scorer.json, reference_scores.npz, MODEL_CARD.md   what `fedauc.load` and `fedauc predict` need, and the model card
manifest.json      the SHA-256 of every file; manifest.sig is its signature, where `fedauc sign` has made one

A federated run has other descriptions and results (see `federation/server.py`), and one more file of lines. Every line
of a `.jsonl` file names its round, so that a resumed run can cut off what came after its checkpoint.
"""

from __future__ import annotations

import io
import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedauc.experiments.config import Config
from fedauc.experiments.manifest import write_manifest
from fedauc.files import append_durably, check_writable, make_folder, move_folder, sync_folder, write_atomically
from fedauc.locks import hold_lock
from fedauc.version import VERSION

DATA_FILE = "data.json"

SECRET_FILE = "noise.key"

PRIVACY_FILE = "privacy.json"

CHECKPOINTS_KEPT = 2
"""If the last checkpoint is damaged, the run can be resumed from the one before it."""


class RunFolder:
    """Reads and writes a run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_locked = False

    @staticmethod
    def create(path: Path, files: Mapping[str, str], first: Checkpoint, secret: bytes | None = None) -> RunFolder:
        """Make the folder with its descriptions and the first checkpoint; it appears complete or not at all."""
        make_folder(path.parent)
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (part / "checkpoints").mkdir(parents=True)
        for name, text in files.items():
            write_atomically(part / name, text.encode())
        RunFolder(part).write_checkpoint(first)
        if secret is not None:
            RunFolder(part).write_secret(secret)
        move_folder(part, path)
        return RunFolder(path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run folder."""
        if not (path / "config.json").is_file():
            raise ValueError(_explain_missing_config(path))
        return RunFolder(path)

    def write_secret(self, secret: bytes) -> None:
        """Keep the secret of a private run's noise, readable by its owner alone."""
        write_atomically(self.path / SECRET_FILE, secret, is_private=True)

    def read_secret(self) -> bytes:
        """The secret that the run began with; without it, a resumed run would add other noise to the same rounds."""
        path = self.path / SECRET_FILE
        if not path.is_file():
            raise ValueError(f"{path} is missing; put the secret of the run's noise back, or start a new run")
        return path.read_bytes()

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return Config.read(self.path / "config.json")

    @contextmanager
    def lock(self, seconds: float = 0.0) -> Iterator[None]:
        """Keep other processes from training in this folder, after waiting for them up to so many seconds.

        A block inside another block holds the same lock, so that a state can be read and trained under one.
        """
        if self._is_locked:
            yield
            return
        busy = f"{self.path} is in use by process {{pid}}; wait until it ends, or stop that process"
        with hold_lock(self.path / ".lock", busy, seconds):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def check_data(self, fingerprint: str) -> None:
        """Refuse to resume with other data than the run began with."""
        began = self._read_json("environment.json")["data"]
        if began != fingerprint:
            change = f"the data's fingerprint is {fingerprint}, but {self.path} began with {began}"
            raise ValueError(f"{change}: put the old data back, or start a new run")

    @property
    def note(self) -> str:
        """What the run was trained on; empty in old unfinished folders."""
        return str(self.read_result()["data"] if self.done else self._read_json("environment.json").get("note", ""))

    @property
    def scoring_rounds(self) -> int:
        """The rounds of the whole run in which clients only score rows; 0 in folders that do not say so."""
        return int(self._read_json("environment.json").get("scoring_rounds", 0))

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "result.json").is_file()

    def read_result(self) -> dict[str, Any]:
        """The finished run's result."""
        return self._read_json("result.json")

    def read_privacy(self) -> dict[str, Any] | None:
        """What a private run promises; None for other runs."""
        return self._read_json(PRIVACY_FILE) if (self.path / PRIVACY_FILE).is_file() else None

    def _read_json(self, name: str) -> dict[str, Any]:
        return read_json_object(self.path / name)

    def read_records(self) -> list[dict[str, Any]]:
        """The records so far."""
        return self.read_lines("records.jsonl")

    def training_seconds(self) -> float:
        """Training seconds up to the last evaluated round, over all processes that worked on the run."""
        lines = self.read_lines("timing.jsonl")
        return float(lines[-1]["seconds"]) if lines else 0.0

    def append_record(self, record: Mapping[str, Any], seconds: float) -> None:
        """Add an evaluated round."""
        self.append_line("records.jsonl", record)
        self.append_line("timing.jsonl", {"round": record["round"], "seconds": seconds})

    def append_line(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to a file of JSON lines; it is on the disk when this returns."""
        with append_durably(self.path / name) as file:
            file.write(encode_json(line, indent=None).encode())

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a file of JSON lines; a line that a crash cut off is left out."""
        path, lines = self.path / name, list[dict[str, Any]]()
        content = path.read_bytes() if path.is_file() else b""
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                lines.append(_check_line(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is damaged in line {number}: {error}; delete that line and resume") from error
        return lines

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save a state, and delete all checkpoints but the last two."""
        folder = self.path / "checkpoints"
        save_checkpoint(folder / f"round-{checkpoint.state.round:08d}.pt", checkpoint)
        outdated = sorted(folder.glob("round-*.pt"))[:-CHECKPOINTS_KEPT]
        for path in outdated:
            path.unlink()
        if outdated:
            # A file that returns after the power has failed would not be in the manifest of the finished run.
            sync_folder(folder)

    def rewind_to_checkpoint(self, device: str) -> Checkpoint:
        """Read the last checkpoint, and cut off the lines of later rounds from all files of lines."""
        checkpoints = sorted((self.path / "checkpoints").glob("round-*.pt"))
        if not checkpoints:
            raise ValueError(
                f"{self.path} holds 0 checkpoints; resuming needs at least 1: start the run again elsewhere"
            )
        checkpoint = load_checkpoint(checkpoints[-1], device)
        # A killed process may have given files their names without syncing the folders; what follows rests on them.
        sync_folder(self.path / "checkpoints")
        sync_folder(self.path)
        for path in self.path.glob("*.jsonl"):
            lines = [line for line in self.read_lines(path.name) if line["round"] < checkpoint.state.round]
            write_atomically(path, *(encode_json(line, indent=None).encode() for line in lines))
        return checkpoint

    def write_stop_reason(self, reason: str) -> None:
        """Say why training had to be stopped."""
        write_atomically(self.path / "stopped.txt", f"{reason}\n".encode())

    def write_arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write an `.npz` file without pickled objects."""
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        write_atomically(self.path / name, buffer.getbuffer())

    def write_model(self, weights: dict[str, torch.Tensor]) -> None:
        """Write `model.pt`, which `load_state_dict` reads."""
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        write_atomically(self.path / "model.pt", buffer.getbuffer())

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the hashes of all files, then the result, which marks the run as done; the rest must be there."""
        content = encode_json(result).encode()
        write_manifest(self.path, {"result.json": content})
        write_atomically(self.path / "result.json", content)

    @property
    def has_scores(self) -> bool:
        """Whether the scores of the test rows are there; a private evaluation leaves them out."""
        return (self.path / "scores.npz").is_file()

    def read_scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels and raw scores of the test rows, from a finished run."""
        with (self.path / "scores.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return stored["labels"], stored["scores"]


def _explain_missing_config(path: Path) -> str:
    """Why a folder is no run folder, and which command reads it, if one does."""
    for run in (path, path / "run"):
        if (run / "federation.json").is_file():
            commands = f"`fedauc federation show {path}` shows it, and `fedauc verify {run}` verifies it"
            return f"{path} is not a run folder but that of a federated run: {commands}"
    if (path / "delivery.json").is_file() and (path / "scorer.json").is_file():
        command = "`fedauc federation report STATE` verifies it, with the site's state folder"
        return f"{path} is not a run folder but that of a delivered model: {command}"
    return f"{path} is not a run folder: it has no config.json; give the folder that `run --out` made"


def _check_line(line: Any) -> dict[str, Any]:
    """A line of a `.jsonl` file, if it is an object that names its round."""
    if not isinstance(line, dict) or type(line.get("round")) is not int:
        raise ValueError("it must be an object with the number of its round")
    return line


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; a damaged file is a `ValueError` that names it."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again, or start the run again") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path} is damaged: it holds a {kind}, not an object; copy it again, or start the run again")
    return content


def check_new_folder(path: Path) -> None:
    """Refuse a path that exists already or cannot be written, before any data is loaded."""
    if not path.exists():
        check_writable(path)
        return
    remedy = "choose another path"
    if (path / "result.json").is_file():
        remedy += f", or look at its result with `fedauc show {path}`"
    elif any((path / name).is_file() for name in ("config.json", "comparison.json", "tuning.json")):
        remedy += f", or go on with `fedauc resume {path}`"
    else:
        remedy = f"it is not a run folder, and fedauc writes over nothing: {remedy}"
    raise ValueError(f"{path} exists already; {remedy}")


def describe_environment() -> dict[str, Any]:
    """The versions and the hardware that a result may depend on."""
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


def encode_json(value: Any, indent: int | None = 2) -> str:
    """JSON that ends with a newline."""
    return json.dumps(value, indent=indent) + "\n"
