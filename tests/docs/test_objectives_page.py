"""docs/objectives.md shows what the recorded runs say about objectives beyond AUC and about several classes."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
PAGE = (ROOT / "docs" / "objectives.md").read_text()

sys.path.insert(0, str(ROOT / "benchmarks"))
objectives: Any = importlib.import_module("objectives")
classes: Any = importlib.import_module("classes")
sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("maker", [objectives, classes], ids=["objectives", "classes"])
def test_the_page_shows_the_tables(maker: Any) -> None:
    blocks = maker.make_blocks(RECORDS / f"{maker.__name__}.json")
    for name, block in blocks.items():
        assert f"<!-- begin {name} -->\n\n{block}\n\n<!-- end -->" in PAGE


def test_every_contender_has_every_problem_that_it_is_trained_on() -> None:
    rows = json.loads((RECORDS / "objectives.json").read_text())["rows"]
    values = {(row["problem"], row["metric"], row["contender"]): row["test"] for row in rows}
    expected = {
        (problem, metric, contender): spec.splits
        for problem, spec in objectives.PROBLEMS.items()
        for metric in objectives.METRICS
        for contender in objectives.CONTENDERS
        if contender not in spec.left_out
    }
    assert {key: len(test) for key, test in values.items()} == expected


def test_a_row_of_the_page_computed_once_more() -> None:
    """The corrected t-interval, written out: cycp-ndcg less cycp-fedavg in ndcg@0 on the synthetic table."""
    rows = json.loads((RECORDS / "objectives.json").read_text())["rows"]
    ours, theirs = (
        np.array(row["test"])
        for name in ("cycp-ndcg", "cycp-fedavg")
        for row in rows
        if (row["problem"], row["metric"], row["contender"]) == ("hard negatives", "ndcg@0", name)
    )
    difference = ours - theirs
    half = stats.t.ppf(0.975, len(difference) - 1) * np.sqrt(difference.var(ddof=1) / len(difference))
    block = PAGE.split("`cycp-ndcg`, ndcg@0\n")[1]
    row = re.search(r"\| hard negatives \| (\S+) \| \**([+-]\S+?)\** ± (\S+) \|", block)
    assert row is not None
    assert [float(cell) for cell in row.groups()] == pytest.approx([ours.mean(), difference.mean(), half], abs=6e-5)


def test_choosing_reads_validation_rows_alone() -> None:
    def record(setting: int, validation: float, test: float) -> dict[str, Any]:
        job = {"problem": "covid", "split": 0, "contender": "cycp-fedavg", "setting": setting}
        return {**job, "validation": [validation] * 6, "test": [test] * 6}

    stopped = {"problem": "covid", "split": 0, "contender": "cycp-fedavg", "setting": 2, "stopped": True}
    chosen = objectives.choose_settings([record(0, 0.6, 0.9), record(1, 0.7, 0.5), stopped])
    assert chosen["covid", "auc", "cycp-fedavg"] == [0.5]
