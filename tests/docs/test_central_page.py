"""docs/methods.md shows what the recorded central runs leave to win above balanced FedAvg."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"

sys.path.insert(0, str(ROOT / "benchmarks"))
central: Any = importlib.import_module("central")
sys.path.remove(str(ROOT / "benchmarks"))

ROWS = json.loads((RECORDS / "central.json").read_text())


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for name, block in central.make_blocks(RECORDS / "central.json").items():
        assert f"<!-- begin {name} -->\n\n{block}\n\n<!-- end -->" in page


def test_the_best_is_at_least_what_validation_rows_choose() -> None:
    assert len(ROWS) == 22
    for row in ROWS:
        assert np.all(np.array(row["best"]) >= np.array(row["chosen"]))


def test_validation_rows_choose_and_test_rows_bound() -> None:
    records = [
        {"problem": "covid", "split": split, "loss": loss, "rate": rate, "overlap": 0.5, "measured": measured}
        for split in central.SPLITS
        for loss in central.LOSSES
        for rate in central.RATES
        # The validation AUC is highest at 5 iterations of the pairwise loss, the test AUC elsewhere.
        for measured in [
            [[i, 0.6 + 0.1 * (i == 5 and loss == "pairwise sigmoid" and rate == 0.03), 0.7 + 0.001 * (i == 2) - rate]
             for i in sorted(central.CHECKPOINTS)]
        ]
    ]  # fmt: skip
    (row,) = central.summarize(records)
    assert row["losses"] == ["pairwise sigmoid"] * 5
    assert row["chosen"] == pytest.approx([0.67] * 5)
    assert row["best"] == pytest.approx([0.698] * 5)


def test_the_counts_agree_with_student_quantiles() -> None:
    """Computed once more without the statistics of the benchmark: Student's quantile for 4 degrees is 2.776."""
    differences = central.compare_with_balanced(ROWS, RECORDS)
    runs = [json.loads(line) for line in (RECORDS / "methods.jsonl").read_text().splitlines()]
    for row in ROWS:
        balanced = [
            [run["auc"] for run in runs if (run["problem"], run["contender"], run["split"], run["setting"]) == key]
            for split in range(5)
            for key in [(row["problem"], "cycp-fedavg-balanced", split, find_setting(runs, row["problem"]))]
        ]
        values = np.array(row["chosen"]) - np.array([found[0] for found in balanced])
        width = 2.7764451 * np.sqrt((1 / 5 + row["overlap"]) * values.var(ddof=1))
        got = differences[row["problem"]]["chosen"]
        assert (got.mean, got.low) == pytest.approx((values.mean(), values.mean() - width), abs=1e-6)


def find_setting(runs: list[dict[str, Any]], problem: str) -> dict[str, Any]:
    """The setting of balanced FedAvg that was trained on the splits that only report."""
    chosen = [
        run["setting"]
        for run in runs
        if (run["problem"], run["contender"]) == (problem, "cycp-fedavg-balanced") and run["split"] > 1
    ]
    totals = {json.dumps(setting, sort_keys=True): 0.0 for setting in chosen}
    for run in runs:
        key = json.dumps(run["setting"], sort_keys=True)
        if (run["problem"], run["contender"]) == (problem, "cycp-fedavg-balanced") and run["split"] < 2:
            totals = {**totals, key: totals.get(key, 0.0) + run["validation"]}
    best: dict[str, Any] = json.loads(max(totals, key=lambda key: totals[key]))
    return best
