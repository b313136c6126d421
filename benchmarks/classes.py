"""Does one-vs-rest AUC by cyclic clients win against FedAvg with a softmax? Digits with rare classes, federated.

    python benchmarks/classes.py run --out benchmarks/out/classes.jsonl
    python benchmarks/classes.py summarize benchmarks/out/classes.jsonl benchmarks/records/classes.json
    python benchmarks/classes.py show benchmarks/records/classes.json

The table is scikit-learn's copy of the handwritten digits (1,797 images of 8 x 8, ten classes). Half of its rows are
for training, a fifth for validation and the rest for testing. Of digit c, a share of .05^(c / 9) of the training rows
stays, so that the classes range from about 90 rows to about 5; a Dirichlet distribution with concentration .5 shares
the rows of each class among 24 clients in 8 groups. The model has one hidden layer of 32 units. Every contender has
eight settings, each trained for ten cycles. The one with the best macro one-vs-rest AUC on the validation rows counts,
and its values on the test rows are reported. Differences are paired by split, with the variance corrected for rows that
splits share (Nadeau and Bengio 2003).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from collections.abc import Mapping
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

SPLITS, CYCLES, CLASSES, CLIENTS, GROUPS = range(6), 10, 10, 24, 8
RAREST = 0.05
T_QUANTILE = 2.571
"""The 97.5 % quantile of Student's distribution with one degree less than there are splits."""

TEST_PER_TRAINING_ROW = 0.3 / 0.5
"""The splits' correction: 30 % of the rows are for testing, and 50 % for training."""

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


def load_table(split: int) -> ClassTable:
    """The digits of a split, in the hands of clients."""
    inputs, labels = load_digits(return_X_y=True)
    inputs = (inputs / 8 - 1).astype(np.float32)
    order = keys.numpy_generator(split, "digits").permutation(len(labels))
    train, validation, test = np.split(order, [len(order) // 2, len(order) * 7 // 10])
    rng = keys.numpy_generator(split, "clients")
    rows, owners = [], []
    for digit in range(CLASSES):
        of_class = train[labels[train] == digit]
        count = max(2, round(len(of_class) * RAREST ** (digit / (CLASSES - 1))))
        rows.append(of_class[:count])
        owners.append(rng.choice(CLIENTS, size=count, p=rng.dirichlet(np.full(CLIENTS, 0.5))))
    chosen, owner = np.concatenate(rows), np.concatenate(owners)
    clients = fedauc.Clients.from_classes(inputs[chosen], labels[chosen], owner, owner % GROUPS)
    return ClassTable(clients, (inputs[validation], labels[validation]), (inputs[test], labels[test]))


def build_model(seed: int) -> nn.Module:
    """One hidden layer of 32 units with keyed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(keys.random_integer(seed, "classes"))
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def train_setting(table: ClassTable, split: int, contender: str, setting: int) -> dict[str, Any]:
    """The AUC of every class on validation and test rows, unless the run stopped."""
    method, settings = CONTENDERS[contender]
    chosen = {"cycles": CYCLES, "seed": split, "verbose": False, **settings[setting]}
    try:
        fitted = fedauc.fit(build_model(split), table.train, method, **chosen)
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
    done = {(run["split"], run["contender"], run["setting"]) for run in known}
    with path.open("a") as stream:
        for split in SPLITS:
            table = load_table(split)
            for contender, (_, settings) in CONTENDERS.items():
                for setting in range(len(settings)):
                    if (split, contender, setting) in done:
                        continue
                    job = {"split": split, "contender": contender, "setting": setting}
                    stream.write(json.dumps({**job, **train_setting(table, split, contender, setting)}) + "\n")
                    stream.flush()


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Test AUCs `[splits, classes]` of the chosen settings, and which they are."""
    rows = []
    for contender in CONTENDERS:
        chosen = []
        for split in SPLITS:
            job = {"split": split, "contender": contender}
            runs = [run for run in records if job.items() <= run.items() and "test" in run]
            chosen.append(max(runs, key=lambda run: np.mean(run["validation"])))
        test, settings = [run["test"] for run in chosen], [run["setting"] for run in chosen]
        rows.append({"contender": contender, "settings": settings, "test": test})
    stopped = {name: sum(run["contender"] == name and "stopped" in run for run in records) for name in CONTENDERS}
    return {"runs": len(records), "stopped": stopped, "rows": rows}


def describe_difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The mean difference over splits and the half-width of its 95 % interval; bold where zero is outside."""
    difference = ours - theirs
    spread = float(difference.std(ddof=1)) * math.sqrt(1 / len(difference) + TEST_PER_TRAINING_ROW)
    mean, half = float(difference.mean()), T_QUANTILE * spread
    mark = "**" if abs(mean) > half else ""
    return f"{mark}{mean:+.4f}{mark} ± {half:.4f}"


def show_tables(summary: Mapping[str, Any]) -> None:
    """Markdown: the macro AUC, and the mean over the five rarest classes, with the differences to the baselines."""
    values = {row["contender"]: np.array(row["test"]) for row in summary["rows"]}
    print(f"| AUC against the rest | {' | '.join(BASELINES)} | {NEW} | less {' | less '.join(BASELINES)} |")
    print("|---|" + "---|" * (1 + 2 * len(BASELINES)))
    for title, classes in (("all ten digits", slice(None)), ("the five rarest digits", slice(5, None))):
        means = {name: values[name][:, classes].mean(1) for name in CONTENDERS}
        cells = [f"{means[name].mean():.4f}" for name in (*BASELINES, NEW)]
        cells += [describe_difference(means[NEW], means[name]) for name in BASELINES]
        print(f"| mean over {title} | {' | '.join(cells)} |")
    print("\n| digit | " + " | ".join(map(str, range(CLASSES))) + " |\n|---|" + "---|" * CLASSES)
    for name in CONTENDERS:
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values[name].mean(0)) + " |")
    print(f"\n{summary['runs']} runs; stopped: {summary['stopped']}")


def main() -> None:
    """Run, summarize or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, default=Path("benchmarks/out/classes.jsonl"))
    summary = commands.add_parser("summarize")
    summary.add_argument("source", type=Path)
    summary.add_argument("target", type=Path)
    show = commands.add_parser("show")
    show.add_argument("source", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.out)
    elif arguments.command == "summarize":
        records = [json.loads(line) for line in arguments.source.read_text().splitlines()]
        arguments.target.write_text(json.dumps(summarize(records), indent=0) + "\n")
    else:
        show_tables(json.loads(arguments.source.read_text()))


if __name__ == "__main__":
    main()
