"""What keeps a reader of the results from wrong conclusions: corrections, margins, withdrawn points, discarded runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedauc.reports.summary import Spread
from paper.discarded_runs import DiscardedRuns, count_discarded, read_discarded
from paper.findings import Comparison, correct_comparisons, judge_rounds, list_contrasts, make_contrast_frame
from paper.records import Point, RecordStore
from paper.report import Report
from paper.scales import PAPER, SMOKE
from paper.significance import Difference, correct_p_values
from paper.table_specs import build_tables, list_cells
from paper.tables import Cell, TableBuilder
from paper_records import by_default, keep

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
