"""Does one-vs-rest AUC by cyclic clients win against FedAvg with a softmax? Two tables with rare classes, federated.

    python benchmarks/classes.py run --out benchmarks/out/classes.jsonl
    python benchmarks/classes.py summarize benchmarks/out/classes.jsonl benchmarks/records/classes.json
    python benchmarks/classes.py page benchmarks/records/classes.json docs/objectives.md

`digits` is scikit-learn's copy of the handwritten digits (1,797 images of 8 x 8, ten classes). Half of its rows are
for training, a fifth for validation and the rest for testing. Of digit c, a share of .05^(c / 9) of the training rows
stays, so that the classes range from about 90 rows to about 5; 24 clients in 8 groups; one hidden layer of 32 units.
`images` is CIFAR-10 with the 96 features of `problems.py` (run `problems.py features` first). Of class c, a share of
.02^(c / 9) of all images stays, 6,000 to 120; 55 % of the rest are for training, 15 % for validation and 30 % for
testing, so that test rows have the classes of training rows; 50 clients in 10 groups; a linear model.

A Dirichlet distribution with concentration .5 shares the rows of each class among the clients. Every contender has
eight settings, each trained for ten cycles. The one with the best macro one-vs-rest AUC on the validation rows counts,
and its values on the test rows are reported. Differences are paired by split, with the variance corrected for rows that
splits share (Nadeau and Bengio 2003).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import fedauc
from fedauc import keys
from fedauc.algorithms.one_vs_rest import OneVsRestPairwise
from fedauc.metrics import one_class_auc
from fedauc.objectives.one_vs_rest import OneVsRestLoss
from fedauc.objectives.softmax import Softmax
from methods_statistics import compare_splits
from methods_summary import make_table, replace_blocks
from problems import read_image_features

SPLITS, CYCLES, CLASSES = range(6), 10, 10

POINT_RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BALANCED_RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Smaller, because balanced batches have the sum over classes of the mean loss, and few clients hold a rare class."""

PAIR_RATES = (0.3, 1.0, 3.0, 10.0)

CONTENDERS: dict[str, tuple[str, tuple[Mapping[str, Any], ...]]] = {
    "cycp-fedavg, softmax": (
        "cycp-fedavg",
        tuple({"objective": Softmax(), "learning_rate": rate} for rate in POINT_RATES),
    ),
    "balanced cycp-fedavg, softmax": (
        "cycp-fedavg",
        tuple({"objective": Softmax(draw="classes"), "learning_rate": rate} for rate in BALANCED_RATES),
    ),
    "one-vs-rest pairwise": (
        "cycp-pairwise",
        tuple(
            {"algorithm": OneVsRestPairwise(objective=OneVsRestLoss(scale=scale)), "learning_rate": rate}
            for scale, rate in itertools.product((1.0, 0.3), PAIR_RATES)
        ),
    ),
}
NEW, *BASELINES = reversed(CONTENDERS)


class ClassTable(NamedTuple):
    """Training clients, and (inputs, labels) of validation and test rows."""

    train: fedauc.Clients
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def share_rows(labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """The client of each row: a Dirichlet distribution over clients for every class."""
    owner = np.zeros(len(labels), dtype=np.int64)
    for number in range(CLASSES):
        of_class = np.flatnonzero(labels == number)
        owner[of_class] = rng.choice(clients, size=len(of_class), p=rng.dirichlet(np.full(clients, 0.5)))
    return owner


def load_digits_table(split: int) -> ClassTable:
    """The digits of a split, in the hands of clients."""
    inputs, labels = load_digits(return_X_y=True)
    inputs = (inputs / 8 - 1).astype(np.float32)
    order = keys.numpy_generator(split, "digits").permutation(len(labels))
    train, validation, test = np.split(order, [len(order) // 2, len(order) * 7 // 10])
    kept = []
    for digit in range(CLASSES):
        of_class = train[labels[train] == digit]
        kept.append(of_class[: max(2, round(len(of_class) * 0.05 ** (digit / (CLASSES - 1))))])
    chosen = np.concatenate(kept)
    owner = share_rows(labels[chosen], 24, keys.numpy_generator(split, "clients"))
    clients = fedauc.Clients.from_classes(inputs[chosen], labels[chosen], owner, owner % 8)
    return ClassTable(clients, (inputs[validation], labels[validation]), (inputs[test], labels[test]))


def load_image_table(split: int) -> ClassTable:
    """Images with frequent and rare classes, in the hands of clients, standardised by the training rows."""
    inputs, labels = read_image_features()
    rng, kept = keys.numpy_generator(split, "images"), []
    for number in range(CLASSES):
        of_class = rng.permutation(np.flatnonzero(labels == number))
        kept.append(of_class[: round(len(of_class) * 0.02 ** (number / (CLASSES - 1)))])
    order = rng.permutation(np.concatenate(kept))
    test, validation, train = np.split(order, [len(order) * 3 // 10, len(order) * 9 // 20])
    scaled = ((inputs - inputs[train].mean(0)) / inputs[train].std(0)).astype(np.float32)
    owner = share_rows(labels[train], 50, keys.numpy_generator(split, "clients"))
    clients = fedauc.Clients.from_classes(scaled[train], labels[train], owner, owner % 10)
    return ClassTable(clients, (scaled[validation], labels[validation]), (scaled[test], labels[test]))


def build_network() -> nn.Module:
    """One hidden layer of 32 units."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Table(NamedTuple):
    """How a split is made, the model, and test rows over training rows of the splits."""

    load: Callable[[int], ClassTable]
    build: Callable[[], nn.Module]
    overlap: float


TABLES = {
    "digits": Table(load_digits_table, build_network, 0.3 / 0.5),
    "images": Table(load_image_table, lambda: nn.Linear(96, CLASSES), 0.3 / 0.55),
}


def build_model(table: str, seed: int) -> nn.Module:
    """The model of a table with keyed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(keys.random_integer(seed, "classes"))
        return TABLES[table].build()


def train_setting(name: str, table: ClassTable, split: int, contender: str, setting: int) -> dict[str, Any]:
    """The AUC of every class on validation and test rows, unless the run stopped."""
    method, settings = CONTENDERS[contender]
    chosen = {"cycles": CYCLES, "seed": split, "verbose": False, **settings[setting]}
    try:
        fitted = fedauc.fit(build_model(name, split), table.train, method, **chosen)
    except fedauc.TrainingStopped:
        return {"stopped": True}
    measured: dict[str, Any] = {}
    for part in ("validation", "test"):
        inputs, labels = getattr(table, part)
        scores = fitted.scores(inputs)
        measured[part] = [round(one_class_auc(labels, scores, digit), 5) for digit in range(CLASSES)]
    return measured


def run_all(path: Path) -> None:
    """Train what is not recorded yet, and append a line for each run."""
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {(run["table"], run["split"], run["contender"], run["setting"]) for run in known}
    with path.open("a") as stream:
        for name, split in itertools.product(TABLES, SPLITS):
            table = TABLES[name].load(split)
            for contender, (_, settings) in CONTENDERS.items():
                for setting in range(len(settings)):
                    if (name, split, contender, setting) in done:
                        continue
                    job = {"table": name, "split": split, "contender": contender, "setting": setting}
                    measured = train_setting(name, table, split, contender, setting)
                    stream.write(json.dumps({**job, **measured}) + "\n")
                    stream.flush()


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Test AUCs `[splits, classes]` of the chosen settings, and which they are."""
    rows = []
    for table, contender in itertools.product(TABLES, CONTENDERS):
        chosen = []
        for split in SPLITS:
            job = {"table": table, "split": split, "contender": contender}
            runs = [run for run in records if job.items() <= run.items() and "test" in run]
            chosen.append(max(runs, key=lambda run: np.mean(run["validation"])))
        test, settings = [run["test"] for run in chosen], [run["setting"] for run in chosen]
        rows.append({"table": table, "contender": contender, "settings": settings, "test": test})
    stopped = {name: sum(run["contender"] == name and "stopped" in run for run in records) for name in CONTENDERS}
    return {"runs": len(records), "stopped": stopped, "rows": rows}


def describe_difference(ours: np.ndarray, theirs: np.ndarray, overlap: float) -> str:
    """The mean difference over splits and the half-width of its 95 % interval; bold where zero is outside."""
    difference = compare_splits(ours - theirs, overlap)
    mark = "**" if difference.low > 0 or difference.high < 0 else ""
    return f"{mark}{difference.mean:+.4f}{mark} ± {difference.high - difference.mean:.4f}"


def make_blocks(record: Path) -> dict[str, str]:
    """The generated part of docs/objectives.md: the macro AUC, that of the five rarest classes, and every class."""
    summary, parts = json.loads(record.read_text()), []
    for table, (_, _, overlap) in TABLES.items():
        values = {row["contender"]: np.array(row["test"]) for row in summary["rows"] if row["table"] == table}
        body = []
        for title, classes in (("all ten classes", slice(None)), ("the five rarest", slice(5, None))):
            means = {name: values[name][:, classes].mean(1) for name in CONTENDERS}
            cells = [f"{means[name].mean():.4f}" for name in (*BASELINES, NEW)]
            cells += [describe_difference(means[NEW], means[name], overlap) for name in BASELINES]
            body.append([f"mean over {title}", *cells])
        parts.append(make_table([f"{table}, AUC", *BASELINES, NEW, *(f"less {name}" for name in BASELINES)], body))
        rows = [[name, *(f"{value:.3f}" for value in values[name].mean(0))] for name in CONTENDERS]
        parts.append(make_table([f"{table}, AUC of class", *map(str, range(CLASSES))], rows))
    return {"classes": "\n\n".join(parts)}


def main() -> None:
    """Run, summarize or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, default=Path("benchmarks/out/classes.jsonl"))
    summary = commands.add_parser("summarize")
    summary.add_argument("source", type=Path)
    summary.add_argument("target", type=Path)
    page = commands.add_parser("page")
    page.add_argument("source", type=Path)
    page.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.out)
    elif arguments.command == "summarize":
        records = [json.loads(line) for line in arguments.source.read_text().splitlines()]
        arguments.target.write_text(json.dumps(summarize(records), indent=0) + "\n")
    else:
        text = arguments.target.read_text()
        arguments.target.write_text(replace_blocks(text, make_blocks(arguments.source)))


if __name__ == "__main__":
    main()
