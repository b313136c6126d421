"""Which federated method wins where: every method on every problem of `problems.py`, with equal tuning.

    python benchmarks/methods.py run --processes 2
    python benchmarks/methods.py run --problems cards,fars --contenders cycp-fedavg,cycp-pairwise --splits 0
    python benchmarks/methods.py missing                                   # what has not run yet

A contender is a method, or a method with fixed settings such as an averaged model. Each has eight settings, four
learning rates times two weightings, which are all trained on the splits 0 and 1. The setting with the highest mean
validation AUC is trained on the splits 2 to 4 as well; the test rows of all five splits are reported. Every run has the
same number of cycles, and the model of the cycle with the highest validation AUC counts, as with `keep=best`. A run
that diverges has an AUC of one half. In the end, the setting with the highest mean validation AUC over all problems is
trained on all splits of all problems.

Every run is appended to the file of JSON lines as it ends, and runs that are there are not repeated.
`methods_summary.py` makes the summary, the figure and docs/methods.md of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import fedauc
from fedauc.algorithms import find_methods
from fedauc.experiments.recipe import Recipe
from fedauc.objectives.logistic import Logistic
from fedauc.server_optimizers.adaptive import Adam
from problems import Split, list_problems, load_problem

RUNS = Path(__file__).parent / "out" / "methods.jsonl"
CYCLES = 12
SPLITS = (0, 1, 2, 3, 4)
TUNING_SPLITS = (0, 1)
"""The splits whose validation rows choose the setting."""

RATES = (0.003, 0.03, 0.1, 1.0)
MINIMAX_RATES = (0.0003, 0.003, 0.01, 0.1)
"""The third is the one that the method has by default."""

WEIGHTINGS = ("clients", "pooled")
METRICS = "auc,ap,pauc@0.05"


@dataclass(frozen=True)
class Contender:
    """A method with the settings that stay fixed, and the learning rates that are tried.

    With Adam at the server, the size of a step depends on the server's learning rate, hardly on that of the clients.
    """

    method: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = RATES
    rate_name: str = "learning_rate"

    def list_settings(self) -> list[dict[str, Any]]:
        """Every learning rate with every weighting."""
        return [{self.rate_name: rate, "weighting": weighting} for weighting in WEIGHTINGS for rate in self.rates]


AVERAGED = {"stages": "constant", "stage_output": "ema"}
"""The moving average over rounds is evaluated and returned; it takes the place of a falling learning rate."""

CONTENDERS = {
    "cycp-fedavg": Contender("cycp-fedavg"),
    "cycp-fedavg-balanced": Contender("cycp-fedavg-balanced"),
    "cycp-fedavg-focal": Contender("cycp-fedavg-focal"),
    "cycp-fedavg-logit-adjusted": Contender("cycp-fedavg-logit-adjusted"),
    "cycp-fedadam": Contender("cycp-fedadam", rate_name="server_learning_rate"),
    "a-fedavg": Contender("a-fedavg"),
    "a-scaffold": Contender("a-scaffold"),
    "cycp-minimax": Contender("cycp-minimax", rates=MINIMAX_RATES),
    "cycp-pairwise": Contender("cycp-pairwise"),
    "cycp-fedavg-balanced + average": Contender("cycp-fedavg-balanced", AVERAGED),
    "cycp-pairwise + average": Contender("cycp-pairwise", AVERAGED),
    "cycp-pairwise + momentum": Contender("cycp-pairwise", {"server_optimizer": "momentum"}),
}

CANDIDATES = {
    "a-scaffold + balanced": Contender("a-scaffold", {"objective": Logistic(draw="classes")}),
    "focus": Contender("focus"),
    "cycp-fedavg-balanced + momentum": Contender("cycp-fedavg-balanced", {"server_optimizer": "momentum"}),
    "cycp-local-pairs": Contender("cycp-local-pairs"),
    "cycp-partial-auc": Contender("cycp-partial-auc"),
}
"""Ideas beyond the paper with the same budget, in tables of their own (`methods_tried.py`); they run when named."""

CONSTANT = {
    f"{name} + constant": replace(CONTENDERS[name], fixed={**CONTENDERS[name].fixed, "stages": "constant"})
    for name in ("cycp-fedavg", "cycp-fedavg-balanced", "cycp-minimax", "cycp-pairwise", "cycp-pairwise + momentum")
}
"""Contenders with a constant learning rate, which falls to a tenth after half of the cycles by default; when named."""

EVERYONE = CONTENDERS | CANDIDATES | CONSTANT


class Run(NamedTuple):
    """One training."""

    problem: str
    contender: str
    setting: Mapping[str, Any]
    split: int

    @property
    def key(self) -> str:
        """What tells one training from all others."""
        return json.dumps(self, sort_keys=True)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The runs that are recorded."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def index_records(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Records by the key of their run."""
    return {Run(*(record[name] for name in Run._fields)).key: record for record in records}


# --------------------------------------------------------------------------- training


def train_model(split: Split, model: str, contender: Contender, setting: Mapping[str, Any], seed: int) -> fedauc.Fitted:
    """Train, and evaluate the model after every cycle."""
    clients = fedauc.Clients.from_arrays(split.train.inputs, split.train.labels, client=split.train.sites)
    settings = {**contender.fixed, **setting, "cycles": CYCLES, "seed": seed, "engine": "batched"}
    if "server_learning_rate" in settings:
        settings["server_optimizer"] = Adam(learning_rate=settings.pop("server_learning_rate"))
    recipe = Recipe.of(contender.method, **settings)
    validation, test = ((part.inputs, part.labels) for part in (split.validation, split.test))
    return fedauc.fit(model, clients, recipe, test=test, validation=validation, metrics=METRICS, verbose=False)


def measure_run(run: Run) -> dict[str, Any]:
    """Train, and record the quality of the last model, the test AUC after every cycle, rounds and bytes."""
    torch.set_num_threads(1)
    split = load_problem(run.problem, run.split)
    model = list_problems()[run.problem].model
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            # A setting that trains badly stays a setting; the validation rows judge it.
            warnings.simplefilter("ignore")
            fitted = train_model(split, model, EVERYONE[run.contender], run.setting, run.split)
    except fedauc.TrainingStopped:
        positives = float(split.test.labels.mean())
        measured: dict[str, Any] = {"validation": 0.5, "auc": 0.5, "ap": positives, "pauc": 0.5, "stopped": True}
    else:
        kept, quality = max(fitted.history, key=lambda entry: entry[1]["validation_auc"])
        measured = {
            "validation": round(float(quality["validation_auc"]), 5),
            "kept_round": kept + 1,
            "last_auc": round(float(fitted.history[-1][1]["auc"]), 5),
            "auc": round(float(quality["auc"]), 5),
            "ap": round(float(quality["average_precision"]), 5),
            "pauc": round(float(quality["pauc@0.05"]), 5),
            "curve": [[number + 1, round(float(values["auc"]), 4)] for number, values in fitted.history],
            "rounds": fitted.traffic.rounds,
            "bytes_up": fitted.traffic.bytes_up,
        }
    seconds = round(time.perf_counter() - started, 2)
    return {**run._asdict(), **measured, "overlap": round(split.overlap, 4), "seconds": seconds}


def choose_setting(records: dict[str, dict[str, Any]], problem: str, contender: str) -> dict[str, Any] | None:
    """The setting with the highest mean validation AUC on the tuning splits; None until all have run there."""
    settings = EVERYONE[contender].list_settings()
    keys = [[Run(problem, contender, setting, split).key for split in TUNING_SPLITS] for setting in settings]
    if any(key not in records for row in keys for key in row):
        return None
    validation = [sum(records[key]["validation"] for key in row) for row in keys]
    return settings[validation.index(max(validation))]


def choose_common_setting(
    records: dict[str, dict[str, Any]], problems: list[str], contender: str
) -> dict[str, Any] | None:
    """The setting with the highest mean validation AUC over all problems; None until all have run there."""
    settings = EVERYONE[contender].list_settings()
    keys = [
        [Run(p, contender, setting, split).key for p in problems for split in TUNING_SPLITS] for setting in settings
    ]
    if any(key not in records for row in keys for key in row):
        return None
    validation = [sum(records[key]["validation"] for key in row) for row in keys]
    return settings[validation.index(max(validation))]


def list_common_runs(records: dict[str, dict[str, Any]], problems: list[str], contenders: list[str]) -> Iterator[Run]:
    """Missing runs of the settings that are common to all problems."""
    common = {contender: choose_common_setting(records, problems, contender) for contender in contenders}
    for problem in problems:
        for split in SPLITS:
            runs = (Run(problem, name, setting, split) for name, setting in common.items() if setting is not None)
            yield from (run for run in runs if run.key not in records)


def list_due_runs(
    records: dict[str, dict[str, Any]], problems: list[str], contenders: list[str], splits: tuple[int, ...]
) -> Iterator[Run]:
    """Missing runs: all settings on the tuning splits, and the chosen one on the other splits once it is chosen."""
    for problem in problems:
        for split in splits:
            for contender in contenders:
                chosen = choose_setting(records, problem, contender)
                settings = EVERYONE[contender].list_settings() if split in TUNING_SPLITS else [chosen]
                runs = (Run(problem, contender, setting, split) for setting in settings if setting is not None)
                yield from (run for run in runs if run.key not in records)


def run_all(problems: list[str], contenders: list[str], splits: tuple[int, ...], processes: int, out: Path) -> None:
    """Problem by problem: tune every contender, then train the chosen settings; in the end, the common settings."""
    out.parent.mkdir(parents=True, exist_ok=True)
    records = index_records(read_records(out))
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool, out.open("a") as file:

        def train_runs(runs: Iterator[Run]) -> int:
            due = list(runs)
            for record in pool.imap_unordered(measure_run, due):
                records.update(index_records([record]))
                file.write(json.dumps(record) + "\n")
                file.flush()
            return len(due)

        for number, problem in enumerate(problems, start=1):
            # The second pass holds what the first one has chosen.
            count = sum(train_runs(list_due_runs(records, [problem], contenders, splits)) for _ in range(2))
            elapsed = time.perf_counter() - started
            print(f"{problem}: {count} runs; {number} of {len(problems)} problems, {elapsed:.0f} s", flush=True)
        if set(problems) == set(list_problems()):
            count = train_runs(list_common_runs(records, problems, contenders))
            print(f"common settings: {count} runs, {time.perf_counter() - started:.0f} s", flush=True)


def list_known_contenders(names: list[str]) -> list[str]:
    """Those whose method this version of fedauc has; the others are named."""
    methods = find_methods()
    absent = [name for name in names if EVERYONE[name].method not in methods]
    if absent:
        print(f"left out, since their methods do not exist here: {', '.join(absent)}", flush=True)
    return [name for name in names if name not in absent]


def main() -> None:
    """Run what is missing, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "missing"))
    parser.add_argument("--problems", default=",".join(list_problems()))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--splits", default=",".join(map(str, SPLITS)))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RUNS)
    arguments = parser.parse_args()
    problems, splits = arguments.problems.split(","), tuple(int(split) for split in arguments.splits.split(","))
    contenders = list_known_contenders(arguments.contenders.split(","))
    if arguments.command == "run":
        run_all(problems, contenders, splits, arguments.processes, arguments.out)
    else:
        records = index_records(read_records(arguments.out))
        for problem in problems:
            due = len(list(list_due_runs(records, [problem], contenders, splits)))
            undecided = sum(choose_setting(records, problem, contender) is None for contender in contenders)
            print(f"{problem}: {due} runs are due, {undecided} contenders have no setting yet")


if __name__ == "__main__":
    main()
