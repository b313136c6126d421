"""Finished runs as small files: a JSON record each, and the test rows' ranks beside it.

An AUC and its DeLong test depend on scores through their order alone, so ranks of two bytes lose nothing. Of large test
parts they are a sample's, for the test alone: a record has the AUC of all rows. It is found by its configuration, less
what does not decide the result: device, engine, checkpoints.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import struct
import subprocess
import tokenize
import typing
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedauc
from fedauc import keys
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.config import FORMAT, Config, convert_value, to_plain
from fedauc.experiments.folder import RunFolder

MOST_ROWS = 22_500
"""Test rows whose ranks are kept, 50 kB of them; larger parts keep every positive and a keyed draw of negatives."""

VERSIONS = ("fedauc", "python", "torch", "numpy", "gpu")


class Point(NamedTuple):
    """An evaluated cycle: rounds and bytes both ways so far, and AUC on the test and validation parts."""

    cycle: int
    rounds: int
    bytes: int
    auc: float
    validation_auc: float | None


class Ranks(NamedTuple):
    """Test labels, and the place of each row's score among the distinct ones."""

    labels: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Record:
    """What is kept of a run. One that stopped says why, and has the curve up to there."""

    config: Config
    stopped: str
    auc: float | None
    low: float | None
    high: float | None
    average_precision: float | None
    curve: tuple[Point, ...]
    seconds: float
    data: str
    versions: dict[str, Any]
    commit: str | None

    @property
    def final(self) -> Point | None:
        """The last evaluated cycle of a run that reached its end."""
        return None if self.stopped or not self.curve else self.curve[-1]

    @property
    def selected(self) -> float | None:
        """Test AUC at the evaluated cycle with the highest validation AUC, the first of equals."""
        judged = [(point.validation_auc, point.auc) for point in self.curve if point.validation_auc is not None]
        return max(judged, key=lambda pair: pair[0])[1] if self.final and judged else None


FIELDS = {**typing.get_type_hints(Record), "versions": dict}
"""A record's fields in JSON; `config` and `curve` have readers of their own."""


class Store:
    """A folder of records: `runs/` holds them, `ranks/` the test ranks of those that a table tests."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def filled(self) -> bool:
        """Whether there is a record at all."""
        return any((self.path / "runs").glob("*.json"))

    @cached_property
    def _known(self) -> dict[Config, Record]:
        return {record.config: record for record in self._read()}

    def get(self, config: Config) -> Record | None:
        """The record of a configuration, if it has run."""
        return self._known.get(plain(config))

    def complete(self, config: Config, tested: bool) -> bool:
        """Whether nothing is left to run: a record is there, and the ranks of a run that is tested and did not stop."""
        record = self.get(config)
        return record is not None and (not tested or bool(record.stopped) or self._ranks(config).is_file())

    def begun(self, data: str, method: str) -> bool:
        """Whether any run of a method on a dataset has a record."""
        return (data, method) in self._pairs

    @cached_property
    def _pairs(self) -> set[tuple[str, str]]:
        return {_pair(config) for config in self._known}

    def ranks(self, config: Config) -> Ranks | None:
        """The test ranks of a configuration, if they are kept."""
        path = self._ranks(config)
        if not path.is_file():
            return None
        content, record = path.read_bytes(), self._run(config)
        with _told(f"ranks file {path}", f"delete it and {record}, and the run is done again"):
            return _unpacked(content)

    def put(self, folder: RunFolder, stopped: str = "", tested: bool = True) -> Record:
        """Keep a run that is done or stopped; its ranks too, if it is to be tested. Ranks come first."""
        scores = folder.read_scores() if tested and folder.done else None
        return self.keep(summarize(folder, stopped), scores)

    def keep(self, record: Record, scores: tuple[np.ndarray, np.ndarray] | None) -> Record:
        """Write a record, and the ranks of its test labels and scores where they are given."""
        if scores is not None:
            write_atomically(_made(self._ranks(record.config)), _packed(*scores))
        content = {"format": FORMAT, **_encode(record)}
        write_atomically(_made(self._run(record.config)), (json.dumps(content) + "\n").encode())
        self._known[record.config] = record
        self._pairs.add(_pair(record.config))
        return record

    def _read(self) -> Iterator[Record]:
        for path in sorted((self.path / "runs").glob("*.json")):
            content = path.read_bytes()
            with _told(f"record {path}", "delete it, and its run is done again"):
                record = _decode(json.loads(content.decode()))
            yield record

    def _run(self, config: Config) -> Path:
        return self.path / "runs" / f"{name(config)}.json"

    def _ranks(self, config: Config) -> Path:
        return self.path / "ranks" / f"{name(config)}.npz"


RENAMED = {"learning_rate": "step_size", "stage_output": "output", "learning-rate": "step-size"}
"""Fields that older records call otherwise. TODO: goes with the conversion of the records."""


def with_new_names(tree: Any) -> Any:
    """A stored configuration or choice with today's names."""
    if isinstance(tree, list):
        return [with_new_names(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    old = {name: new for new, name in RENAMED.items()}
    renamed = {old.get(key, key): with_new_names(value) for key, value in tree.items() if key != "checkpoint_every"}
    return renamed | ({"format": FORMAT} if "format" in renamed else {})


@functools.lru_cache(maxsize=8192)
def plain(config: Config) -> Config:
    """A configuration without what does not decide its result."""
    return replace(config, recipe=replace(config.recipe, device="cpu", engine="auto"))


def _pair(config: Config) -> tuple[str, str]:
    return config.data.name, config.recipe.method


def name(config: Config) -> str:
    """What a run's files are called."""
    text = plain(config).to_json().replace(f'"format": {FORMAT}', '"format": 1')
    for new, old in RENAMED.items():
        text = text.replace(f'"{new}"', f'"{old}"')
    # Records are named by the digest of a configuration of format 1, which ended with another field.
    text = text.replace("\n}\n", ',\n  "checkpoint_every": 1\n}\n')
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{config.data.name}-{config.recipe.method}-{digest}"


def summarize(folder: RunFolder, stopped: str) -> Record:
    """What is kept of a run folder."""
    records, where = folder.read_records(), json.loads((folder.path / "environment.json").read_text())
    last = records[-1] if records else {}
    return Record(
        config=plain(folder.config),
        stopped=stopped,
        auc=last.get("auc"),
        low=last.get("low"),
        high=last.get("high"),
        average_precision=last.get("average_precision"),
        curve=tuple(_point(record) for record in records),
        seconds=round(folder.training_seconds(), 3),
        data=folder.read_result()["data"] if folder.done else "",
        versions={key: where[key] for key in VERSIONS},
        commit=_commit(),
    )


def _point(record: dict[str, Any]) -> Point:
    traffic = record["bytes_up"] + record["bytes_down"]
    return Point(record["cycle"], record["rounds"], traffic, record["auc"], record.get("validation_auc"))


def _packed(labels: np.ndarray, scores: np.ndarray) -> bytes:
    kept = _kept(labels)
    labels, scores = labels[kept].astype(bool), scores[kept]
    ranks = np.unique(scores, return_inverse=True)[1].astype(np.uint16)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, labels=np.packbits(labels), ranks=ranks)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Ranks:
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        labels, ranks = stored["labels"], stored["ranks"]
    if ranks.ndim != 1 or ranks.dtype != np.uint16 or labels.shape != (math.ceil(len(ranks) / 8),):
        raise ValueError(f"labels {labels.shape} do not fit ranks {ranks.shape} of {ranks.dtype}")
    return Ranks(np.unpackbits(labels, count=len(ranks)), ranks)


def _kept(labels: np.ndarray) -> np.ndarray:
    """Every row, or every positive and as many negatives as there is room for; the same ones for every method."""
    negatives = np.flatnonzero(labels == 0)
    room = max(1, MOST_ROWS - (len(labels) - len(negatives)))
    if room >= len(negatives):
        return np.arange(len(labels))
    drawn = negatives[keys.sample_indices(len(negatives), room, 0, "kept", "negatives")]
    return np.sort(np.concatenate([np.flatnonzero(labels != 0), drawn]))


def _commit(package: Path = Path(fedauc.__file__).parent) -> str | None:
    """The commit of the source in use, if it lies in a repository; a plus marks changes of the source since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # Records that come and go beside the source change nothing in it.
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _encode(record: Record) -> dict[str, Any]:
    found = {key: value for key, value in vars(record).items() if key != "config"}
    return {"config": {"format": FORMAT, **to_plain(record.config)}, **found}


DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, EOFError, SyntaxError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""What the readers of JSON and of arrays raise, depending on which byte is wrong."""


class _Newer(Exception):
    """A file of a later version: whole, but not ours to read."""


@contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Say of a file that cannot be read what it is and what to do."""
    try:
        yield
    except _Newer as newer:
        raise ValueError(f"{what} has {newer}") from None
    except DAMAGE as error:
        raise ValueError(f"{what} is damaged ({str(error) or type(error).__name__}); {remedy}") from error


def _decode(found: Any) -> Record:
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object")
    if lacking := {"format", *FIELDS} - found.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    if convert_value(int, found.pop("format"), "format") > FORMAT:
        raise _Newer(f"a newer format than {FORMAT}: upgrade fedauc")
    stored = with_new_names(found.pop("config"))
    if isinstance(stored, dict):
        stored.pop("format", None)
    config = Config.from_json(json.dumps(stored), "config")
    curve = tuple(_checked(Point(*point)) for point in found.pop("curve"))
    others = {
        key: convert_value(kind, found.pop(key), key) for key, kind in FIELDS.items() if key not in ("config", "curve")
    }
    if found:
        raise ValueError(f"it has an unknown {', '.join(found)}")
    if not (others["auc"] is None or _is_auc(others["auc"])):
        raise ValueError(f"auc is {others['auc']}; it must be from 0 to 1")
    return Record(config=config, curve=curve, **others)


def _checked(point: Point) -> Point:
    counted = all(isinstance(count, int) for count in point[:3])
    if not (counted and _is_auc(point.auc) and (point.validation_auc is None or _is_auc(point.validation_auc))):
        raise ValueError(f"the curve has {list(point)}; it must be three counts, and AUCs from 0 to 1")
    return point


def _is_auc(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
