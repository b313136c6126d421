"""docs/methods.md shows the numbers of benchmarks/records/methods.json, which follow from the recorded runs."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text()
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "records" / "methods.json").read_text())
RUNS = [json.loads(line) for line in (ROOT / "benchmarks" / "records" / "methods.jsonl").read_text().splitlines()]

# The scripts import one another by name, as they do when they are run. Their folder does not stay on the path, where
# its files would hide folders of tests with the same names.
sys.path.insert(0, str(ROOT / "benchmarks"))
summary: Any = importlib.import_module("methods_summary")
record_maker: Any = importlib.import_module("methods_record")
statistics: Any = importlib.import_module("methods_statistics")
sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_shows_the_record() -> None:
    assert summary.update_page(PAGE, RECORD) == PAGE
    for block in summary.make_blocks(RECORD).values():
        assert block in PAGE


def test_the_record_follows_from_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    described = {problem["name"]: problem for problem in RECORD["problems"]}
    assert json.loads(json.dumps(record_maker.make_record(RUNS, described.__getitem__))) == RECORD


def test_every_contender_has_the_same_budget_on_at_least_twelve_problems() -> None:
    assert len(RECORD["problems"]) >= 12
    names = {problem["name"] for problem in RECORD["problems"]}
    counts = Counter((run["problem"], run["contender"], run["split"]) for run in RUNS if run["problem"] in names)
    # Four learning rates with two weightings on the tuning splits; on the others, what was chosen for the problem and
    # for all problems, which may be the same.
    assert {count for (_, _, split), count in counts.items() if split < 2} == {8}
    assert {count for (_, _, split), count in counts.items() if split > 1} <= {1, 2}
    assert len(counts) == 5 * len(names) * len(RECORD["contenders"])


def test_settings_are_chosen_on_the_validation_rows_of_the_tuning_splits() -> None:
    for entry in RECORD["results"][:: len(RECORD["contenders"]) + 1]:
        own = [run for run in RUNS if all(run[key] == entry[key] for key in ("problem", "contender"))]
        validation: Counter[str] = Counter()
        for run in own:
            validation[json.dumps(run["setting"])] += run["validation"] if run["split"] < 2 else 0
        assert validation[json.dumps(entry["setting"])] == max(validation.values())


def test_the_interval_over_splits_is_that_of_nadeau_and_bengio() -> None:
    values, overlap = np.array([0.01, 0.02, 0.015, -0.005, 0.03]), 0.5
    error = math.sqrt((1 / 5 + overlap) * np.sum((values - values.mean()) ** 2) / 4)
    difference = statistics.compare_splits(values, overlap)
    # 2.776 is the 97.5 % quantile of Student's t with four degrees of freedom.
    assert difference.mean == pytest.approx(values.mean())
    assert difference.high - difference.mean == pytest.approx(2.776 * error, rel=1e-3)
    assert statistics.compare_splits(values, 0.0).p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_the_critical_difference_is_that_of_demsar() -> None:
    """Demšar 2006, section 3.2.2: four classifiers on 14 datasets, 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25."""
    values = np.random.default_rng(0).normal(size=(14, 4))
    ranking = statistics.rank_contenders(values)
    assert ranking.critical_difference == pytest.approx(1.25, abs=0.005)
    assert sum(ranking.ranks) == pytest.approx(4 * 5 / 2)
    best_first = statistics.rank_contenders(np.tile([0.9, 0.8, 0.7], (6, 1)))
    assert best_first.ranks == [1, 2, 3]


def test_holm_multiplies_the_smallest_most() -> None:
    assert statistics.correct_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.correct_by_holm([0.5, 0.9]) == [1.0, 1.0]


def test_a_curve_reaches_its_target_at_the_first_round_above_it() -> None:
    run = {"curve": [[10, 0.7], [20, 0.8], [30, 0.75]]}
    assert record_maker.count_rounds_to_target(run, 0.75) == 20
    assert record_maker.count_rounds_to_target(run, 0.9) == math.inf


def find(metric: str, reference: str, contender: str) -> dict[str, Any]:
    found: dict[str, Any] = summary.find_comparison(RECORD, metric, reference, contender)
    return found


def test_the_claims_about_methods_hold() -> None:
    others = [name for name in RECORD["contenders"] if name != "cycp-fedavg"]
    assert all(-0.004 < find("auc", "cycp-fedavg", name)["mean"] < 0.005 for name in others)
    assert all(find("auc", "cycp-fedavg", name)["better_by_holm"] == 0 for name in others)
    gap = find("auc", "cycp-fedavg-balanced", "cycp-pairwise")
    assert abs(gap["mean"]) < 0.002
    assert gap["wilcoxon_holm_p"] == 1
    ranking = RECORD["ranks"]["auc"]
    limit = min(ranking["ranks"].values()) + ranking["critical_difference"]
    behind = {name for name, rank in ranking["ranks"].items() if rank > limit}
    assert behind == {"cycp-fedadam", "cycp-fedavg-logit-adjusted"}
    for problem in ("cifar-cat", "insurance"):
        for name in ("cycp-pairwise", "cycp-fedavg-balanced"):
            assert record_maker.find_result(RECORD, problem, name)["differences"]["cycp-fedavg"]["auc"][1] > 0


def test_pooled_weighting_is_better_with_every_method() -> None:
    entries = RECORD["weighting"]
    assert all(0.0075 < entry["mean"] < 0.0125 for entry in entries)
    assert max(entry["p"] for entry in entries) < 0.0085
    assert max(statistics.correct_by_holm([entry["p"] for entry in entries])) < 0.05


def test_the_best_ranks_of_average_precision_are_those_of_fedavg() -> None:
    ranks = RECORD["ranks"]["ap"]["ranks"]
    assert set(sorted(ranks, key=ranks.__getitem__)[:3]) == {"cycp-fedavg", "a-fedavg", "cycp-fedavg-balanced"}


@pytest.mark.parametrize(
    ("contender", "low", "high"),
    [("cycp-fedavg-balanced", 0.970, 0.920), ("cycp-pairwise", 0.970, 0.949), ("cycp-fedavg", 0.963, 0.949)],
)
def test_wrong_labels_ask_for_a_low_learning_rate(contender: str, low: float, high: float) -> None:
    for rate, expected in ((0.003, low), (1.0, high)):
        setting = {"learning_rate": rate, "weighting": "pooled"}
        chosen = {"problem": "noisy-negatives", "contender": contender, "setting": setting}
        runs = [run for run in RUNS if run["split"] < 2 and all(run[key] == chosen[key] for key in chosen)]
        assert np.mean([run["auc"] for run in runs]) == pytest.approx(expected, abs=0.0006)
