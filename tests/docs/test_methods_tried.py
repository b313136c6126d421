"""docs/methods.md shows what the recorded runs say about ideas beyond the paper."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
PAGE = (ROOT / "docs" / "methods.md").read_text()

sys.path.insert(0, str(ROOT / "benchmarks"))
tried: Any = importlib.import_module("methods_tried")
record_maker: Any = importlib.import_module("methods_record")
sys.path.remove(str(ROOT / "benchmarks"))

RUNS = tried.read_runs(RECORDS / "methods.jsonl")
TRIED = tried.read_runs(RECORDS / tried.TRIED)


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_page_shows_the_tables() -> None:
    for name, block in tried.make_blocks(RECORDS).items():
        assert f"<!-- begin {name} -->\n\n{block}\n\n<!-- end -->" in PAGE


def test_candidates_had_the_budget_of_the_contenders() -> None:
    measured = [run for run in TRIED if not run.get("prototype")]
    counts = Counter((run["contender"], run["problem"], run["split"]) for run in measured)
    assert {name for name, _, _ in counts} == {*tried.list_candidates(), *tried.list_constant()}
    for (_, _, split), count in counts.items():
        assert count == (8 if split < 2 else 1)


def test_pairwise_with_momentum_is_below_no_baseline_in_auc() -> None:
    """Computed once more without the statistics of the benchmark: Student's quantile for 4 degrees is 2.776."""
    chosen, _ = record_maker.collect_chosen_runs(RUNS)
    problems, contenders = record_maker.choose_complete(chosen)
    baselines = tried.list_baselines(contenders)
    assert (len(problems), len(baselines)) == (22, 9)
    below = above = 0
    for baseline in baselines:
        for problem in problems:
            own, rival = chosen[problem, tried.MOMENTUM], chosen[problem, baseline]
            values = np.array([a["auc"] - b["auc"] for a, b in zip(own, rival, strict=True)])
            width = 2.7764451 * np.sqrt((1 / 5 + own[0]["overlap"]) * values.var(ddof=1))
            below += values.mean() + width < 0
            above += values.mean() - width > 0
    assert (above, below) == (23, 0)
    counts = tried.count_all_comparisons(chosen)
    assert counts[tried.MOMENTUM, "auc"][:3] == (198, 23, 0)
    assert counts["cycp-pairwise + average", "auc"] == (198, 25, 1, 1, 0)
    assert counts["cycp-fedavg-balanced", "auc"][1:3] == (25, 4)
    assert [counts[tried.MOMENTUM, metric][2::2] for metric in ("ap", "pauc")] == [(26, 2), (25, 2)]


def collect_all_runs() -> tuple[dict[tuple[str, str], Any], list[str], list[str]]:
    """The chosen runs of contenders and candidates, the problems, and the baselines."""
    chosen, _ = record_maker.collect_chosen_runs([*RUNS, *(run for run in TRIED if not run.get("prototype"))])
    return chosen, list(dict.fromkeys(p for p, _ in chosen)), tried.list_baselines(tried.list_contenders())


@pytest.mark.parametrize(
    ("name", "above", "below", "mean_below", "reaches_below"),
    [
        (tried.MOMENTUM, 23, 0, 57, 81),
        ("a-scaffold + balanced", 29, 0, 69, 73),
        ("cycp-fedavg-balanced + momentum", 28, 1, 61, 63),
        ("cycp-local-pairs", 14, 33, 96, 120),
        ("cycp-partial-auc", 21, 9, 102, 102),
    ],
)
def test_no_interval_below_zero_does_not_mean_never_worse(
    name: str, above: int, below: int, mean_below: int, reaches_below: int
) -> None:
    chosen, problems, baselines = collect_all_runs()
    pairs = [(name, baseline) for baseline in baselines if baseline != name]
    differences = [d for pair in pairs for d in tried.compare_pair(chosen, problems, pair, "auc")]
    assert len(differences) == 198
    assert sum(d.low > 0 for d in differences) == above
    assert sum(d.high < 0 for d in differences) == below
    assert sum(d.mean < 0 for d in differences) == mean_below
    assert sum(d.low < -0.01 for d in differences) == reaches_below


def test_momentum_does_as_much_without_auc_training() -> None:
    chosen, problems, _ = collect_all_runs()
    pair = ("cycp-fedavg-balanced + momentum", tried.MOMENTUM)
    means = dict(zip(problems, (d.mean for d in tried.compare_pair(chosen, problems, pair, "auc")), strict=True))
    assert np.mean(list(means.values())) == pytest.approx(-0.0020, abs=5e-5)
    assert sum(value > 0 for value in means.values()) == 11
    others = [value for problem, value in means.items() if not problem.startswith("noisy-")]
    assert np.mean(others) == pytest.approx(0, abs=5e-5)


def test_local_pairs_learn_nothing_from_clients_of_one_class() -> None:
    chosen, problems, _ = collect_all_runs()
    assert [run["auc"] for run in chosen["one-class-clients", "cycp-local-pairs"]] == [0.5] * 5
    rest = [problem for problem in problems if problem != "one-class-clients"]
    for reference, expected in (("cycp-pairwise", -0.0025), ("cycp-fedavg-balanced", -0.0009), ("cycp-fedavg", 0.0017)):
        differences = tried.compare_pair(chosen, rest, ("cycp-local-pairs", reference), "auc")
        assert np.mean([d.mean for d in differences]) == pytest.approx(expected, abs=5e-5)


def test_it_is_better_than_balanced_fedavg_on_no_problem() -> None:
    chosen, _ = record_maker.collect_chosen_runs(RUNS)
    problems, _ = record_maker.choose_complete(chosen)
    counts = tried.count_comparisons(chosen, problems, tried.MOMENTUM, ["cycp-fedavg-balanced"], "auc")
    assert counts == (22, 0, 0, 0, 0)


def test_a_prototype_is_compared_at_its_own_best_learning_rate() -> None:
    def make_run(contender: str, rate: float, validation: float, auc: float, **more: Any) -> dict[str, Any]:
        setting = {"learning_rate": rate, "weighting": "pooled"}
        return {"problem": "p", "contender": contender, "setting": setting, "split": 0} | {
            "validation": validation,
            "auc": auc,
            **more,
        }

    reference = [make_run("old", 0.1, 0.8, 0.70), make_run("old", 1.0, 0.7, 0.99)]
    more = {"prototype": True, "reference": "old", "reference_weighting": "pooled"}
    prototype = [make_run("new", 0.1, 0.6, 0.90, **more), make_run("new", 1.0, 0.9, 0.75, **more)]
    table = tried.compare_prototypes(reference, prototype)
    # The highest validation AUCs are .8 and .9, whose test AUCs are .70 and .75.
    assert table == {("new", "pooled"): {"p": pytest.approx(0.05)}}
