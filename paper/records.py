"""The records of finished runs: one file of JSON lines per dataset, and one archive of test ranks beside it.

<dataset>.jsonl       one line per run: the configuration, as far as it differs from the defaults, and the results
<dataset>-ranks.npz   the ranks of the test scores, for runs that a table tests against each other

A record is found by its configuration without the device and the engine, which do not decide a result. Fields at their
default are not part of it either, so a new field with a default leaves every record where it was. Where a default of
the library has changed since, `RECORDED_DEFAULTS` has the one that the records rely on. An AUC and its DeLong
test depend on the scores only through their order, so two-byte ranks lose nothing.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

import fedauc
from fedauc import keys
from fedauc.algorithms import find_methods
from fedauc.discovery import UnknownName, lookup
from fedauc.experiments.config import Config, convert_value, to_plain
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.files import write_atomically

MOST_ROWS = 22_500
"""Test rows whose ranks are stored. Of a larger test part, every positive and a random sample of the negatives are."""

COMMIT_VARIABLE = "FEDAUC_COMMIT"
"""The environment variable that names the commit of a copy of the source that lies in no repository."""

CHOICES_SUFFIX = "-choices"
"""How the names of files with chosen settings end, which lie among those of records."""

FORMAT = 1
"""Raised when an old reader could misunderstand a new line."""

RECORDED_DEFAULTS: Mapping[str, Any] = MappingProxyType({"weighting": "clients"})
"""Fields of a recipe that a record leaves out at these values, which were the defaults when the records began."""

T = TypeVar("T")


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


# ------------------------------------------------------------------------------------------------------ configurations


@functools.lru_cache(maxsize=8192)
def changed_fields(config: Config) -> str:
    """The fields of a configuration that differ from its method's recorded defaults, as JSON for `read_changes`."""
    default = Config(recipe=Recipe.of(config.recipe.method, **RECORDED_DEFAULTS))
    tree = _changes_from(default, replace(config, recipe=replace(config.recipe, device="cpu", engine="auto")))
    tree["recipe"] = {"method": config.recipe.method, **tree.get("recipe", {})}
    tree["data"] = {"name": config.data.name, **tree.get("data", {})}
    return json.dumps(tree, sort_keys=True)


def read_changes(changes: Mapping[str, Any]) -> Config:
    """The configuration that a record's changed fields describe."""
    return Config.from_json(json.dumps({**changes, "recipe": {**RECORDED_DEFAULTS, **changes["recipe"]}}))


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


# ---------------------------------------------------------------------------------------------------------- JSON lines


@contextmanager
def name_damage(what: str, remedy: str) -> Iterator[None]:
    """Raise a ValueError that says what cannot be read, why, and what to do."""
    try:
        yield
    except OSError:
        raise
    except UnknownName as error:
        reason = f"{error}; if it is your own, nothing is damaged: name its module with --plugin"
        raise ValueError(f"{what} is damaged ({reason}); {remedy}") from error
    except Exception as error:
        # The readers of JSON and of arrays raise a dozen kinds of exceptions, depending on which byte is wrong.
        raise ValueError(f"{what} is damaged ({str(error) or type(error).__name__}); {remedy}") from error


def read_json_lines(path: Path, decode: Callable[[dict[str, Any]], T]) -> list[T]:
    """What `decode` makes of every object in a file of JSON lines. A last line that a crash cut off is left out."""
    remedy = "delete that line, and what it records is done again"
    content, decoded = path.read_bytes() if path.is_file() else b"", list[T]()
    for number, line in enumerate(content[: _complete_length(content)].split(b"\n"), start=1):
        if line.strip():
            position = f"line {number} of {path}"
            with name_damage(position, remedy):
                parsed = json.loads(line.decode())
                if not isinstance(parsed, dict):
                    raise ValueError(f"it is a {type(parsed).__name__}, not an object")
                if "format" not in parsed:
                    raise ValueError("it lacks format")
                line_format = convert_value(int, parsed.pop("format"), "format")
            if line_format > FORMAT:
                raise ValueError(f"{position} has a newer format than {FORMAT}: upgrade fedauc")
            with name_damage(position, remedy):
                decoded.append(decode(parsed))
    return decoded


def append_json_line(path: Path, content: dict[str, Any]) -> None:
    """Add a line, in place of a last line that a crash cut off, and wait until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"format": FORMAT, **content}, separators=(",", ":")) + "\n"
    with open(path, "ab+") as file:
        file.seek(0)
        present = file.read()
        file.truncate(_complete_length(present))
        # An editor may have left out the last line's end.
        unfinished = present[: _complete_length(present)][-1:] not in (b"", b"\n")
        file.write(b"\n" * unfinished + line.encode())
        file.flush()
        os.fsync(file.fileno())


def _complete_length(content: bytes) -> int:
    """The length of a file without a last line that was cut off."""
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:].decode())
    except ValueError:
        return start
    return len(content)


# --------------------------------------------------------------------------------------------------------------- store


class RecordStore:
    """A folder of records. The last line of a configuration counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, dict[str, Record]] = {}
        self._archives: dict[str, dict[str, np.ndarray]] = {}

    @property
    def has_records(self) -> bool:
        """Whether there is a record at all."""
        return any(path.stat().st_size for path in self.path.glob("*.jsonl"))

    def find_record(self, config: Config) -> Record | None:
        """The record of a configuration, if it has run."""
        return self._read_records(config.data.name).get(changed_fields(config))

    def has_runs(self, dataset: str, method: str) -> bool:
        """Whether any run of a method on a dataset has a record."""
        return any(json.loads(changes)["recipe"]["method"] == method for changes in self._read_records(dataset))

    def seconds_per_cycle(self, dataset: str) -> float | None:
        """The median over the recorded runs of a dataset; None if there are none."""
        known = [
            record.seconds / read_changes(json.loads(changes)).recipe.cycles
            for changes, record in self._read_records(dataset).items()
            if record.seconds and not record.stopped
        ]
        return statistics.median(known) if known else None

    def is_complete(self, config: Config, tested: bool) -> bool:
        """Whether nothing is left to run: there is a record, and ranks if the run is tested and did not stop."""
        record = self.find_record(config)
        return record is not None and (not tested or bool(record.stopped) or self.load_ranks(config) is not None)

    def load_ranks(self, config: Config) -> Ranks | None:
        """The test ranks of a configuration, if they are stored."""
        arrays, name = self._read_archive(config.data.name), run_name(config)
        entry = next((entry for entry in arrays if entry.endswith(f"/{name}")), None)
        if entry is None:
            return None
        with self._name_archive_damage(config.data.name):
            packed, ranks = arrays[f"labels/{entry.partition('/')[0]}"], arrays[entry]
            if ranks.ndim != 1 or ranks.dtype != np.uint16 or packed.shape != (math.ceil(len(ranks) / 8),):
                raise ValueError(f"labels {packed.shape} do not fit ranks {ranks.shape} of {ranks.dtype}")
            return Ranks(np.unpackbits(packed, count=len(ranks)), ranks)

    def add_run(self, folder: RunFolder, stopped: str = "", tested: bool = True) -> None:
        """Record a run that has finished or stopped, with its ranks if it is to be tested."""
        scores = folder.read_scores() if tested and folder.done else None
        self.add_record(folder.config, summarize_folder(folder, stopped), scores)

    def add_record(self, config: Config, record: Record, scores: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Write the ranks of the test labels and scores, where they are given, and then the record."""
        dataset, changes = config.data.name, changed_fields(config)
        if scores is not None:
            self._add_ranks(dataset, run_name(config), *rank_scores(*scores))
        self._append_record(dataset, changes, record)

    def merge(self, source: RecordStore) -> int:
        """Add the runs of another folder that have no record here, with their ranks; return their number."""
        added = 0
        for path in sorted(source.path.glob("*.jsonl")):
            dataset = path.stem
            if dataset.endswith(CHOICES_SUFFIX):
                continue
            known = self._read_records(dataset)
            for changes, record in source._read_records(dataset).items():
                if changes in known:
                    continue
                config = read_changes(json.loads(changes))
                if ranks := source.load_ranks(config):
                    self._add_ranks(dataset, run_name(config), np.packbits(ranks.labels), ranks.ranks)
                self._append_record(dataset, changes, record)
                added += 1
        return added

    def _append_record(self, dataset: str, changes: str, record: Record) -> None:
        append_json_line(self.path / f"{dataset}.jsonl", {"config": json.loads(changes), **asdict(record)})
        self._read_records(dataset)[changes] = record

    def _read_records(self, dataset: str) -> dict[str, Record]:
        """A dataset's records, by the changed fields of their configurations."""
        if dataset not in self._records:
            self._records[dataset] = dict(read_json_lines(self.path / f"{dataset}.jsonl", _decode_record))
        return self._records[dataset]

    def _read_archive(self, dataset: str) -> dict[str, np.ndarray]:
        """Every array of a dataset's archive: `labels/<digest>`, and `<digest>/<run>` for a run's ranks."""
        if dataset not in self._archives:
            path, arrays = self.path / f"{dataset}-ranks.npz", dict[str, np.ndarray]()
            with self._name_archive_damage(dataset):
                content = path.read_bytes() if path.is_file() else None
                if content is not None:
                    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                        # The end of a ZIP archive says how many entries it has; zipfile does not compare.
                        if (count := int.from_bytes(content[-12:-10], "little")) != len(archive.files):
                            raise ValueError(f"it has {len(archive.files)} of {count} entries")
                        arrays = {name: archive[name] for name in archive.files}
            self._archives[dataset] = arrays
        return self._archives[dataset]

    def _add_ranks(self, dataset: str, run: str, packed: np.ndarray, ranks: np.ndarray) -> None:
        digest = hashlib.blake2b(packed.tobytes(), digest_size=6).hexdigest()
        arrays = {name: array for name, array in self._read_archive(dataset).items() if not name.endswith(f"/{run}")}
        arrays |= {f"labels/{digest}": packed, f"{digest}/{run}": ranks}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / f"{dataset}-ranks.npz", buffer.getvalue())
        self._archives[dataset] = arrays

    def _name_archive_damage(self, dataset: str) -> AbstractContextManager[None]:
        remedy = f"restore it, or delete it, and the runs on {dataset} that a table tests are done again"
        return name_damage(f"ranks file {self.path / f'{dataset}-ranks.npz'}", remedy)


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


FIELD_TYPES = typing.get_type_hints(Record) | {"versions": dict}


def _decode_record(content: dict[str, Any]) -> tuple[str, Record]:
    """The changed fields of a record's configuration, as the text that it is found by, and its results."""
    if lacking := {"config", *FIELD_TYPES} - content.keys():
        raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    config, curve = content.pop("config"), content.pop("curve")
    if not isinstance(config, dict):
        raise ValueError(f"config is a {type(config).__name__}; it must be a JSON object")
    lookup("method", config["recipe"]["method"], find_methods())
    if unknown := content.keys() - FIELD_TYPES.keys():
        raise ValueError(f"it has an unknown {', '.join(sorted(unknown))}")
    results = {name: convert_value(FIELD_TYPES[name], value, name) for name, value in content.items()}
    # Earlier versions of fedauc called synthetic rows drawn.
    results["data"] = results["data"].replace(" drawn rows ", " synthetic rows ")
    if not (results["auc"] is None or _is_auc(results["auc"])):
        raise ValueError(f"auc is {results['auc']}; it must be from 0 to 1")
    points = tuple(Point(*row) for row in curve)
    for point in points:
        counted = all(isinstance(count, int) for count in point[:3])
        if not (counted and _is_auc(point.auc) and (point.validation_auc is None or _is_auc(point.validation_auc))):
            raise ValueError(f"the curve has {list(point)}; it must be three counts, and AUCs from 0 to 1")
    return json.dumps(config, sort_keys=True), Record(curve=points, **results)


def _is_auc(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


# --------------------------------------------------------------------------------------------------------- run folders


def summarize_folder(folder: RunFolder, stopped: str) -> Record:
    """The record of a run folder."""
    rounds, environment = folder.read_records(), json.loads((folder.path / "environment.json").read_text())
    result = folder.read_result() if folder.done else {}
    # With `keep` a run may end with the model of an earlier round, whose scores are the stored ones.
    final = result["final"] if folder.done else rounds[-1] if rounds else {}
    curve = []
    for line in rounds:
        sent = line["bytes_up"] + line["bytes_down"]
        curve.append(Point(line["cycle"], line["rounds"], sent, line["auc"], line.get("validation_auc")))
    return Record(
        stopped=stopped,
        **{name: final.get(name) for name in ("auc", "low", "high", "average_precision")},
        curve=tuple(curve),
        seconds=round(folder.training_seconds(), 3),
        data=result.get("data", ""),
        versions={name: environment[name] for name in ("fedauc", "python", "torch", "numpy", "gpu")},
        commit=find_source_commit(),
    )


def find_source_commit(package: Path = Path(fedauc.__file__).parent) -> str | None:
    """The commit of the source in use, if it lies in a repository; a plus marks changes of the source since.

    A copy of the source without its repository, such as one sent to another machine, has the commit that
    `FEDAUC_COMMIT` names.
    """
    texts = []
    # New records beside the source change nothing in it.
    for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "."]):
        try:
            done = subprocess.run(["git", "-C", package, *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return _read_named_commit()
        texts.append(done.stdout.strip())
    commit, changes = texts
    return commit + ("+" if changes else "")


def _read_named_commit() -> str | None:
    """The commit that the environment names, in the length of the others."""
    named = os.environ.get(COMMIT_VARIABLE, "")
    if not named:
        return None
    if not re.fullmatch(r"[0-9a-f]{12,40}\+?", named):
        bound = "12 to 40 hexadecimal digits, and a plus if the source has changed since"
        raise ValueError(f"{COMMIT_VARIABLE} is {named!r}; it must be {bound}: see `git rev-parse HEAD`")
    return named[:12] + ("+" if named.endswith("+") else "")
