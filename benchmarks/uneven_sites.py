"""What `weighting="pooled"` does where one site has most of the rows: its steps are as many times longer as its share.

    python benchmarks/uneven_sites.py            # writes records/uneven-sites.json and prints the table

Synthetic rows of 100 sites: one site has so many times the rows of the mean site, and the others have equal shares of
the rest. Every method runs with its default learning rate and both weightings, on data and draws of several seeds.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import fedauc

RECORD = Path(__file__).parent / "records" / "uneven-sites.json"
METHODS = ("cycp-fedavg", "cycp-fedavg-balanced", "cycp-minimax", "cycp-pairwise", "a-scaffold")
TIMES_THE_MEAN = (1, 9, 51, 91)
SITES, ROWS, FEATURES, POSITIVE_RATE, CYCLES = 100, 20_000, 10, 0.1, 10
SEEDS = (0, 1, 2)


def draw_rows(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Positives differ in the mean of every feature, and in a product of two, which a line cannot see."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(rows) < POSITIVE_RATE).astype(np.int8)
    inputs = generator.normal(size=(rows, FEATURES)) + 0.25 * labels[:, None]
    inputs[:, 0] += labels * np.sign(inputs[:, 1])
    return inputs.astype(np.float32), labels


def measure_auc(method: str, weighting: str, times: int, is_network: bool, seed: int) -> float | None:
    """The test AUC after the last cycle; None where the run diverges."""
    inputs, labels = draw_rows(1000 + seed, ROWS)
    largest = times * ROWS // SITES
    owner = np.concatenate([np.zeros(largest, int), 1 + np.arange(ROWS - largest) % (SITES - 1)])
    clients = fedauc.Clients.from_arrays(inputs, labels, client=owner, group=owner % 10)
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(FEATURES, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)]
    module = torch.nn.Sequential(*layers) if is_network else torch.nn.Linear(FEATURES, 1)
    test = draw_rows(2000 + seed, ROWS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = fedauc.fit(module, clients, method, test=test, cycles=CYCLES, weighting=weighting, seed=seed)
    except fedauc.TrainingStopped:
        return None
    return float(fitted.history[-1][1].auc)


def main() -> None:
    """Run every case, and write and print the means."""
    rows = list[dict[str, Any]]()
    for is_network in (False, True):
        for times in TIMES_THE_MEAN:
            for method in METHODS:
                for weighting in ("clients", "pooled"):
                    values = [measure_auc(method, weighting, times, is_network, seed) for seed in SEEDS]
                    model = "hidden layer" if is_network else "linear"
                    rows.append(
                        {"model": model, "times": times, "method": method, "weighting": weighting, "auc": values}
                    )
                    shown = ", ".join("diverged" if value is None else f"{value:.4f}" for value in values)
                    print(f"{model:12}  {times:3} times  {method:21}  {weighting:8}  {shown}", flush=True)
    about = f"{SITES} sites, {ROWS} rows, {FEATURES} features, {CYCLES} cycles of 10 groups, default learning rates"
    RECORD.write_text(json.dumps({"about": about, "fedauc": fedauc.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
