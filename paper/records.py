"""The records of finished runs: one file of JSON lines per dataset, and one archive of test ranks beside it.

<dataset>.jsonl       one line per run: the configuration, as far as it differs from the defaults, and the results
<dataset>-ranks.npz   the ranks of the test scores, for runs that a table tests against each other

A record is found by its configuration. Fields at their default are not part of it, so a new field with a default leaves
every record where it was; nor are the fields in `IRRELEVANT`, which do not decide a result. An AUC and its DeLong test
depend on the scores only through their order, so two-byte ranks lose nothing.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import struct
import subprocess
import tokenize
import typing
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedauc
from fedauc import keys
from fedauc.algorithms import find_methods
from fedauc.discovery import lookup
from fedauc.experiments.config import Config, convert_value, to_plain
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.files import write_atomically

MOST_ROWS = 22_500
"""Test rows whose ranks are stored. Of a larger test part, every positive and a random sample of the negatives are."""

FORMAT = 1
"""Raised when an old reader could misunderstand a new line."""

VERSIONS = ("fedauc", "python", "torch", "numpy", "gpu")


class Point(NamedTuple):
    """An evaluated cycle: rounds and bytes both ways so far, and AUC on the test and validation parts."""

    cycle: int
    rounds: int
    bytes: int
    auc: float
    validation_auc: float | None


class Ranks(NamedTuple):
    """Test labels, and the rank of each row's score among the distinct scores."""

    labels: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Record:
    """The results of a run. `stopped` says why a run ended early; its curve reaches up to there."""

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
    def final_point(self) -> Point | None:
        """The last evaluated cycle of a run that reached its end."""
        return None if self.stopped or not self.curve else self.curve[-1]

    @property
    def selected_auc(self) -> float | None:
        """Test AUC at the evaluated cycle with the highest validation AUC, the first of equals."""
        scored = [(point.validation_auc, point.auc) for point in self.curve if point.validation_auc is not None]
        return max(scored, key=lambda pair: pair[0])[1] if self.final_point and scored else None


FIELDS = {name: kind for name, kind in typing.get_type_hints(Record).items() if name != "config"} | {"versions": dict}
"""The types of the results of a record in JSON."""


# ------------------------------------------------------------------------------------------------------ configurations


@functools.lru_cache(maxsize=8192)
def plain_config(config: Config) -> Config:
    """A configuration without what does not decide its result."""
    return replace(config, recipe=replace(config.recipe, device="cpu", engine="auto"))


@functools.lru_cache(maxsize=8192)
def changed_fields(config: Config) -> str:
    """The fields of a configuration that differ from its method's defaults, as JSON that `Config.from_json` reads."""
    tree = _changes_from(Config(recipe=Recipe.of(config.recipe.method)), plain_config(config))
    tree["recipe"] = {"method": config.recipe.method, **tree.get("recipe", {})}
    tree["data"] = {"name": config.data.name, **tree.get("data", {})}
    return json.dumps(tree, sort_keys=True)


def _changes_from(default: Any, value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from `default`, or from its class's defaults if that has another class."""
    same = type(value) is type(default)
    name = getattr(type(value), "name", None)
    changes: dict[str, Any] = {"name": name} if isinstance(name, str) else {}
    for field in fields(value):
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        new, old = getattr(value, field.name), getattr(default, field.name) if same else usual
        if new != old:
            changes[field.name] = _changes_from(old, new) if is_dataclass(new) else to_plain(new)
    return changes


def run_name(config: Config) -> str:
    """A short name for a run: of its folder while it is unfinished, and of its ranks."""
    digest = hashlib.blake2b(changed_fields(config).encode(), digest_size=6).hexdigest()
    return f"{config.data.name}-{config.recipe.method}-{digest}"


# --------------------------------------------------------------------------------------------------------------- files

DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError, EOFError, SyntaxError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""The exceptions of the readers of JSON and of arrays, depending on which byte is wrong."""


class NewerFormat(Exception):
    """A line that a later version wrote: it is not damaged, but this version cannot read it."""


@contextmanager
def name_damage(what: str, remedy: str) -> Iterator[None]:
    """Raise a ValueError that says what cannot be read, why, and what to do."""
    try:
        yield
    except NewerFormat as newer:
        raise ValueError(f"{what} has {newer}") from None
    except DAMAGE as error:
        raise ValueError(f"{what} is damaged ({str(error) or type(error).__name__}); {remedy}") from error


class JsonLines:
    """An append-only file of JSON objects, one per line, for one writer at a time.

    A crash may cut off the last line: readers ignore it then, and the next append replaces it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_objects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each object, with its position for messages. The caller names what is wrong with one by `name_damage`."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        for number, line in enumerate(content[: _whole_length(content)].split(b"\n"), start=1):
            if line.strip():
                position = f"line {number} of {self.path}"
                with name_damage(position, REMEDY):
                    parsed = _parse_object(line)
                yield position, parsed

    def append_object(self, content: dict[str, Any]) -> None:
        """Add a line, and wait until it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"format": FORMAT, **content}, separators=(",", ":")) + "\n"
        with open(self.path, "ab+") as file:
            file.seek(0)
            present = file.read()
            file.truncate(_whole_length(present))
            # An editor may have left out the last line's end.
            unfinished = present[: _whole_length(present)][-1:] not in (b"", b"\n")
            file.write(b"\n" * unfinished + line.encode())
            file.flush()
            os.fsync(file.fileno())


REMEDY = "delete that line, and what it records is done again"


def _whole_length(content: bytes) -> int:
    """The length of a file without a last line that was cut off."""
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:].decode())
    except ValueError:
        return start
    return len(content)


def _parse_object(line: bytes) -> dict[str, Any]:
    parsed = json.loads(line.decode())
    if not isinstance(parsed, dict):
        raise ValueError(f"it is a {type(parsed).__name__}, not an object")
    if "format" not in parsed:
        raise ValueError("it lacks format")
    if convert_value(int, parsed.pop("format"), "format") > FORMAT:
        raise NewerFormat(f"a newer format than {FORMAT}: upgrade fedauc")
    return parsed


# --------------------------------------------------------------------------------------------------------------- store


class RecordStore:
    """A folder of records. The last line of a configuration counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results: dict[str, dict[str, dict[str, Any]]] = {}
        self._archives: dict[str, dict[str, np.ndarray]] = {}

    @property
    def has_records(self) -> bool:
        """Whether there is a record at all."""
        return any(path.stat().st_size for path in self.path.glob("*.jsonl"))

    def find_record(self, config: Config) -> Record | None:
        """The record of a configuration, if it has run."""
        results = self._results_of(config.data.name).get(changed_fields(config))
        return Record(plain_config(config), **results) if results else None

    def has_runs(self, data: str, method: str) -> bool:
        """Whether any run of a method on a dataset has a record."""
        return any(json.loads(changes)["recipe"]["method"] == method for changes in self._results_of(data))

    def is_complete(self, config: Config, tested: bool) -> bool:
        """Whether nothing is left to run: there is a record, and ranks if the run is tested and did not stop."""
        record = self.find_record(config)
        return record is not None and (not tested or bool(record.stopped) or self.load_ranks(config) is not None)

    def load_ranks(self, config: Config) -> Ranks | None:
        """The test ranks of a configuration, if they are stored."""
        arrays, name = self._archive_of(config.data.name), run_name(config)
        entry = next((entry for entry in arrays if entry.endswith(f"/{name}")), None)
        if entry is None:
            return None
        with self._name_archive_damage(config.data.name):
            packed, ranks = arrays[f"labels/{entry.partition('/')[0]}"], arrays[entry]
            if ranks.ndim != 1 or ranks.dtype != np.uint16 or packed.shape != (math.ceil(len(ranks) / 8),):
                raise ValueError(f"labels {packed.shape} do not fit ranks {ranks.shape} of {ranks.dtype}")
            return Ranks(np.unpackbits(packed, count=len(ranks)), ranks)

    def add_run(self, folder: RunFolder, stopped: str = "", tested: bool = True) -> Record:
        """Record a run that has finished or stopped, with its ranks if it is to be tested."""
        scores = folder.read_scores() if tested and folder.done else None
        return self.add_record(summarize_folder(folder, stopped), scores)

    def add_record(self, record: Record, scores: tuple[np.ndarray, np.ndarray] | None) -> Record:
        """Write the ranks of the test labels and scores, where they are given, and then the record."""
        dataset, changes = record.config.data.name, changed_fields(record.config)
        known = self._results_of(dataset)
        if scores is not None:
            self._add_ranks(dataset, run_name(record.config), *rank_scores(*scores))
        results = {name: value for name, value in vars(record).items() if name != "config"}
        JsonLines(self._lines_path(dataset)).append_object({"config": json.loads(changes), **results})
        known[changes] = results
        return record

    def _results_of(self, dataset: str) -> dict[str, dict[str, Any]]:
        """The fields of a dataset's records, by the changed fields of their configurations."""
        if dataset not in self._results:
            results = {}
            for position, content in JsonLines(self._lines_path(dataset)).read_objects():
                with name_damage(position, REMEDY):
                    changes, decoded = _decode_record(content)
                results[changes] = decoded
            self._results[dataset] = results
        return self._results[dataset]

    def _archive_of(self, dataset: str) -> dict[str, np.ndarray]:
        """Every array of a dataset's archive: `labels/<digest>`, and `<digest>/<run>` for a run's ranks."""
        path = self._ranks_path(dataset)
        if dataset not in self._archives:
            with self._name_archive_damage(dataset):
                self._archives[dataset] = _read_archive(path.read_bytes()) if path.is_file() else {}
        return self._archives[dataset]

    def _add_ranks(self, dataset: str, run: str, packed: np.ndarray, ranks: np.ndarray) -> None:
        digest = hashlib.blake2b(packed.tobytes(), digest_size=6).hexdigest()
        arrays = {name: array for name, array in self._archive_of(dataset).items() if not name.endswith(f"/{run}")}
        arrays |= {f"labels/{digest}": packed, f"{digest}/{run}": ranks}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self._ranks_path(dataset), buffer.getvalue())
        self._archives[dataset] = arrays

    def _name_archive_damage(self, dataset: str) -> AbstractContextManager[None]:
        remedy = f"restore it, or delete it, and the runs on {dataset} that a table tests are done again"
        return name_damage(f"ranks file {self._ranks_path(dataset)}", remedy)

    def _lines_path(self, dataset: str) -> Path:
        return self.path / f"{dataset}.jsonl"

    def _ranks_path(self, dataset: str) -> Path:
        return self.path / f"{dataset}-ranks.npz"


def _read_archive(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        # The end of a ZIP archive says how many entries it has; zipfile does not compare.
        if (count := int.from_bytes(content[-12:-10], "little")) != len(archive.files):
            raise ValueError(f"it has {len(archive.files)} of {count} entries")
        return {name: archive[name] for name in archive.files}


def rank_scores(labels: np.ndarray, scores: np.ndarray) -> Ranks:
    """Labels packed to bits, and two-byte ranks, of the test rows that are stored.

    Those are every row, or every positive and as many negatives as there is room for, the same for every method.
    """
    negatives = np.flatnonzero(labels == 0)
    room = max(1, MOST_ROWS - (len(labels) - len(negatives)))
    if room < len(negatives):
        sampled = negatives[keys.sample_indices(len(negatives), room, 0, "kept", "negatives")]
        stored = np.sort(np.concatenate([np.flatnonzero(labels != 0), sampled]))
        labels, scores = labels[stored], scores[stored]
    ranks = np.unique(scores, return_inverse=True)[1].astype(np.uint16)
    return Ranks(np.packbits(labels.astype(bool)), ranks)


def _decode_record(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The changed fields of a record's configuration, as the text that it is found by, and its results."""
    if lacking := {"config", *FIELDS} - content.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    config, curve = content.pop("config"), content.pop("curve")
    if not isinstance(config, dict):
        raise ValueError(f"config is a {type(config).__name__}; it must be a JSON object")
    lookup("method", config["recipe"]["method"], find_methods())
    if unknown := content.keys() - FIELDS.keys():
        raise ValueError(f"it has an unknown {', '.join(sorted(unknown))}")
    results = {name: convert_value(FIELDS[name], value, name) for name, value in content.items()}
    if not (results["auc"] is None or _is_auc(results["auc"])):
        raise ValueError(f"auc is {results['auc']}; it must be from 0 to 1")
    return json.dumps(config, sort_keys=True), {**results, "curve": tuple(_check_point(Point(*row)) for row in curve)}


def _check_point(point: Point) -> Point:
    counted = all(isinstance(count, int) for count in point[:3])
    if not (counted and _is_auc(point.auc) and (point.validation_auc is None or _is_auc(point.validation_auc))):
        raise ValueError(f"the curve has {list(point)}; it must be three counts, and AUCs from 0 to 1")
    return point


def _is_auc(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


# --------------------------------------------------------------------------------------------------------- run folders


def summarize_folder(folder: RunFolder, stopped: str) -> Record:
    """The record of a run folder."""
    rounds, environment = folder.read_records(), json.loads((folder.path / "environment.json").read_text())
    last = rounds[-1] if rounds else {}
    return Record(
        config=plain_config(folder.config),
        stopped=stopped,
        auc=last.get("auc"),
        low=last.get("low"),
        high=last.get("high"),
        average_precision=last.get("average_precision"),
        curve=tuple(
            Point(
                cycle=line["cycle"],
                rounds=line["rounds"],
                bytes=line["bytes_up"] + line["bytes_down"],
                auc=line["auc"],
                validation_auc=line.get("validation_auc"),
            )
            for line in rounds
        ),
        seconds=round(folder.training_seconds(), 3),
        data=folder.read_result()["data"] if folder.done else "",
        versions={name: environment[name] for name in VERSIONS},
        commit=source_commit(),
    )


def source_commit(package: Path = Path(fedauc.__file__).parent) -> str | None:
    """The commit of the source in use, if it lies in a repository; a plus marks changes of the source since."""

    def run_git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # New records beside the source change nothing in it.
        changed = run_git("status", "--porcelain", "--", ".")
        return run_git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
