"""What keeps a reader of the results from wrong conclusions: corrections, margins, withdrawn points, discarded runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedauc.metrics import auc
from fedauc.reports.summary import Spread
from paper.discarded_runs import DiscardedRuns, count_discarded, read_discarded
from paper.findings import (
    Comparison,
    correct_comparisons,
    describe_correction,
    judge_rounds,
    list_contrasts,
    make_contrast_frame,
)
from paper.records import Point, RecordStore
from paper.report import Report
from paper.scales import PAPER, SMOKE
from paper.significance import Difference, correct_p_values
from paper.table_specs import build_tables, cell_configs, list_cells
from paper.tables import Cell, TableBuilder
from paper.tuning import ChoiceStore, TuningChoice, TuningJob
from paper_records import by_default, keep, labelled, scored

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        # Four times .01, then three times .02; .03 and .04 would be .06 and .04, which must not fall below .06.
        ([0.04, 0.01, 0.03, 0.02], [0.06, 0.04, 0.06, 0.06]),
        ([0.6, 0.9], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holms_correction(p_values: list[float], corrected: list[float]) -> None:
    assert correct_p_values(p_values) == pytest.approx(corrected)


def compare(value: float, p_value: float | None, published: float | None = None) -> Comparison:
    """A comparison whose interval is .02 wide to each side."""
    test = None if p_value is None else Difference(value, 0.02, p_value)
    return Comparison(
        "table1", build_tables(PAPER)["table1"].columns[0], "cycp-minimax", "fedavg", value, test, published
    )


def test_a_correction_is_for_the_tests_that_were_made() -> None:
    """Two of three comparisons are tested: the smaller p-value is doubled."""
    pairs = correct_comparisons([compare(0.03, 0.03, 0.06), compare(0.03, None), compare(-0.03, 0.01)])
    assert [pair.corrected for pair in pairs] == [0.03, None, 0.02]
    assert str(pairs[0]) == "**+.0300 ± .0200** [+.0600], p = .030, corrected .030"
    assert [pair.corrected_outcome for pair in pairs] == ["significantly higher", "not tested", "significantly lower"]
    lost = correct_comparisons([compare(0.03, 0.03), compare(0.03, 0.04)])
    assert [pair.outcome for pair in lost] == ["significantly higher"] * 2
    assert [pair.corrected_outcome for pair in lost] == ["not significantly different"] * 2


def test_a_sentence_counts_the_corrected_p_values_of_its_table() -> None:
    """Its tests are named, whichever of them it is about; two tables are corrected one by one."""
    first = correct_comparisons([compare(0.03, 0.03), compare(0.03, 0.04), compare(0.03, None)])
    second = correct_comparisons([compare(-0.03, 0.02)._replace(table="noise")])
    assert describe_correction(first[:1]) == (
        "With Holm's correction for all 2 tests of Table 1, it is significantly better in 0 and significantly worse in "
        "0."
    )
    assert describe_correction([first[0], *second]) == (
        "With Holm's correction for all tests of the same table (2 tests of Table 1, 1 tests of the table `noise`), it "
        "is significantly better in 0 and significantly worse in 1."
    )
    assert describe_correction(first[2:]) == ""


def test_a_comparison_has_one_corrected_p_value_wherever_it_is_counted(tmp_path: Path) -> None:
    """The methods' difference is one of eleven tests, and is in the table alone."""
    store, labels = RecordStore(tmp_path), labelled(100, 100)
    for place, cell in enumerate(list_cells(build_tables(PAPER)["table1"].select(["cifar10"], []))):
        for config in by_default(store, cell, [0, 1, 2])[0]:
            scores = scored(labels, 1 + 0.1 * place, 10 * place + config.recipe.seed)
            keep(store, config, [auc(labels, scores)], (labels, scores))
    report = Report(store, PAPER, [0, 1, 2], ["table1"])
    counted, shown = report.compare_methods("table1"), report.compare_methods("table1", between_own=True)
    assert (len(counted), len(shown)) == (10, 11)
    assert [pair for pair in shown if pair not in counted] == shown[-1:]
    assert {pair.tests for pair in shown} == {11}


def test_rows_with_the_same_runs_are_not_tested(tmp_path: Path) -> None:
    """FedAvg has the same settings in `ours` and `grid`; its runs with another learning rate are others."""
    names = ["cycp-fedavg-ours", "cycp-fedavg-grid", "cycp-fedavg-averaging"]
    store, labels = RecordStore(tmp_path), labelled(100, 100)
    spec = build_tables(PAPER)["as-printed"].select(["cifar10"], names)
    for place, cell in enumerate(list_cells(spec)):
        settings = {"learning-rate": "0.01" if place == 2 else "0.1"}
        ChoiceStore(store, PAPER).add_choice(TuningJob.for_cell(cell), TuningChoice(settings, "none", 0))
        for config in cell_configs(PAPER, cell, settings, [0, 1, 2])[0]:
            scores = scored(labels, 1.0, 10 * (place == 2) + config.recipe.seed)
            keep(store, config, [auc(labels, scores)], (labels, scores))
    same, other = correct_comparisons(list(list_contrasts(TableBuilder(store, PAPER, [0, 1, 2]).build(spec))))
    assert (same.method, str(same), same.corrected) == ("cycp-fedavg-grid", "same runs", None)
    assert other.test is not None
    assert (other.tests, other.corrected) == (1, other.test.p_value)


def test_an_interval_excludes_the_papers_difference_or_not() -> None:
    assert compare(0.03, 0.5, 0.06).excludes_published
    assert compare(0.03, 0.5, -0.01).excludes_published
    assert not compare(0.03, 0.5, 0.045).excludes_published
    assert not compare(0.03, None, 0.06).excludes_published
    assert not compare(0.03, 0.5).excludes_published


def make_cell(aucs: list[float], deviation: float) -> Cell:
    """A cell whose mean curve has an evaluation every ten rounds."""
    curve = tuple(Point(cycle, 10 * (cycle + 1), 0, auc, None) for cycle, auc in enumerate(aucs))
    return Cell(3, 3, 0, {"auc": Spread(aucs[-1], deviation, 3)}, curve)


def test_a_value_that_did_not_train_withdraws_the_answer() -> None:
    series = {1: make_cell([0.5, 0.6, 0.8], 0.01), 50: make_cell([0.7, 0.75, 0.75], 0.01)}
    lines, holds = judge_rounds(series, "K")
    assert (lines[0]["rounds"], holds) == ("fall at every step", True)
    series[50] = make_cell([0.7, 0.75, 0.75], 0.08)
    withdrawn, holds = judge_rounds(series, "K")
    assert holds is None
    # The numbers stay; only what they say is withdrawn.
    assert withdrawn == [line | {"rounds": "withdrawn: K = 50 did not train"} for line in lines]


def test_a_point_that_did_not_train_is_named_below_its_figure(tmp_path: Path) -> None:
    store, seeds = RecordStore(tmp_path), [0, 1, 2]
    for cell in list_cells(build_tables(PAPER)["figure3"].select(["cifar10-K1", "cifar10-K50"], ["cycp-pairwise"])):
        for config in by_default(store, cell, seeds)[0]:
            spread = 0.1 * config.recipe.seed if cell.column.name == "cifar10-K50" else 0.0
            keep(store, config, [0.6, 0.7 - spread], None)
    text = " ".join(Report(store, PAPER, seeds, ["figure3"]).text.split())
    assert (
        "Withdrawn: cifar10-K50 (cycp-pairwise), whose AUC of .6000 ± .1000 varies by more than .05 over runs." in text
    )
    assert "Withdrawn: cifar10-K1" not in text


def test_discarded_runs_are_counted_from_a_file_beside_the_records() -> None:
    counts = read_discarded()
    assert sum(line.runs for line in counts) > 1000
    assert all(line.cycles >= line.runs > 0 for line in counts)
    assert len({(line.dataset, line.method) for line in counts}) == len(counts)
    # What the smoke scale has discarded is not known.
    assert Report(RecordStore(ROOT / "paper" / "records"), SMOKE, [0], ["table1"]).discarded == []


def test_a_discarded_run_is_one_that_no_record_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two former runs one is still recorded; the other was rewritten under another name, and counts once."""
    config = {"data": {"name": "cifar10"}, "recipe": {"method": "fedavg", "cycles": 4}}
    kept = {"config": config, "stopped": "", "seconds": 1.5, "curve": [[3, 4, 5, 0.6, 0.7]]}
    lost = kept | {"seconds": 2.5}
    renamed = lost | {"config": {"data": {"name": "cifar10", "folder": ""}, "recipe": config["recipe"]}}
    monkeypatch.setattr("paper.discarded_runs._read_former_runs", lambda: iter([kept, lost, renamed]))
    (tmp_path / "cifar10.jsonl").write_text(json.dumps(kept) + "\n")
    (tmp_path / "paper-choices.jsonl").write_text("{}\n")
    assert count_discarded(tmp_path) == [DiscardedRuns("cifar10", "fedavg", 1, 4, 2)]


def test_named_pairs_of_rows_are_compared_where_both_have_finished(tmp_path: Path) -> None:
    """CyCp-Minimax as printed has all of its three splits, and FedAvg once all, once two of them."""
    names = ["cycp-fedavg-as-printed", "cycp-minimax-as-printed"]
    spec = build_tables(PAPER)["as-printed"].select(["creditcard"], names)
    level = {"cycp-fedavg-as-printed": 0.7, "cycp-minimax-as-printed": 0.8}
    for finished, folder in ((3, "all"), (2, "some")):
        store = RecordStore(tmp_path / folder)
        for cell in list_cells(spec):
            count = finished if cell.row.name == names[0] else 3
            for (config,) in by_default(store, cell, [0])[:count]:
                keep(store, config, [level[cell.row.name]], None)
        contrasts = list(list_contrasts(TableBuilder(store, PAPER, [0]).build(spec)))
        assert [(pair.method, pair.baseline) for pair in contrasts] == [(names[1], names[0])] * (finished == 3)
        if contrasts:
            frame = make_contrast_frame(contrasts)
            assert frame.to_dict() == {"difference": {f"creditcard: {names[1]} minus {names[0]}": "+.1000, not tested"}}
