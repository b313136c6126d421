"""AUC on eight public tables: fedauc against central models and models that each site trains alone.

    python benchmarks/tables.py describe                                  # rows, positives, sites, columns, source
    python benchmarks/tables.py run --processes 16 --out benchmarks/out/tables.jsonl
    python benchmarks/tables.py run --tables covid --seeds 0 --contenders central-logistic,cycp-pairwise/linear
    python benchmarks/tables_summary.py benchmarks/out/tables.jsonl benchmarks/records/tables.json

Each table is split by a seed into training, validation and test rows (56, 14 and 30 %, by class). Every contender has
four settings; the one with the best validation AUC is used, and its test AUC is reported. Boosting stops, and
federated training ends, with the iteration or cycle that is best on the validation rows. `--settings all` also runs the
settings that only the study of defaults needs.

A model that a site trains alone scores the same test rows as all others; `sites-...` is the mean over the sites that
hold both classes. `own` is another comparison: the mean over sites of the AUC on the site's own test rows (sites with
at least five of each class), for its own model or for the model that all share.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

import fedauc
from fedauc.experiments.recipe import Recipe
from fedauc.models import find_models
from public_tables import TABLES, describe_table, list_features, prepare_table

Setting = Mapping[str, Any]
MIN_CATEGORY_ROWS = 10
"""Categories with fewer training rows share one column."""

BINS = 16
"""Bins of a number in piecewise-linear encodings."""

MIN_OWN_ROWS = 5
"""Test rows of each class that a site needs before an AUC on its own rows is computed."""


@dataclass(frozen=True)
class Part:
    """Training, validation or test rows: standardised, with piecewise-linear bins too, and coded for trees."""

    inputs: np.ndarray
    binned: np.ndarray
    codes: np.ndarray
    labels: np.ndarray
    sites: np.ndarray


@dataclass(frozen=True)
class Split:
    """The three parts of a table; `is_category` marks the columns of `codes` that boosting treats as categories."""

    train: Part
    validation: Part
    test: Part
    is_category: np.ndarray
    seed: int


Scores = tuple[np.ndarray, np.ndarray]
"""Scores of the validation rows and of the test rows."""


class PiecewiseLinear(TransformerMixin, BaseEstimator):
    """Numbers between two quantiles become 0 to 1, one output per bin (Gorishniy et al. 2022); missing ones are 0."""

    def fit(self, frame: pd.DataFrame, labels: Any = None) -> PiecewiseLinear:
        """Quantiles of the training rows."""
        quantiles = frame.quantile(np.linspace(0, 1, BINS + 1)).to_numpy()
        self.edges_ = [np.unique(column[np.isfinite(column)]) for column in quantiles.T]
        return self

    def transform(self, frame: pd.DataFrame) -> np.ndarray:
        """One output per bin of every column."""
        outputs = [np.zeros((len(frame), 0))]
        for values, edges in zip(frame.to_numpy(dtype=float).T, self.edges_, strict=True):
            if len(edges) > 1:
                outputs.append(np.clip((values[:, None] - edges[:-1]) / np.diff(edges), 0, 1))
        return np.nan_to_num(np.concatenate(outputs, axis=1))


@lru_cache(maxsize=2)
def load_split(name: str, seed: int) -> Split:
    """Split a table by class and encode it with statistics of the training rows."""
    frame = prepare_table(TABLES[name])
    numbers, categories = list_features(frame)
    rest, test = train_test_split(frame, test_size=0.3, stratify=frame["positive"], random_state=seed)
    train, validation = train_test_split(rest, test_size=0.2, stratify=rest["positive"], random_state=seed)
    filled = make_pipeline(SimpleImputer(strategy="mean", add_indicator=True), StandardScaler())
    rare = {"min_frequency": MIN_CATEGORY_ROWS}
    one_hot = OneHotEncoder(handle_unknown="infrequent_if_exist", sparse_output=False, **rare)
    # Boosting reads negative categories as missing.
    ordinal = OrdinalEncoder(
        handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2, max_categories=250, **rare
    )
    encoders = (
        make_column_transformer((filled, numbers), (one_hot, categories)),
        make_column_transformer((filled, numbers), (one_hot, categories), (PiecewiseLinear(), numbers)),
        make_column_transformer(("passthrough", numbers), (ordinal, categories)),
    )
    parts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for encoder in encoders:
            encoder.fit(train)
        for part in (train, validation, test):
            arrays = (encoder.transform(part).astype(np.float32) for encoder in encoders)
            parts.append(Part(*arrays, part["positive"].to_numpy(), part["site"].to_numpy()))
    return Split(*parts, np.arange(len(numbers) + len(categories)) >= len(numbers), seed)


# --------------------------------------------------------------------------- the contenders


def fit_logistic(train: Part, split: Split, setting: Setting) -> Scores:
    """Logistic regression with an L2 penalty."""
    model = LogisticRegression(C=setting["C"], max_iter=300).fit(train.inputs, train.labels)
    return model.decision_function(split.validation.inputs), model.decision_function(split.test.inputs)


def train_boosting(train: Part, split: Split, setting: Setting) -> HistGradientBoostingClassifier:
    """Gradient boosting of trees, with categories as such. It cannot be given a column without any value."""
    model = HistGradientBoostingClassifier(
        categorical_features=split.is_category, early_stopping=False, random_state=0, **setting
    )
    return model.fit(np.where(np.isnan(train.codes).all(axis=0), 0, train.codes), train.labels)


def fit_boosting(train: Part, split: Split, setting: Setting) -> Scores:
    """Gradient boosting with all its trees."""
    model = train_boosting(train, split, setting)
    return model.decision_function(split.validation.codes), model.decision_function(split.test.codes)


def fit_staged_boosting(train: Part, split: Split, setting: Setting) -> Scores:
    """The same with the best of ten numbers of trees by validation AUC."""
    model = train_boosting(train, split, setting)
    step = setting["max_iter"] // 10
    stages = zip(*(model.staged_decision_function(part.codes) for part in (split.validation, split.test)), strict=True)
    return max(islice(stages, step - 1, None, step), key=lambda pair: roc_auc_score(split.validation.labels, pair[0]))


Fit = Callable[[Part, Split, Setting], Scores]


def measure_central(fit_model: Fit, split: Split, setting: Setting) -> dict[str, float]:
    """One model on all rows."""
    validation, test = fit_model(split.train, split, setting)
    return measure_scores(split, validation, test)


def measure_sites(fit_model: Fit, split: Split, setting: Setting) -> dict[str, float]:
    """A model per site that holds both classes: the mean AUC on the common rows, and on each site's own rows."""
    validation_aucs, test_aucs, rows, own = [], [], [], []
    for site in np.unique(split.train.sites):
        mask = split.train.sites == site
        train = Part(*(array[mask] for array in vars(split.train).values()))
        if len(np.unique(train.labels)) < 2:
            continue
        validation, test = fit_model(train, split, setting)
        validation_aucs.append(roc_auc_score(split.validation.labels, validation))
        test_aucs.append(roc_auc_score(split.test.labels, test))
        rows.append(int(mask.sum()))
        own += list(measure_own_rows(split, test, [site]))
    return {
        "validation": float(np.mean(validation_aucs)),
        "test": float(np.mean(test_aucs)),
        "test_by_rows": float(np.average(test_aucs, weights=rows)),
        "best_site": float(test_aucs[int(np.argmax(validation_aucs))]),
        "own": float(np.mean(own)) if own else float("nan"),
    }


def measure_own_rows(split: Split, scores: np.ndarray, sites: Iterable[str]) -> Iterable[float]:
    """The AUC on the test rows of each site that has enough of them and can train alone."""
    for site in sites:
        mask = split.test.sites == site
        labels = split.test.labels[mask]
        trainable = len(np.unique(split.train.labels[split.train.sites == site])) == 2
        if trainable and min(labels.sum(), len(labels) - labels.sum()) >= MIN_OWN_ROWS:
            yield float(roc_auc_score(labels, scores[mask]))


def measure_scores(split: Split, validation: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """The AUCs of one model for all."""
    own = list(measure_own_rows(split, test, np.unique(split.test.sites)))
    return {
        "validation": float(roc_auc_score(split.validation.labels, validation)),
        "test": float(roc_auc_score(split.test.labels, test)),
        "own": float(np.mean(own)) if own else float("nan"),
    }


def measure_federated(method: str, model: str, split: Split, setting: Setting) -> dict[str, float]:
    """Federated training; the model of the best cycle by validation AUC. `tabular` and `-bins` get numbers in bins."""
    config = find_models()[model.removesuffix("-bins")]()
    binned = model.endswith("-bins") or model == "tabular"
    train, validation, test = (
        part.binned if binned else part.inputs for part in (split.train, split.validation, split.test)
    )
    clients = fedauc.Clients.from_arrays(train, split.train.labels, client=split.train.sites)
    recipe = Recipe.of(method, **{"keep": "best", "seed": split.seed, **setting})
    module = config.build(train.shape[1:], seed=split.seed)
    try:
        fitted = fedauc.fit(module, clients, recipe, validation=(validation, split.validation.labels))
    except fedauc.TrainingStopped:
        # A run that diverges is worth as much as a guess.
        return {"validation": 0.5, "test": 0.5, "own": 0.5, "stopped": 1}
    measured = measure_scores(split, fitted.scores(validation), fitted.scores(test))
    return {**measured, "best_round": fitted.round, "rounds": fitted.traffic.rounds}


@dataclass(frozen=True)
class Contender:
    """What is compared: the settings that are tuned over, and those that only the study of defaults needs."""

    measure: Callable[[Split, Setting], dict[str, float]]
    settings: tuple[Setting, ...]
    studied: tuple[Setting, ...] = ()


METHODS = ("cycp-fedavg", "cycp-minimax", "cycp-pairwise")
MODELS = ("linear", "linear-bins", "mlp", "tabular")
RATES = (0.01, 0.03, 0.1, 0.3)
"""Learning rates of a linear model. Minimax takes a third of them, and networks three times as much."""

VARIATIONS: tuple[Setting, ...] = (
    {"local_steps": 4},
    {"local_steps": 64},
    {"stages": "constant"},
    {"stage_output": "ema"},
    {"positives": 4, "negatives": 28},
    {"positives": 64, "negatives": 64},
    {"cycles": 10},
    {"cycles": 100},
    {"keep": "last"},
    {"keep": "last", "stages": "constant"},
    {"keep": "last", "stages": "constant", "stage_output": "ema"},
)
"""What the study of defaults changes, one at a time, at the two middle learning rates."""


def round_rate(rate: float) -> float:
    """The nearest of .001, .003, .01, .03 and so on."""
    candidates = (float(f"{base}e{power}") for base in (1, 3) for power in range(-4, 2))
    return min(candidates, key=lambda near: abs(near / rate - 1))


def list_contenders() -> dict[str, Contender]:
    """Every contender by name, with four settings each."""
    logistic = tuple({"C": value} for value in (0.001, 0.01, 0.1, 1.0))
    central_trees = tuple(
        {"learning_rate": rate, "max_leaf_nodes": leaves, "max_iter": 300} for rate in (0.03, 0.1) for leaves in (6, 31)
    )
    site_trees = tuple(
        {"max_iter": trees, "max_leaf_nodes": leaves, "min_samples_leaf": 5} for trees in (20, 60) for leaves in (6, 31)
    )
    contenders = {
        "central-logistic": Contender(partial(measure_central, fit_logistic), logistic),
        "central-boosting": Contender(partial(measure_central, fit_staged_boosting), central_trees),
        "sites-logistic": Contender(partial(measure_sites, fit_logistic), logistic),
        "sites-boosting": Contender(partial(measure_sites, fit_boosting), site_trees),
    }
    for method, model in product(METHODS, MODELS):
        factor = (1 / 3 if method == "cycp-minimax" else 1) * (1 if model.startswith("linear") else 3)
        tuned = tuple({"learning_rate": round_rate(factor * rate), "weighting": "pooled"} for rate in RATES)
        by_clients = ({**setting, "weighting": "clients"} for setting in tuned)
        varied = ({**setting, **change} for change in VARIATIONS for setting in tuned[1:3])
        measure = partial(measure_federated, method, model)
        contenders[f"{method}/{model}"] = Contender(measure, tuned, (*by_clients, *varied))
    return contenders


# --------------------------------------------------------------------------- running them

Task = tuple[str, int, str, Setting]
TASK_FIELDS = ("table", "seed", "contender", "setting")


def run_task(task: Task) -> dict[str, Any]:
    """Train one contender with one setting on one split."""
    torch.set_num_threads(1)
    table, seed, contender, setting = task
    split = load_split(table, seed)
    started = time.perf_counter()
    with warnings.catch_warnings():
        # A setting that does not converge stays a setting; the validation rows judge it.
        warnings.simplefilter("ignore")
        measured = list_contenders()[contender].measure(split, setting)
    seconds = round(time.perf_counter() - started, 2)
    tuned = setting in list_contenders()[contender].settings
    return {**dict(zip(TASK_FIELDS, task, strict=True)), "tuned": tuned, **measured, "seconds": seconds}


def list_tasks(tables: list[str], seeds: list[int], names: list[str], studied: bool) -> list[Task]:
    """Every training, in an order in which neighbours share their split; tuned settings come first."""
    contenders = list_contenders()
    parts = [{name: contenders[name].settings for name in names}]
    if studied:
        parts.append({name: contenders[name].studied for name in names})
    return [
        (table, seed, name, setting)
        for part in parts
        for seed in seeds
        for table in tables
        for name in names
        for setting in part[name]
    ]


def run_tasks(tasks: list[Task], processes: int, minutes: float, out: Path) -> None:
    """Train all, and append every result to a file of JSON lines, so that an interrupted run goes on where it was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(*(row[name] for name in TASK_FIELDS)) for row in read_rows(out)} if out.exists() else set()
    todo = [task for task in tasks if key_of(*task) not in done]
    print(f"{len(todo)} trainings to do, {len(tasks) - len(todo)} done before, {processes} processes", flush=True)
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool, out.open("a") as file:
        for count, row in enumerate(pool.imap_unordered(run_task, todo), start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            elapsed = time.perf_counter() - started
            if count % 50 == 0:
                left = (len(todo) - count) * elapsed / count
                print(f"{count} of {len(todo)}, about {left:.0f} s left", flush=True)
            if elapsed > 60 * minutes:
                print(f"Stopped after {count} of {len(todo)} trainings; the same command goes on.", flush=True)
                break


def key_of(table: str, seed: int, contender: str, setting: Setting) -> str:
    """What tells one training from all others."""
    return json.dumps([table, seed, contender, setting], sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The results in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Describe, run or summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("describe", help="what is in the tables")
    run = commands.add_parser("run", help="train everything")
    run.add_argument("--tables", default=",".join(TABLES))
    run.add_argument("--seeds", default="0,1,2,3,4")
    run.add_argument("--contenders", default=",".join(list_contenders()))
    run.add_argument("--settings", choices=("tuned", "all"), default="tuned")
    run.add_argument("--processes", type=int, default=2)
    run.add_argument("--minutes", type=float, default=1e6, help="start no training after this time")
    run.add_argument("--out", type=Path, default=Path("benchmarks/out/tables.jsonl"))
    arguments = parser.parse_args()
    if arguments.command == "describe":
        for table in TABLES.values():
            print(json.dumps(describe_table(table), indent=1))
    else:
        names, seeds = arguments.contenders.split(","), [int(seed) for seed in arguments.seeds.split(",")]
        tasks = list_tasks(arguments.tables.split(","), seeds, names, arguments.settings == "all")
        run_tasks(tasks, arguments.processes, arguments.minutes, arguments.out)


if __name__ == "__main__":
    main()
