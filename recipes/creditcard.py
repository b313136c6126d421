"""Every method on the credit-card fraud sample against centralised logistic regression, over five splits.

    python recipes/creditcard.py                                      # the table of docs/results.md
    python recipes/creditcard.py --methods cycp-fedavg,cycp-minimax   # some of it

Each seed splits the data anew (30 % test, stratified) and keys the training; linear scorer, 30 cycles, each method's
defaults. Nothing is tuned on the test part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from fedauc.algorithms import methods
from fedauc.data import Preparation, Split, prepare
from fedauc.data.creditcard import CreditCard
from fedauc.experiments.fitting import fit
from fedauc.metrics import auc, average_precision, delong_interval
from fedauc.models.linear import Linear

CENTRAL = "central"
CYCLES = 30


class Outcome(NamedTuple):
    """One method on one split: AUC with its standard error, average precision, rounds and bytes both ways."""

    method: str
    seed: int
    auc: float
    error: float
    average_precision: float
    rounds: int
    traffic: int


def train(method: str, seed: int) -> Outcome:
    """One method on one split; `central` is scikit-learn's logistic regression on the pooled rows."""
    torch.set_num_threads(1)
    split = prepare(CreditCard().load(seed), Preparation(), seed)
    if method == CENTRAL:
        return _outcome(method, seed, split, _central(split), 0, 0)
    model = Linear().build(tuple(split.train.inputs.shape[1:]), seed)
    fitted = fit(model, split.train, method, cycles=CYCLES, seed=seed)
    traffic = fitted.traffic
    scores = fitted.scores(split.test.inputs)
    return _outcome(method, seed, split, scores, traffic.rounds, traffic.bytes_up + traffic.bytes_down)


def _central(split: Split) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=3000).fit(split.train.inputs.numpy(), split.train.labels.numpy())
    return np.asarray(model.decision_function(split.test.inputs.numpy()))


def _outcome(method: str, seed: int, split: Split, scores: np.ndarray, rounds: int, traffic: int) -> Outcome:
    labels = split.test.labels.numpy()
    error = delong_interval(labels, scores).error
    return Outcome(method, seed, auc(labels, scores), error, average_precision(labels, scores), rounds, traffic)


def table(names: Sequence[str], seeds: Sequence[int], workers: int = 2) -> dict[str, list[Outcome]]:
    """Every method on every split."""
    jobs = list(product(names, seeds))
    with ProcessPoolExecutor(workers) as pool:
        done = list(pool.map(train, *zip(*jobs, strict=True)))
    return {name: [outcome for outcome in done if outcome.method == name] for name in names}


def markdown(found: dict[str, list[Outcome]]) -> Iterator[str]:
    """Means over the splits; the spread is over splits, the standard error is DeLong's of one test part."""
    yield "| method | AUC | sd over splits | se of one test part | average precision | rounds | MB |"
    yield "|---|---|---|---|---|---|---|"
    for name, outcomes in found.items():
        aucs = [outcome.auc for outcome in outcomes]
        mean, spread, error = np.mean(aucs), np.std(aucs, ddof=1), np.mean([o.error for o in outcomes])
        precision, first = np.mean([o.average_precision for o in outcomes]), outcomes[0]
        cost = f"{first.rounds} | {first.traffic / 1e6:.2f}" if first.rounds else "- | -"
        yield f"| {name} | {mean:.4f} | {spread:.4f} | {error:.4f} | {precision:.4f} | {cost} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Credit-card fraud: every method over five splits.")
    parser.add_argument("--methods", default=",".join([CENTRAL, *methods()]))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    arguments = parser.parse_args()
    found = table(arguments.methods.split(","), [int(seed) for seed in arguments.seeds.split(",")])
    print("\n".join(markdown(found)))


if __name__ == "__main__":
    main()
