"""Rounds until an AUC of .980 on card fraud, by server optimizer.

    python benchmarks/server_optimizers.py
    python benchmarks/server_optimizers.py --seeds 0 --methods cycp-fedavg

Every method and optimizer gets the same number of settings: seven client learning rates. The setting is chosen by the
rounds that the validation rows need, averaged over the seeds; the table shows the rounds that the test rows need with
it, and beside them those at the method's default learning rate. A run that never gets there counts as one round more
than it has. The model is evaluated once per cycle of eight rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from fedauc.data.datasets.creditcard import CreditCard
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import DataCache, Run
from fedauc.interfaces import ServerOptimizer
from fedauc.server_optimizers.adaptive import Adam
from fedauc.server_optimizers.momentum import Momentum
from fedauc.server_optimizers.plain import Plain
from harness.report import describe_hardware

TARGET = 0.980
METHODS = ("cycp-fedavg", "cycp-minimax", "cycp-pairwise")
FACTORS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Client learning rates, as multiples of the method's default."""

OPTIMIZERS: dict[str, ServerOptimizer] = {
    "plain": Plain(),
    "momentum .5": Momentum(beta=0.5),
    "momentum .8": Momentum(beta=0.8),
    "adam": Adam(learning_rate=0.03),
}


def count_rounds(records: list[dict[str, Any]], column: str) -> int:
    """Rounds until a column reaches the target; one more than there are if it never does."""
    reached = (record["rounds"] for record in records if record[column] >= TARGET)
    return next(reached, records[-1]["rounds"] + 1)


def run_setting(
    method: str, optimizer: ServerOptimizer, factor: float, seeds: list[int], cycles: int, cache: DataCache
) -> dict[str, float]:
    """The mean rounds to the target over the seeds, for the validation and the test rows, and the final test AUC."""
    validation, test, final = [], [], []
    for seed in seeds:
        rate = factor * Recipe.of(method).learning_rate
        recipe = Recipe.of(
            method,
            learning_rate=rate,
            cycles=cycles,
            seed=seed,
            stages="constant",
            weighting="clients",
            server_optimizer=optimizer,
        )
        config = Config(recipe=recipe, data=CreditCard(validation_fraction=0.3))
        with tempfile.TemporaryDirectory() as folder:
            run = Run.create(config, Path(folder) / "run", cache)
            run.train_to_end()
            records = run.folder.read_records()
        validation.append(count_rounds(records, "validation_auc"))
        test.append(count_rounds(records, "auc"))
        final.append(records[-1]["auc"])
    return {"factor": factor, "validation_rounds": mean(validation), "rounds": mean(test), "auc": mean(final)}


def main() -> None:
    """Measure, print the table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--cycles", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seeds, cache, rows = [int(seed) for seed in arguments.seeds.split(",")], DataCache(), []
    print(
        f"{'method':15}{'server optimizer':18}{'learning rate':>14}{'rounds to .980':>16}{'at default':>12}{'AUC':>8}"
    )
    for method in arguments.methods.split(","):
        for name, optimizer in OPTIMIZERS.items():
            settings = [run_setting(method, optimizer, factor, seeds, arguments.cycles, cache) for factor in FACTORS]
            best = min(settings, key=lambda setting: (setting["validation_rounds"], setting["factor"]))
            rate = best["factor"] * Recipe.of(method).learning_rate
            default = settings[FACTORS.index(1.0)]["rounds"]
            numbers = f"{rate:14g}{best['rounds']:16.1f}{default:12.1f}{best['auc']:8.4f}"
            print(f"{method:15}{name:18}{numbers}", flush=True)
            rows.append({"method": method, "optimizer": name, "learning_rate": rate, **best, "settings": settings})
    if arguments.out:
        about = {"target": TARGET, "seeds": seeds, "cycles": arguments.cycles, **describe_hardware()}
        arguments.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
