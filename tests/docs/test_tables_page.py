"""docs/tables.md shows the numbers of benchmarks/records/tables.json, and its claims hold there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tables.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "records" / "tables.json").read_text())
summary: Any = importlib.import_module("benchmarks.tables_summary")
TABLES = [table["name"] for table in RECORD["tables"]]
FEDERATED = [name for name in summary.list_contenders(RECORD) if "/" in name]


def find_auc(table: str, contender: str) -> float:
    return float(summary.find_entry(RECORD, table, contender)["auc"]["mean"])


def test_the_page_shows_the_record() -> None:
    assert summary.update_page(PAGE, RECORD) == PAGE
    for block in summary.make_blocks(RECORD).values():
        assert block in PAGE


def test_there_are_enough_tables_of_the_kind_that_people_have() -> None:
    rare = [table for table in RECORD["tables"] if table["positives"] < 0.11 * table["rows"]]
    assert len([table for table in rare if table["categories"] and table["missing_share"] > 0]) >= 4


@pytest.mark.parametrize("table", TABLES)
def test_federated_training_is_near_central_logistic_regression_and_above_single_sites(table: str) -> None:
    central = find_auc(table, "central-logistic")
    assert find_auc(table, "cycp-pairwise/tabular") > central - 0.01
    alone = max(find_auc(table, "sites-logistic"), find_auc(table, "sites-boosting"))
    assert all(find_auc(table, contender) > alone for contender in FEDERATED)


def test_the_claims_about_boosting_hold() -> None:
    gaps = {table: find_auc(table, "cycp-pairwise/tabular") - find_auc(table, "central-boosting") for table in TABLES}
    assert {table for table, gap in gaps.items() if gap < -0.01} == {"covid", "flights"}


@pytest.mark.parametrize("method", summary.DEFAULT_RATES)
def test_pooled_weighting_is_better_than_counting_all_sites_alike(method: str) -> None:
    entries = {
        entry["setting"]["weighting"]: entry["difference"]
        for entry in RECORD["settings"]
        if entry["contender"] == f"{method}/linear" and len(entry["setting"]) == 2
        if entry["setting"]["learning_rate"] == summary.DEFAULT_RATES[method]
    }
    assert 0.017 < entries["pooled"] - entries["clients"] < 0.0255
