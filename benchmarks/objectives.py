"""Does each objective win on its own metric? Partial AUC, two-way partial AUC, average precision and NDCG, federated.

    python benchmarks/objectives.py run --processes 2 --out benchmarks/out/objectives.jsonl
    python benchmarks/objectives.py summarize benchmarks/out/objectives.jsonl benchmarks/records/objectives.json
    python benchmarks/objectives.py page benchmarks/records/objectives.json docs/objectives.md
    python benchmarks/objectives.py refresh            # three ways to update the estimates of passive positives

Nine problems: a synthetic table on which the best linear ranking of all rows is not the best one at the top of the
list; card fraud with a linear model, with a network, and with a tenth of the training frauds; and five tables of
`problems.py` with their own sites, which need the archives that it names. Every contender has eight settings, the same
on every split. For each metric, the setting with the best value on the validation rows is used, and its value on the
test rows is reported. Differences are paired by split. Splits of one table share rows, so their variance is corrected
(Nadeau and Bengio 2003: 1/k becomes 1/k + test rows / training rows); synthetic rows are drawn anew for every split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
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
from fedauc.objectives.compositional import Anchors, CompositionalObjective, PassiveAnchors
from fedauc.objectives.kinds import Active
from fedauc.objectives.logistic import Logistic
from fedauc.objectives.ndcg import NDCGLoss
from fedauc.objectives.partial_auc import PartialAUCLoss
from fedauc.objectives.partial_auc_cvar import PartialAUCTopLoss
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.two_way_partial_auc import TwoWayPartialAUCLoss
from methods_statistics import Difference, compare_problems, compare_splits, correct_by_holm
from methods_summary import make_table, replace_blocks
from problems import load_problem

CYCLES = 10
METRICS = ("auc", "ap", "pauc@0.05", "tpauc@0.5:0.1", "ndcg@0", "ndcg@100")
RATES = (0.03, 0.2, 1.0)
LARGE_RATE = 3.0
POINT_RATES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
"""FedAvg also has 10 and 20, and balanced FedAvg, which diverges with the large ones, .005 and .02."""


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
    "cycp-ndcg": Contender("cycp-ndcg", pair_up((NDCGLoss(), NDCGLoss(scale=0.3))), ("ndcg@0", "ndcg@100")),
}
BASELINES = ("cycp-fedavg", "balanced cycp-fedavg", "cycp-pairwise")


# ------------------------------------------------------------------------------------------------------- the problems


@dataclass(frozen=True)
class Problem:
    """The model that is trained, on which splits, and how a split is made: clients, validation rows and test rows.

    `overlap` is test rows over training rows where splits share rows, otherwise 0. `left_out` are contenders that are
    not trained.
    """

    model: str
    splits: int
    load: Callable[[int], tuple[Clients, Examples, Examples]]
    overlap: float
    left_out: tuple[str, ...] = ()


def load_cards(share: float, split: int) -> tuple[Clients, Examples, Examples]:
    """Card fraud at hourly clients, with a share of the training frauds."""
    prepared = prepare_table(CreditCard(validation_fraction=0.3).load(split), Preparation(), split)
    assert prepared.validation is not None
    train = prepared.train
    if share < 1:
        positives = np.flatnonzero(train.labels.numpy() == 1)
        count = int(share * len(positives))
        kept_positives = positives[keys.sample_indices(len(positives), count, split, "rare")]
        chosen = np.sort(np.concatenate([np.flatnonzero(train.labels.numpy() == 0), kept_positives]))
        train = select_rows(train, chosen)
    return train, prepared.validation, prepared.test


def load_table(name: str, split: int) -> tuple[Clients, Examples, Examples]:
    """A problem of `problems.py`."""
    parts = load_problem(name, split)
    train = fedauc.Clients.from_arrays(parts.train.inputs, parts.train.labels, client=parts.train.sites)
    return train, *(fedauc.examples(part.inputs, part.labels) for part in (parts.validation, parts.test))


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


NO_TWO_WAY = ("cycp-two-way-partial-auc",)
"""Where hardly any model has half of the positives at a false positive rate of .1, its metric is zero."""

# Card fraud: 30 % of the rows are for testing, and 70 % of the rest for training. Tables: 30 % and 80 % of the rest.
CARDS_OVERLAP, TABLES_OVERLAP = 0.3 / 0.49, 0.3 / 0.56

PROBLEMS = {
    "hard negatives": Problem("linear", 16, draw_hard_negatives, 0),
    "card fraud": Problem("linear", 6, partial(load_cards, 1.0), CARDS_OVERLAP),
    "card fraud, MLP": Problem("mlp", 6, partial(load_cards, 1.0), CARDS_OVERLAP),
    "card fraud, a tenth of the frauds, MLP": Problem("mlp", 6, partial(load_cards, 0.1), CARDS_OVERLAP),
    "covid": Problem("linear", 5, partial(load_table, "covid"), TABLES_OVERLAP, NO_TWO_WAY),
    "flights": Problem("linear", 5, partial(load_table, "flights"), TABLES_OVERLAP, NO_TWO_WAY),
    "stops": Problem("linear", 5, partial(load_table, "stops"), TABLES_OVERLAP, NO_TWO_WAY),
    "insurance": Problem("linear", 5, partial(load_table, "insurance"), 0, NO_TWO_WAY),
    "birds": Problem("linear", 5, partial(load_table, "birds"), TABLES_OVERLAP, NO_TWO_WAY),
}


@lru_cache(maxsize=2)
def load_split(problem: str, split: int) -> tuple[Clients, Examples, Examples]:
    """A split of a problem; the last two stay in memory."""
    return PROBLEMS[problem].load(split)


# ------------------------------------------------------------------------------------------------------------ the runs


@dataclass(frozen=True)
class Job:
    """One training."""

    problem: str
    split: int
    contender: str
    setting: int


def list_jobs(problems: list[str], contenders: list[str]) -> Iterator[Job]:
    """Every training, problem by problem and split by split."""
    for problem in problems:
        for split, name in itertools.product(range(PROBLEMS[problem].splits), contenders):
            if name in PROBLEMS[problem].left_out:
                continue
            for setting in range(len(CONTENDERS[name].settings)):
                yield Job(problem, split, name, setting)


def train_job(job: Job) -> dict[str, Any]:
    """Train, and measure all metrics on validation and test rows of a run that does not diverge."""
    torch.set_num_threads(1)
    contender = CONTENDERS[job.contender]
    train, *held_out = load_split(job.problem, job.split)
    settings = {"cycles": CYCLES, "seed": job.split, "engine": "batched", **contender.settings[job.setting]}
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            # A setting that trains badly stays a setting; the validation rows judge it.
            warnings.simplefilter("ignore")
            fitted = fit(PROBLEMS[job.problem].model, train, contender.method, verbose=False, **settings)
    except fedauc.TrainingStopped:
        return {**vars(job), "stopped": True}
    measured: dict[str, Any] = {}
    for part, rows in zip(("validation", "test"), held_out, strict=True):
        scores, labels = fitted.scores(rows.inputs), rows.labels.numpy()
        if not np.isfinite(scores).all():
            return {**vars(job), "stopped": True}
        values = [parse_metric(metric).measure(labels, scores).value for metric in METRICS]
        measured[part] = [round(float(value), 5) for value in values]
    return {**vars(job), **measured, "seconds": round(time.perf_counter() - begin, 2)}


def run_jobs(jobs: Iterator[Job], path: Path, processes: int) -> None:
    """Train what is not recorded yet, and append the records as they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {Job(**{name: record[name] for name in Job.__dataclass_fields__}) for record in known}
    missing = [job for job in jobs if job not in done]
    print(f"{len(missing)} runs are left", flush=True)
    begin = time.perf_counter()
    with path.open("a") as stream, multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, record in enumerate(pool.imap(train_job, missing, chunksize=8), 1):
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            if number % 200 == 0:
                print(f"  {number} of {len(missing)}, {time.perf_counter() - begin:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------------------ summary


def choose_settings(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """Test values by split of the best setting on validation, for each problem, metric and contender."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["problem"], record["contender"], record["split"]].append(record)
    chosen: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (problem, contender, _), runs in sorted(groups.items()):
        finished = [run for run in runs if "test" in run]
        for column, metric in enumerate(METRICS):
            best = max(finished, key=lambda run: run["validation"][column])
            chosen[problem, metric, contender].append(best["test"][column])
    return chosen


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The chosen test values, and the number of runs that stopped, as they are stored."""
    rows = [
        {"problem": problem, "metric": metric, "contender": contender, "test": values}
        for (problem, metric, contender), values in choose_settings(records).items()
    ]
    stopped: dict[str, int] = defaultdict(int)
    for record in records:
        stopped[record["contender"]] += "stopped" in record
    return {"runs": len(records), "stopped": stopped, "rows": rows}


Values = Mapping[tuple[str, str, str], list[float]]
"""Test values by split, for each problem, metric and contender."""


def make_blocks(record: Path) -> dict[str, str]:
    """The generated parts of docs/objectives.md: each method on its own metrics, and all values."""
    rows = json.loads(record.read_text())["rows"]
    values = {(row["problem"], row["metric"], row["contender"]): row["test"] for row in rows}
    tables = []
    for name, metric in ((name, metric) for name, contender in CONTENDERS.items() for metric in contender.metrics):
        problems = [problem for problem in PROBLEMS if (problem, metric, name) in values]
        rivals = [baseline for baseline in BASELINES if baseline != name]
        differences = {
            rival: [compare_contenders(values, problem, metric, name, rival) for problem in problems]
            for rival in rivals
        }
        body = [
            [problem, f"{np.mean(values[problem, metric, name]):.4f}", *map(write_difference, cells)]
            for problem, *cells in zip(problems, *differences.values(), strict=True)
        ]
        p_values = correct_by_holm([compare_problems([d.mean for d in column]) for column in differences.values()])
        means = [
            f"{np.mean([d.mean for d in column]):+.4f} (p {p:.3f})"
            for column, p in zip(differences.values(), p_values, strict=True)
        ]
        head = ["problem", name, *(f"less {rival}" for rival in rivals)]
        tables.append(f"`{name}`, {metric}\n\n" + make_table(head, [*body, ["mean", "", *means]]))
    everything = []
    for problem in PROBLEMS:
        trained = [name for name in CONTENDERS if (problem, METRICS[0], name) in values]
        cells = [[name, *(f"{np.mean(values[problem, metric, name]):.4f}" for metric in METRICS)] for name in trained]
        everything.append(f"{problem}\n\n" + make_table(["method", *METRICS], cells))
    return {"own metrics": "\n\n".join(tables), "all metrics": "\n\n".join(everything)}


def compare_contenders(values: Values, problem: str, metric: str, name: str, rival: str) -> Difference:
    """The mean difference over splits, with its 95 % interval."""
    ours, theirs = (np.array(values[problem, metric, member]) for member in (name, rival))
    return compare_splits(ours - theirs, PROBLEMS[problem].overlap)


def write_difference(difference: Difference) -> str:
    """A difference and the half-width of its interval; bold where zero is outside."""
    mark = "**" if difference.low > 0 or difference.high < 0 else ""
    return f"{mark}{difference.mean:+.4f}{mark} ± {difference.high - difference.mean:.4f}"


@dataclass(frozen=True, kw_only=True)
class WithoutActivePartners(PartialAUCLoss):
    """The partial AUC with estimates of passive positives that passive negatives alone have updated."""

    name: ClassVar[str] = "without-active-partners"

    def refresh_anchors(self, active: Active, passive: PassiveAnchors, rate: float) -> Anchors:
        """No update."""
        return passive.anchors


@dataclass(frozen=True, kw_only=True)
class WithShareOfActivePartners(PartialAUCLoss):
    """The partial AUC with active negatives that count by their number in the estimates of passive positives."""

    name: ClassVar[str] = "with-share-of-active-partners"

    def refresh_rate(self, rate: float, active: Active, passive: PassiveAnchors) -> float:
        """The rate of the other objectives."""
        return CompositionalObjective.refresh_rate(self, rate, active, passive)


def compare_refreshing() -> None:
    """Partial AUC and AUC on card fraud after ten cycles, for three ways to update estimates of passive positives."""
    objectives = (PartialAUCLoss(), WithShareOfActivePartners(), WithoutActivePartners())
    for split, objective, rate in itertools.product(range(3), objectives, (0.03, 0.3, 3.0)):
        train, _, test = load_cards(1.0, split)
        settings: dict[str, Any] = {"objective": objective, "learning_rate": rate, "cycles": CYCLES, "seed": split}
        scores = fit("linear", train, "cycp-partial-auc", verbose=False, engine="batched", **settings).scores(
            test.inputs
        )
        values = [parse_metric(text).measure(test.labels.numpy(), scores).value for text in ("pauc@0.05", "auc")]
        print(f"split {split}, {objective.name}, rate {rate:g}: partial AUC {values[0]:.3f}, AUC {values[1]:.3f}")


def main() -> None:
    """Run, summarize or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--problems", default=";".join(PROBLEMS), help="names, separated by semicolons")
    run.add_argument("--contenders", default=";".join(CONTENDERS), help="names, separated by semicolons")
    run.add_argument("--out", type=Path, default=Path("benchmarks/out/objectives.jsonl"))
    summary = commands.add_parser("summarize")
    summary.add_argument("source", type=Path)
    summary.add_argument("target", type=Path)
    commands.add_parser("refresh")
    page = commands.add_parser("page")
    page.add_argument("source", type=Path)
    page.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        jobs = list_jobs(arguments.problems.split(";"), arguments.contenders.split(";"))
        run_jobs(jobs, arguments.out, arguments.processes)
    elif arguments.command == "refresh":
        compare_refreshing()
    elif arguments.command == "summarize":
        records = [json.loads(line) for line in arguments.source.read_text().splitlines()]
        arguments.target.write_text(json.dumps(summarize(records), indent=0) + "\n")
    else:
        text = arguments.target.read_text()
        arguments.target.write_text(replace_blocks(text, make_blocks(arguments.source)))


if __name__ == "__main__":
    main()
