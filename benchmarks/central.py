"""How much AUC is left to win above balanced FedAvg? The same models, trained with all rows in one place.

    python benchmarks/central.py run --processes 2
    python benchmarks/central.py summarize benchmarks/out/central.jsonl benchmarks/records/central.json
    python benchmarks/central.py page benchmarks/records/central.json docs/methods.md

On every problem and split of `methods.py`, the model of the problem is trained on all training rows at once by Adam
with full batches: 400 iterations of three losses (logistic, logistic with equal weight of both classes, and the sigmoid
loss of pairs) with three learning rates. Pairs are between up to 256 positives and 2,048 negatives, drawn anew for
every iteration. The validation and test AUC are measured after 1, 2, 3, 5, 10 and 20 iterations and
then after every 20.

Two numbers count. `chosen` is the test AUC of the loss, rate and iteration with the highest validation AUC. `best` is
the highest test AUC of all of them, which nobody could choose: it is too high for a central model, because it is the
largest of 225 values for the same test rows. It is no bound for other models or other ways to regularise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from fedauc import keys
from fedauc.metrics import parse_metric
from fedauc.models import find_models
from methods_record import BALANCED, choose_complete, collect_chosen_runs
from methods_statistics import Difference, compare_problems, compare_splits
from methods_summary import make_table, replace_blocks, write_number, write_p
from problems import list_problems, load_problem

RUNS = Path(__file__).parent / "out" / "central.jsonl"
SPLITS = range(5)
LOSSES = ("logistic", "balanced logistic", "pairwise sigmoid")
RATES = (0.003, 0.03, 0.3)
ITERATIONS = 400
CHECKPOINTS = {1, 2, 3, 5, 10, *range(20, ITERATIONS + 1, 20)}
MOST_POSITIVES, MOST_NEGATIVES = 256, 2048


class Run(NamedTuple):
    """One training."""

    problem: str
    split: int
    loss: str
    rate: float


def measure_loss(name: str, scores: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """The loss of all rows, or of pairs of drawn rows."""
    if name == "logistic":
        return binary_cross_entropy_with_logits(scores, labels)
    positives, negatives = scores[labels > 0], scores[labels == 0]
    if name == "balanced logistic":
        return softplus(-positives).mean() + softplus(negatives).mean()
    positives = positives[torch.randperm(len(positives), generator=generator)[:MOST_POSITIVES]]
    negatives = negatives[torch.randperm(len(negatives), generator=generator)[:MOST_NEGATIVES]]
    gaps = positives[:, None] - negatives[None]
    return torch.sigmoid(-gaps).mean()


def measure_run(run: Run) -> dict[str, Any]:
    """Train, and record iterations with the AUC on validation and on test rows."""
    torch.set_num_threads(1)
    split, auc = load_problem(run.problem, run.split), parse_metric("auc")
    inputs, labels = torch.from_numpy(split.train.inputs), torch.from_numpy(split.train.labels).float()
    module = find_models()[list_problems()[run.problem].model]().build(tuple(inputs.shape[1:]), run.split)
    optimizer = torch.optim.Adam(module.parameters(), lr=run.rate)
    generator = torch.Generator().manual_seed(keys.random_integer(run.split, "central", run.loss))
    begin, measured = time.perf_counter(), []
    for iteration in range(1, ITERATIONS + 1):
        optimizer.zero_grad()
        measure_loss(run.loss, module(inputs).flatten(), labels, generator).backward()
        optimizer.step()
        if iteration in CHECKPOINTS:
            with torch.no_grad():
                parts = [(part, module(torch.from_numpy(part.inputs))) for part in (split.validation, split.test)]
            values = [auc.measure(part.labels, scores.flatten().double().numpy()).value for part, scores in parts]
            measured.append([iteration, *(round(float(value), 5) for value in values)])
    seconds = round(time.perf_counter() - begin, 2)
    return {**run._asdict(), "measured": measured, "overlap": round(split.overlap, 4), "seconds": seconds}


def run_all(problems: Sequence[str], path: Path, processes: int) -> None:
    """Train what is not recorded yet, and append the records as they come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {Run(*(record[name] for name in Run._fields)) for record in known}
    runs = itertools.starmap(Run, itertools.product(problems, SPLITS, LOSSES, RATES))
    missing = [run for run in runs if run not in done]
    print(f"{len(missing)} runs are left", flush=True)
    with path.open("a") as stream, multiprocessing.get_context("spawn").Pool(processes) as pool:
        for record in pool.imap(measure_run, missing, chunksize=len(LOSSES) * len(RATES)):
            stream.write(json.dumps(record) + "\n")
            stream.flush()


def summarize(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every problem, by split: the test AUC that validation rows choose, and the highest one."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["problem"], record["split"]].append(record)
    rows = []
    for problem in list_problems():
        measured = {split: list(list_measurements(groups[problem, split])) for split in SPLITS}
        if any(len(values) != len(LOSSES) * len(RATES) * len(CHECKPOINTS) for values in measured.values()):
            print(f"{problem} is left out: runs are missing", file=sys.stderr)
            continue
        chosen = [max(measured[split], key=lambda values: values[0]) for split in SPLITS]
        rows.append(
            {
                "problem": problem,
                "overlap": groups[problem, 0][0]["overlap"],
                "chosen": [auc for _, auc, _ in chosen],
                "losses": [loss for *_, loss in chosen],
                "best": [max(auc for _, auc, _ in measured[split]) for split in SPLITS],
            }
        )
    return rows


def list_measurements(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, str]]:
    """Validation AUC, test AUC and loss after each of the iterations at which they were measured."""
    for record in records:
        yield from ((validation, test, record["loss"]) for _, validation, test in record["measured"])


def compare_with_balanced(rows: Sequence[Mapping[str, Any]], records: Path) -> dict[str, dict[str, Difference]]:
    """Central less balanced FedAvg on every problem, for `chosen` and for `best`."""
    runs, _ = collect_chosen_runs([json.loads(line) for line in (records / "methods.jsonl").read_text().splitlines()])
    problems, _ = choose_complete(runs)
    result = {}
    for row in rows:
        if row["problem"] not in problems:
            continue
        balanced = np.array([run["auc"] for run in runs[row["problem"], BALANCED]])
        result[row["problem"]] = {
            name: compare_splits(np.array(row[name]) - balanced, row["overlap"]) for name in ("chosen", "best")
        }
    return result


def make_blocks(record: Path) -> dict[str, str]:
    """The generated parts of docs/methods.md."""
    rows = json.loads(record.read_text())
    differences = compare_with_balanced(rows, record.parent)
    header = ["problem", "chosen on validation rows, less balanced", "best on the test rows, less balanced"]
    cells = [
        [f"`{problem}`", *(write_interval(difference) for difference in pair.values())]
        for problem, pair in differences.items()
    ]
    totals = []
    for name in ("chosen", "best"):
        column = [pair[name] for pair in differences.values()]
        p = compare_problems([difference.mean for difference in column])
        above, below = sum(d.low > 0 for d in column), sum(d.high < 0 for d in column)
        average = write_number(mean(difference.mean for difference in column), sign=True, digits=4)
        totals.append(f"{average} (p {write_p(p)}); {above} above, {below} below")
    return {"central": make_table(header, [["all", *totals], *cells])}


def write_interval(difference: Difference) -> str:
    """A difference with its interval, and a star where zero is outside."""
    star = r" \*" if difference.low > 0 or difference.high < 0 else ""
    low, high = write_number(difference.low, sign=True), write_number(difference.high, sign=True)
    return f"{write_number(difference.mean, sign=True, digits=4)} [{low}, {high}]{star}"


def main() -> None:
    """Run, summarize or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--problems", default=",".join(list_problems()))
    run.add_argument("--processes", type=int, default=2)
    run.add_argument("--out", type=Path, default=RUNS)
    for name in ("summarize", "page"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.problems.split(","), arguments.out, arguments.processes)
    elif arguments.command == "summarize":
        records = [json.loads(line) for line in arguments.source.read_text().splitlines()]
        arguments.target.write_text(json.dumps(summarize(records), indent=0) + "\n")
    else:
        page = arguments.target.read_text()
        arguments.target.write_text(replace_blocks(page, make_blocks(arguments.source)))


if __name__ == "__main__":
    main()
