"""The runs in paper/records, each found by its options, which are written in tables.toml and scales.toml.

A record holds the fields of its configuration that differ from the defaults. Here both a record and the options of a
table's cell become one form: a set of options, by the names that `fedauc run` gives them, without those at their
defaults. The defaults are written down below, so that nothing of the library is asked.
"""

from __future__ import annotations

import csv
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

METHODS = ("cycp-fedavg", "a-fedavg", "a-scaffold", "rs-minimax", "rs-pairwise", "cycp-minimax", "cycp-pairwise")
OURS = ("cycp-minimax", "cycp-pairwise")
BASELINES = (*METHODS[:5], "fedavg", "scaffold", "coda-plus", "codasca", "fedxl1")
REAL_DATA = ("cifar10", "cifar100", "chestmnist", "insurance")
IMAGES = ("cifar10", "cifar100", "chestmnist", "chest-stand-in")
FRAUD = ("creditcard", "creditcard-mlp")
MINIMAX = ("cycp-minimax", "rs-minimax", "coda-plus", "codasca")
SMALL_STEPS = (*MINIMAX, "focus")
PAIRWISE = ("cycp-pairwise", "rs-pairwise", "fedxl1")
ALL_CLIENTS = ("coda-plus", "codasca", "fedxl1")
"""Methods in which all clients take part in every round: they have no groups."""

DEFAULTS: dict[str, Any] = {
    "cycles": 30.0,
    "evaluate-every": 1.0,
    "local-steps": 16.0,
    "positives": 16.0,
    "negatives": 16.0,
    "weighting": "clients",
    "augment": "none",
    "precision": "full",
    "seed": 0.0,
    "data-seed": 0.0,
    "data.positive": 0.0,
    "stages": "milestones",
    "stages.decay": 0.1,
    "stage-output": "last",
    "participation.groups": None,
    "participation.per-round": None,
    "participation.assignment": "auto",
    "partition": "natural",
    "partition.concentration": 0.5,
    "remove-positives": 0.0,
    "flip-positives": 0.0,
    "flip-negatives": 0.0,
    "model": "linear",
    "objective.scale": 1.0,
    "algorithm.prox": 0.0,
    "algorithm.amplify": 1.5,
    "algorithm.weight-decay": 0.0,
}
"""What an option is where neither a record nor a table says."""

AS_PRINTED_BASELINE = {"stages": "constant", "stage-output": "last", "weighting": "paper"}
AS_PRINTED = {"stages": "geometric", "stage-output": "round_mean", "weighting": "paper"}
AS_PRINTED_MINIMAX = {**AS_PRINTED, "objective.prior-from-data": "true", "algorithm.prox": "0.01"}
"""The preset that the last rows of the table `as-printed` have; 16 examples of each class are the default."""

Key = frozenset[tuple[str, Any]]
"""A run's options without those at their defaults."""


def make_key(method: str, options: Mapping[str, Any]) -> Key:
    """The options of a run in the one form that records and cells share."""
    defaults = DEFAULTS | {"learning-rate": 0.01 if method in SMALL_STEPS else 0.1, "partition.clients": 100.0}
    values = {name: normalise(value) for name, value in options.items()}
    values.setdefault("objective", "minimax" if method in MINIMAX else "sigmoid" if method in PAIRWISE else "logistic")
    defaults["objective.score"] = "sigmoid" if values["objective"] == "minimax" else "identity"
    if method == "cycp-fedadam":
        # The method has this optimizer; a configuration names it where its learning rate is another.
        defaults["server-optimizer"] = "adam"
    kept = {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}
    return frozenset({**kept, "method": method}.items())


def normalise(value: Any) -> Any:
    """A number as a float, `none` as None, `true` as True, and other text as it is."""
    if value is None or value == "none":
        return None
    if value is True or value == "true":
        return True
    try:
        return float(value)
    except ValueError:
        return value


class Run(NamedTuple):
    """A line of a record file, and the name of its ranks."""

    key: Key
    name: str
    method: str
    cycles: int
    line: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        """Whether it reached its last cycle."""
        return not self.line["stopped"] and bool(self.line["curve"])

    @property
    def note(self) -> str:
        """What the run says of its data; earlier versions called synthetic rows drawn."""
        return str(self.line["data"]).replace(" drawn rows ", " synthetic rows ")


def read_run(line: Mapping[str, Any]) -> Run:
    """A run from its line."""
    config = line["config"]
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=6).hexdigest()
    method = config["recipe"]["method"]
    options = {_option_of(path): value for path, value in _flatten(config)}
    for ignored in ("method", "algorithm", "participation"):
        options.pop(ignored, None)
    name = f"{config['data']['name']}-{method}-{digest}"
    return Run(make_key(method, options), name, method, int(config["recipe"].get("cycles", DEFAULTS["cycles"])), line)


def _flatten(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*path, name))
        else:
            yield (*path, name), value


def _option_of(path: tuple[str, ...]) -> str:
    """The option of a field: `recipe.algorithm.objective.scale` is `objective.scale`, `model.name` is `model`."""
    if path[0] in ("recipe", "preparation"):
        path = path[1:]
    if path[:2] == ("algorithm", "objective"):
        path = path[1:]
    if path[-1] == "name":
        path = path[:-1]
    return ".".join(path).replace("_", "-")


class Records:
    """Everything in a folder of records: runs by key, ranks by name, and the choices of the tuning."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(path for path in folder.glob("*.jsonl") if "choices" not in path.name)
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        self.runs = {run.key: run for run in map(read_run, lines)}
        choices = [json.loads(line) for line in (folder / "paper-choices.jsonl").read_text().splitlines()]
        self.choices: dict[str, dict[str, Any]] = {choice["job"]: choice for choice in choices}
        self.archives = {path.name: np.load(path) for path in folder.glob("*-ranks.npz")}
        self._entries = {
            entry.split("/")[1]: (archive, entry)
            for archive in self.archives.values()
            for entry in archive.files
            if not entry.startswith("labels/")
        }
        self._ranks: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def find_ranks(self, run: Run) -> tuple[np.ndarray, np.ndarray] | None:
        """The labels and ranks of a run's test examples, if they are stored."""
        if run.name not in self._entries:
            return None
        if run.name not in self._ranks:
            archive, entry = self._entries[run.name]
            ranks = archive[entry]
            labels = np.unpackbits(archive[f"labels/{entry.split('/')[0]}"], count=len(ranks)).astype(bool)
            self._ranks[run.name] = labels, ranks
        return self._ranks[run.name]

    def replace_ranks(self, run: Run, labels: np.ndarray, ranks: np.ndarray) -> None:
        """Take other ranks for a run, to see what depends on them."""
        self._ranks[run.name] = labels, ranks


class Specs(NamedTuple):
    """tables.toml, the paper's part of scales.toml, its numbers by table, row and column, and the discarded runs."""

    tables: Mapping[str, Any]
    scale: Mapping[str, Any]
    published: Mapping[tuple[str, str, str], float]
    discarded: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path) -> Specs:
        """Read the four files."""
        tables, scales = (tomllib.loads((folder / name).read_text()) for name in ("tables.toml", "scales.toml"))
        with open(folder / "published.csv") as file:
            numbers = {(line["table"], line["method"], line["column"]): line["mean"] for line in csv.DictReader(file)}
        discarded = json.loads((folder / "discarded_runs.json").read_text())
        # The paper does not name its positive class, so the table over classes stands beside its Table 1.
        numbers |= {
            ("classes", row, column): mean for (table, row, column), mean in numbers.items() if table == "table1"
        }
        return Specs(tables, scales["paper"], {key: float(mean) for key, mean in numbers.items()}, discarded)

    def run_options(self, dataset: str, method: str, options: Mapping[str, str]) -> dict[str, str]:
        """All options of a run: those of the scale, of the dataset, of the method on it, and the given ones."""
        scale, own = self.scale, dict(self.scale["datasets"][dataset])
        kind = own.pop("kind")
        data = scale["kinds"][kind] | own
        by_method = scale["methods"].get(kind, {}).get(method, {})
        usual = {**scale["common"], **data, **by_method}
        dropped = [f"{family}." for family in ("partition", "stages") if family in options]
        if "preset" in options:
            assert options["preset"] == "as-printed"
            printed = (
                AS_PRINTED_MINIMAX if method in MINIMAX else AS_PRINTED if method in PAIRWISE else AS_PRINTED_BASELINE
            )
            dropped += ["stages", "stage-output", "weighting", "positives", "negatives", "objective", *printed]
            options = {**printed, **{name: value for name, value in options.items() if name != "preset"}}
        usual = {name: value for name, value in usual.items() if not name.startswith(tuple(dropped))}
        length = {
            "cycles": scale["cycles"],
            "local-steps": scale["local_steps"],
            "participation.groups": scale["groups"],
        }
        merged = {**length, **usual, **options}
        if method in ALL_CLIENTS:
            merged = {name: value for name, value in merged.items() if not name.startswith("participation.")}
        return merged
