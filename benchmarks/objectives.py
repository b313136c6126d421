"""Does each objective win on its own metric? Partial AUC, two-way partial AUC, average precision and NDCG, federated.

    python benchmarks/objectives.py run --processes 2 --out benchmarks/out/objectives.jsonl
    python benchmarks/objectives.py summarize benchmarks/out/objectives.jsonl benchmarks/records/objectives.json
    python benchmarks/objectives.py show benchmarks/records/objectives.json
    python benchmarks/objectives.py refresh            # with and without updates of passive estimates in G2

With `--suite ndcg`, the same three commands are for NDCG, on two of the problems and with the metrics of top ranks.

Four problems: card fraud with a linear model and with an MLP, card fraud with a tenth of the training frauds, and a
synthetic table on which the best linear ranking of all rows is not the best one at a low false positive rate. Every
contender has eight settings, the same on every split, each trained for a short and for a long time. For each
metric, the setting with the best value on the validation rows is used, and its value on the test rows is reported.
Differences are paired by split. Splits of card fraud share their rows, so their variance is corrected (Nadeau and
Bengio 2003: 1/k becomes 1/k + test rows / training rows); the synthetic table is drawn anew for every split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import fedauc
from fedauc import keys
from fedauc.data.clients import Clients, Examples
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.preparation import Preparation, prepare_table
from fedauc.experiments.fitting import fit
from fedauc.metrics import parse_metric
from fedauc.objectives.average_precision import AveragePrecisionLoss
from fedauc.objectives.compositional import Anchors, PassiveAnchors
from fedauc.objectives.kinds import Active
from fedauc.objectives.logistic import Logistic
from fedauc.objectives.partial_auc import PartialAUCLoss
from fedauc.objectives.partial_auc_cvar import PartialAUCTopLoss
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.two_way_partial_auc import TwoWayPartialAUCLoss

SPLITS = range(6)
RATES = (0.03, 0.2, 1.0)
LARGE_RATE = 3.0
POINT_RATES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
"""FedAvg also has 10 and 20, and balanced FedAvg, which diverges with the large ones, .005 and .02."""

T_QUANTILE = {5: 2.776, 6: 2.571}
"""The 97.5 % quantile of Student's distribution with one degree less than so many splits."""


@dataclass(frozen=True)
class Contender:
    """A method, its eight settings, and the metrics that it is made for."""

    method: str
    settings: tuple[Mapping[str, Any], ...]
    metrics: tuple[str, ...] = ()


def pair_up(objectives: tuple[Any, Any]) -> tuple[Mapping[str, Any], ...]:
    """Two objectives with four learning rates each."""
    pairs = [*itertools.product(objectives, RATES), *((member, LARGE_RATE) for member in objectives)]
    return tuple({"objective": member, "learning_rate": rate} for member, rate in pairs)


CONTENDERS: dict[str, Contender] = {
    "cycp-fedavg": Contender("cycp-fedavg", tuple({"learning_rate": rate} for rate in (*POINT_RATES, 10.0, 20.0))),
    "balanced cycp-fedavg": Contender(
        "cycp-fedavg",
        tuple({"objective": Logistic(draw="classes"), "learning_rate": rate} for rate in (*POINT_RATES, 0.005, 0.02)),
    ),
    "cycp-pairwise": Contender("cycp-pairwise", pair_up((PairwiseSigmoid(), PairwiseSigmoid(scale=0.3))), ("auc",)),
    "cycp-partial-auc": Contender(
        "cycp-partial-auc", pair_up((PartialAUCLoss(temperature=0.3), PartialAUCLoss(temperature=0.1))), ("pauc@0.05",)
    ),
    "cycp-partial-auc, CVaR": Contender(
        "cycp-partial-auc",
        pair_up((PartialAUCTopLoss(max_fpr=0.05), PartialAUCTopLoss(max_fpr=0.2))),
        ("pauc@0.05",),
    ),
    "cycp-two-way-partial-auc": Contender(
        "cycp-two-way-partial-auc",
        pair_up((TwoWayPartialAUCLoss(temperature=0.1), TwoWayPartialAUCLoss(temperature=0.3))),
        ("tpauc@0.5:0.1",),
    ),
    "cycp-average-precision": Contender(
        "cycp-average-precision", pair_up((AveragePrecisionLoss(), AveragePrecisionLoss(scale=0.3))), ("ap",)
    ),
    "cycp-ndcg": Contender(
        "cycp-ndcg",
        tuple(
            {"estimate_rate": estimate_rate, "learning_rate": rate}
            for estimate_rate, rate in itertools.product((0.1, 0.25), (*RATES, LARGE_RATE))
        ),
        ("ndcg@0", "ndcg@100"),
    ),
}
BASELINES = ("cycp-fedavg", "balanced cycp-fedavg", "cycp-pairwise")


# ------------------------------------------------------------------------------------------------------- the problems


@dataclass(frozen=True)
class Problem:
    """A table in the hands of clients, and the model that is trained on it."""

    table: str
    model: str
    shares_rows: bool = True
    """Whether the splits are of one table, so that their test rows overlap."""


PROBLEMS = {
    "card fraud, linear": Problem("card", "linear"),
    "card fraud, MLP": Problem("card", "mlp"),
    "card fraud, a tenth of the frauds, MLP": Problem("rare card", "mlp"),
    "hard negatives, linear": Problem("hard negatives", "linear", shares_rows=False),
}


@lru_cache(maxsize=2)
def load_table(table: str, split: int) -> tuple[Clients, Examples, Examples]:
    """Training clients, validation rows and test rows."""
    if table == "hard negatives":
        return draw_hard_negatives(split)
    prepared = prepare_table(CreditCard(validation_fraction=0.3).load(split), Preparation(), split)
    assert prepared.validation is not None
    train = prepared.train
    if table == "rare card":
        positives = np.flatnonzero(train.labels.numpy() == 1)
        count = len(positives) // 10
        kept_positives = positives[keys.sample_indices(len(positives), count, split, "rare")]
        chosen = np.sort(np.concatenate([np.flatnonzero(train.labels.numpy() == 0), kept_positives]))
        train = select_rows(train, chosen)
    return train, prepared.validation, prepared.test


def select_rows(clients: Clients, chosen: np.ndarray) -> Clients:
    """The clients with some of their rows."""
    owner = np.empty(len(clients.labels), dtype=np.int64)
    for client in range(len(clients)):
        owner[np.concatenate([clients.positives(client), clients.negatives(client)])] = client
    groups = clients.roster.groups
    return Clients.from_assignment(
        clients.inputs[chosen].numpy(), clients.labels[chosen].numpy(), owner[chosen], np.arange(len(clients)), groups
    )


def draw_hard_negatives(seed: int, clients: int = 24, rows: int = 500) -> tuple[Clients, Examples, Examples]:
    """5 % positives; a tenth of the negatives look more positive than positives in the second feature.

    That feature separates positives from the other negatives, so that it helps AUC; at a low false positive rate only
    the hard negatives count, and it is harmful. Clients differ by a shift of all features.
    """
    parts = []
    offsets = 0.3 * keys.numpy_generator(seed, "offsets").normal(size=(clients, 4))
    for part in ("train", "validation", "test"):
        rng, total = keys.numpy_generator(seed, "rows", part), clients * rows
        owner = np.repeat(np.arange(clients), rows)
        labels = (rng.random(total) < 0.05).astype(np.int64)
        is_hard = (labels == 0) & (rng.random(total) < 0.1)
        inputs = rng.normal(size=(total, 4)) + offsets[owner]
        inputs[:, 0] += 1.5 * labels
        inputs[:, 1] += 2.0 * labels + 4.0 * is_hard
        parts.append((inputs.astype(np.float32), labels, owner))
    (inputs, labels, owner), *held_out = parts
    train = fedauc.Clients.from_arrays(inputs, labels, client=owner, group=owner % 8)
    validation, test = (fedauc.examples(rows, labels) for rows, labels, _ in held_out)
    return train, validation, test


@dataclass(frozen=True)
class Suite:
    """What is compared: problems, lengths of training, contenders, and the metrics that are measured."""

    problems: tuple[str, ...]
    cycles: tuple[int, ...]
    contenders: tuple[str, ...]
    metrics: tuple[str, ...]


SUITES = {
    "objectives": Suite(
        tuple(PROBLEMS),
        (2, 10),
        tuple(name for name in CONTENDERS if name != "cycp-ndcg"),
        ("auc", "pauc@0.05", "tpauc@0.5:0.1", "ap"),
    ),
    "ndcg": Suite(
        ("card fraud, MLP", "hard negatives, linear"),
        (10,),
        (*BASELINES, "cycp-ndcg"),
        ("auc", "ap", "ndcg@0", "ndcg@100", "precision@100"),
    ),
}


# ------------------------------------------------------------------------------------------------------------ the runs


@dataclass(frozen=True)
class Job:
    """One training."""

    problem: str
    cycles: int
    split: int
    contender: str
    setting: int


def list_jobs(suite: Suite) -> Iterator[Job]:
    """Every training, split by split."""
    for split, problem, cycles in itertools.product(SPLITS, suite.problems, suite.cycles):
        for name in suite.contenders:
            for setting in range(len(CONTENDERS[name].settings)):
                yield Job(problem, cycles, split, name, setting)


def train_job(metrics: tuple[str, ...], job: Job) -> dict[str, Any]:
    """Train, and measure all metrics on validation and test rows; a run that diverges has the values of chance."""
    torch.set_num_threads(1)
    problem, contender = PROBLEMS[job.problem], CONTENDERS[job.contender]
    train, validation, test = load_table(problem.table, job.split)
    settings = {"cycles": job.cycles, "seed": job.split, "weighting": "clients", **contender.settings[job.setting]}
    begin = time.perf_counter()
    try:
        fitted = fit(problem.model, train, contender.method, verbose=False, **settings)
    except fedauc.TrainingStopped:
        return {**vars(job), "stopped": True}
    measured: dict[str, Any] = {}
    for part, rows in (("validation", validation), ("test", test)):
        scores, labels = fitted.scores(rows.inputs), rows.labels.numpy()
        if not np.isfinite(scores).all():
            return {**vars(job), "stopped": True}
        values = [parse_metric(metric).measure(labels, scores).value for metric in metrics]
        measured[part] = [round(float(value), 5) for value in values]
    return {**vars(job), **measured, "seconds": round(time.perf_counter() - begin, 2)}


def run_jobs(suite: Suite, path: Path, processes: int) -> None:
    """Train what is not recorded yet, and append the records as they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {Job(**{name: record[name] for name in Job.__dataclass_fields__}) for record in known}
    missing = [job for job in list_jobs(suite) if job not in done]
    print(f"{len(missing)} runs are left", flush=True)
    begin, train = time.perf_counter(), partial(train_job, suite.metrics)
    with path.open("a") as stream, multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, record in enumerate(pool.imap(train, missing, chunksize=8), 1):
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            if number % 200 == 0:
                print(f"  {number} of {len(missing)}, {time.perf_counter() - begin:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------------------ summary


def choose_settings(suite: Suite, records: list[dict[str, Any]]) -> dict[tuple[str, int, str, str], list[float]]:
    """Test values by split of the best setting on validation, for each problem, number of cycles, metric, contender."""
    groups: dict[tuple[str, int, str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["problem"], record["cycles"], record["contender"], record["split"]].append(record)
    chosen: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    for (problem, cycles, contender, _), runs in sorted(groups.items()):
        finished = [run for run in runs if "test" in run]
        for column, metric in enumerate(suite.metrics):
            best = max(finished, key=lambda run: run["validation"][column])
            chosen[problem, cycles, metric, contender].append(best["test"][column])
    return chosen


def summarize(suite: Suite, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The chosen test values, and the number of runs that stopped, as they are stored."""
    rows = [
        {"problem": problem, "cycles": cycles, "metric": metric, "contender": contender, "test": values}
        for (problem, cycles, metric, contender), values in choose_settings(suite, records).items()
    ]
    stopped: dict[str, int] = defaultdict(int)
    for record in records:
        stopped[record["contender"]] += "stopped" in record
    return {"runs": len(records), "stopped": stopped, "metrics": suite.metrics, "rows": rows}


def paired_interval(problem: str, ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """The mean difference and the half-width of its 95 % interval."""
    difference = np.array(ours) - np.array(theirs)
    count = len(difference)
    # Card fraud: 30 % of the rows are for testing, and 70 % of the rest for training.
    share = 1 / count + (0.3 / 0.49 if PROBLEMS[problem].shares_rows else 0)
    return float(difference.mean()), T_QUANTILE[count] * float(difference.std(ddof=1)) * math.sqrt(share)


def show_tables(suite: Suite, summary: Mapping[str, Any]) -> None:
    """Markdown: each method on its own metrics, with its differences to the baselines."""
    values = {(row["problem"], row["cycles"], row["metric"], row["contender"]): row["test"] for row in summary["rows"]}
    new = [name for name in suite.contenders if name not in BASELINES]
    for name, metric in ((member, text) for member in new for text in CONTENDERS[member].metrics):
        print(f"\n`{name}`, {metric}\n")
        print(f"| problem | cycles | {name} | less {' | less '.join(BASELINES)} |\n|---|---|---|---|---|---|")
        for problem, cycles in itertools.product(suite.problems, suite.cycles):
            ours = values[problem, cycles, metric, name]
            cells = []
            for baseline in BASELINES:
                mean, half = paired_interval(problem, ours, values[problem, cycles, metric, baseline])
                mark = "**" if abs(mean) > half else ""
                cells.append(f"{mark}{mean:+.4f}{mark} ± {half:.4f}")
            print(f"| {problem} | {cycles} | {np.mean(ours):.4f} | {' | '.join(cells)} |")
    print("\nAll values\n")
    for problem, cycles in itertools.product(suite.problems, suite.cycles):
        print(f"\n{problem}, {cycles} cycles\n\n| method | {' | '.join(suite.metrics)} |")
        print(f"|---|{'---|' * len(suite.metrics)}")
        for name in suite.contenders:
            cells = [f"{np.mean(values[problem, cycles, metric, name]):.4f}" for metric in suite.metrics]
            print(f"| {name} | {' | '.join(cells)} |")


@dataclass(frozen=True, kw_only=True)
class StalePartialAUCLoss(PartialAUCLoss):
    """The partial AUC with passive estimates as they are in the pool."""

    name: ClassVar[str] = "stale-partial-auc"

    def refresh_anchors(self, active: Active, passive: PassiveAnchors, rate: float) -> Anchors:
        """No update."""
        return passive.anchors


def compare_refreshing() -> None:
    """The test AUC on card fraud after ten cycles, where passive estimates are updated before use, and where not."""
    train, _, test = load_table("card", 0)
    for objective, rate in itertools.product((PartialAUCLoss(), StalePartialAUCLoss()), (0.03, 0.3, 3.0)):
        settings: dict[str, Any] = {"objective": objective, "learning_rate": rate, "cycles": 10, "weighting": "clients"}
        scores = fit("linear", train, "cycp-partial-auc", verbose=False, **settings).scores(test.inputs)
        value = parse_metric("auc").measure(test.labels.numpy(), scores).value
        print(f"{objective.name}, learning rate {rate:g}: AUC {value:.3f}")


def main() -> None:
    """Run, summarize or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(SUITES), default="objectives")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--out", type=Path, default=Path("benchmarks/out/objectives.jsonl"))
    summary = commands.add_parser("summarize")
    summary.add_argument("source", type=Path)
    summary.add_argument("target", type=Path)
    commands.add_parser("refresh")
    show = commands.add_parser("show")
    show.add_argument("source", type=Path)
    arguments = parser.parse_args()
    suite = SUITES[arguments.suite]
    if arguments.command == "run":
        run_jobs(suite, arguments.out, arguments.processes)
    elif arguments.command == "refresh":
        compare_refreshing()
    elif arguments.command == "summarize":
        records = [json.loads(line) for line in arguments.source.read_text().splitlines()]
        arguments.target.write_text(json.dumps(summarize(suite, records), indent=0) + "\n")
    else:
        show_tables(suite, json.loads(arguments.source.read_text()))


if __name__ == "__main__":
    main()
