"""Tables from records: the paper's numbers, DeLong marks, and the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm, t

from cli_helpers import paper_command
from fedauc.metrics import auc, delong_test
from fedauc.reports.summary import Spread
from fedauc.reports.tables import format_share
from paper.findings import make_class_frame
from paper.records import Point, Ranks, RecordStore, read_json_lines
from paper.scales import PAPER, SMOKE
from paper.significance import Case, Difference, PairShares, compare_rows, compute_pair_shares
from paper.table_specs import METHODS, TABLES, build_tables, list_cells
from paper.tables import (
    Cell,
    TableBuilder,
    format_auc,
    format_rounds,
    make_frame,
    mark_rows,
    published_aucs,
)
from paper_records import by_default, keep, labelled, scored

# --------------------------------------------------------------------------------------------------- published numbers


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4", "table5", "table8", "table9"])
def test_every_usual_cell_of_the_papers_tables_has_its_number(name: str) -> None:
    sheet = build_tables(PAPER)[name].select([], [])
    assert set(published_aucs(name)) == {(row.name, column.name) for row in sheet.rows for column in sheet.columns}


def test_numbers_stand_where_the_paper_prints_them() -> None:
    """One number of each row and of each table."""
    first = [published_aucs("table1")[method, "insurance"].mean for method in METHODS]
    assert first == [0.7339, 0.7384, 0.7412, 0.7419, 0.7619, 0.7616, 0.7778]
    assert published_aucs("table2")["rs-pairwise", "insurance"] == (0.7173, 0.0043, 3)
    assert published_aucs("table3")["cycp-minimax", "dir10-flip0"] == (0.8702, 0.0023, 3)
    assert published_aucs("table4")["a-scaffold", "dir0.1-flip0.2"] == (0.8906, 0.0015, 3)
    assert published_aucs("table5")["cycp-pairwise", "dir10-flip0.2"] == (0.6356, 0.0023, 3)
    assert published_aucs("table8")["cycp-fedavg", "cifar100-50"] == (0.8817, 0.0020, 3)
    assert published_aucs("table9")["cycp-fedavg", "cifar10"] == (0.8083, 0.0175, 3)
    assert published_aucs("figure1") == {}


# ----------------------------------------------------------------------------------------------------------- the tests


def make_ranks(labels: np.ndarray, seed: int, skill: float, levels: int = 40) -> Ranks:
    """Scores in so many levels, hence with ties, that rank positives higher by `skill` standard deviations."""
    scores = np.random.default_rng(seed).normal(size=len(labels)) + skill * labels
    return Ranks(labels, np.digitize(scores, np.linspace(-3, 4, levels)).astype(np.uint16))


LABELS = (np.arange(120) % 4 == 0).astype(np.uint8)


def shares_of(seeds: Iterable[int], skill: float, labels: np.ndarray = LABELS) -> list[PairShares]:
    return [compute_pair_shares(make_ranks(labels, seed, skill)) for seed in seeds]


def p_value(
    ours: Sequence[Case], theirs: Sequence[Case], overlap: float = 0.0, same_examples: bool = False
) -> float | None:
    """The p-value of a comparison, whose interval contains 0 if and only if it is not significant."""
    difference = compare_rows(ours, theirs, overlap, same_examples)
    if difference is None:
        return None
    assert (abs(difference.value) > difference.half_width) == (difference.p_value < 0.05)
    return difference.p_value


def test_one_run_each_is_the_paired_delong_test() -> None:
    one, two = make_ranks(LABELS, 0, 1.0), make_ranks(LABELS, 1, 0.6)
    joint = p_value([[compute_pair_shares(one)]], [[compute_pair_shares(two)]])
    assert joint == pytest.approx(delong_test(LABELS, one.ranks, two.ranks).p_value, rel=1e-12)
    assert compute_pair_shares(one).auc == pytest.approx(auc(LABELS, one.ranks), rel=1e-12)


def test_several_runs_are_tested_by_their_mean() -> None:
    """A twin from all pairs: the deviation of the rows' mean wins, and that of the mean over seeds, by scipy's t."""
    ours, theirs = (
        [make_ranks(LABELS, seed, 1.0) for seed in range(3)],
        [make_ranks(LABELS, seed + 9, 0.7) for seed in range(2)],
    )
    matrices, seeds = [], []
    for group in (ours, theirs):
        pairs = [np.sign(run.ranks[LABELS == 1, None] - run.ranks[None, LABELS == 0].astype(int)) for run in group]
        shares = [(pair + 1) / 2 for pair in pairs]
        matrices.append(np.mean(shares, axis=0))
        seeds.append(np.var([share.mean() for share in shares], ddof=1) / len(group))
    gain = matrices[0] - matrices[1]
    total = sum(gain.mean(axis=axis).var(ddof=1) / gain.shape[1 - axis] for axis in (0, 1)) + sum(seeds)
    # Three runs have two degrees of freedom, two have one.
    freedom = total**2 / (seeds[0] ** 2 / 2 + seeds[1] ** 2 / 1)
    twin = 2 * t.sf(abs(gain.mean()) / math.sqrt(total), freedom)
    mine, other = list(map(compute_pair_shares, ours)), list(map(compute_pair_shares, theirs))
    assert p_value([mine], [other]) == pytest.approx(twin, rel=1e-5)


def test_draws_of_the_data_on_one_test_part_are_paired() -> None:
    """Two seeds in each of three draws: the draws' differences count, with two degrees of freedom, not six runs."""
    ours, theirs = (
        [shares_of((9 * draw + 3 * who, 9 * draw + 3 * who + 1), 1.0) for draw in range(3)] for who in (0, 1)
    )
    drawn = [
        np.mean([a.auc for a in one]) - np.mean([b.auc for b in two]) for one, two in zip(ours, theirs, strict=True)
    ]
    first, second = ([run for case in row for run in case] for row in (ours, theirs))
    known = 0.0
    for part in ("positives", "negatives"):
        gain = np.mean([getattr(run, part) for run in first], 0) - np.mean([getattr(run, part) for run in second], 0)
        known += gain.var(ddof=1) / len(gain)
    spread = np.var(drawn, ddof=1) / 3
    freedom = (known + spread) ** 2 / (spread**2 / 2)
    twin = 2 * t.sf(abs(np.mean(drawn)) / math.sqrt(known + spread), freedom)
    assert p_value(ours, theirs) == pytest.approx(twin, rel=1e-5)


def test_splits_that_disagree_are_not_significant() -> None:
    """Three test parts with one run each, all examples ten times: each part is significant, but one the other way.

    The twin is the t-test over splits; where parts share .3 of their rows they vary less by 1 - .3, their mean more by
    1 + .6.
    """
    parts = [np.roll(np.tile(LABELS, 10), shift) for shift in range(3)]
    ours = [
        shares_of((shift,), skill, part) for shift, (part, skill) in enumerate(zip(parts, (2.0, 1.6, 0.6), strict=True))
    ]
    theirs = [shares_of((shift + 5,), 1.0, part) for shift, part in enumerate(parts)]
    drawn = [one[0].auc - two[0].auc for one, two in zip(ours, theirs, strict=True)]
    for overlap in (0.0, 0.3):
        error = np.std(drawn, ddof=1) * math.sqrt((1 + 2 * overlap) / (1 - overlap) / 3)
        p = p_value(ours, theirs, overlap)
        assert p == pytest.approx(2 * t.sf(abs(np.mean(drawn)) / error, 2), rel=1e-5)
        assert p is not None
        assert p > 0.05


def test_one_rows_part_in_every_case_is_known_where_cases_have_the_same_rows() -> None:
    """The same images under five labels: the squares of what each adds to the mean difference sum up to its variance.

    The second method's scores are the first's with noise, so that the cases' differences agree and rows decide.
    """
    labels = [(np.arange(400) % 5 == label).astype(np.uint8) for label in range(5)]
    ours = [shares_of((label,), 1.0, each) for label, each in enumerate(labels)]
    theirs = [shares_of((label + 50,), 0.98, each) for label, each in enumerate(labels)]
    added = np.zeros(400)
    for one, two, each in zip(ours, theirs, labels, strict=True):
        for label, part in ((1, "positives"), (0, "negatives")):
            gain = getattr(one[0], part) - getattr(two[0], part)
            added[each == label] += (gain - gain.mean()) / len(gain) / 5
    drawn = [one[0].auc - two[0].auc for one, two in zip(ours, theirs, strict=True)]
    rows = 2 * norm.sf(abs(np.mean(drawn)) / math.sqrt((added**2).sum()))
    over = 2 * t.sf(abs(np.mean(drawn)) / np.std(drawn, ddof=1) * math.sqrt(5), 4)
    assert p_value(ours, theirs, same_examples=True) == pytest.approx(max(rows, over), rel=1e-5)
    assert rows != pytest.approx(p_value(ours, theirs), rel=1e-3)


def test_no_difference_is_seldom_found_where_there_is_none() -> None:
    """Card fraud's case: one run in each of five splits, with training noise that the test rows know nothing of.

    200 pairs of rows of the same skill; at 5 % about 10 are significant, 20 are three deviations more.
    """
    rng = np.random.default_rng(0)
    parts = [np.roll(np.tile(LABELS, 10), shift) for shift in range(4)]
    significant = 0
    for trial in range(200):
        skills = rng.normal(1.0, 0.3, size=(2, 4))
        rows = [
            [shares_of((trial * 8 + who * 4 + case,), skills[who, case], part) for case, part in enumerate(parts)]
            for who in (0, 1)
        ]
        significant += (p_value(rows[0], rows[1]) or 0.0) < 0.05
    assert significant < 20


def test_runs_that_differ_by_seed_as_much_as_from_others_are_not_significant() -> None:
    """Ten times the rows, so that skills 1.5 and 1 differ significantly; but not if seeds have 3, 1.5 and 0."""
    labels = np.tile(LABELS, 10)
    steady, unsteady = (
        shares_of((0, 1, 2), 1.5, labels),
        [shares_of((seed,), skill, labels)[0] for seed, skill in enumerate((3, 1.5, 0))],
    )
    other = shares_of((7, 8, 9), 1.0, labels)
    small, large = p_value([steady], [other]), p_value([unsteady], [other])
    assert small is not None
    assert large is not None
    assert small < 0.001
    assert large > 0.3


def test_cases_with_other_labels_add_their_variances() -> None:
    """Twice the same difference with the same error: the mean's error is smaller by √2, less so where parts overlap."""
    other = LABELS[::-1].copy()
    one, two = make_ranks(LABELS, 0, 1.0), make_ranks(LABELS, 1, 0.8)
    flipped = [compute_pair_shares(Ranks(other, each.ranks[::-1])) for each in (one, two)]
    single = delong_test(LABELS, one.ranks, two.ranks)
    cases = [[compute_pair_shares(one)], [flipped[0]]], [[compute_pair_shares(two)], [flipped[1]]]
    assert p_value(*cases) == pytest.approx(math.erfc(abs(single.z)), rel=1e-9)
    assert p_value(*cases, overlap=0.3) == pytest.approx(math.erfc(abs(single.z) / math.sqrt(1.3)), rel=1e-9)


def test_the_same_scores_do_not_differ_and_other_examples_are_not_compared() -> None:
    one = make_ranks(LABELS, 0, 1.0)
    assert p_value([[compute_pair_shares(one)]], [[compute_pair_shares(one)]]) == 1.0
    assert p_value([[compute_pair_shares(one)]], [[compute_pair_shares(one._replace(labels=1 - LABELS))]]) is None


def test_two_rows_without_an_error_are_not_certain_to_be_equal() -> None:
    """Each ranks 50 positives above 50 negatives, which says little about others: the variance is 1 / 50, not 0."""
    labels = np.repeat(np.array([1, 0], dtype=np.uint8), 50)
    one = [[compute_pair_shares(make_ranks(labels, seed, 100.0))] for seed in (0, 1)]
    difference = compare_rows(one[:1], one[1:])
    assert difference is not None
    assert (difference.value, difference.p_value) == (0, 1)
    assert difference.half_width == pytest.approx(1.96 / math.sqrt(50), rel=1e-3)


@pytest.mark.parametrize("positives", [19, 20])
def test_a_test_needs_twenty_positives(positives: int) -> None:
    labels = (np.arange(200) < positives).astype(np.uint8)
    assert (p_value([shares_of((0,), 1.0, labels)], [shares_of((1,), 1.0, labels)]) is None) == (positives < 20)


# ------------------------------------------------------------------------------------------------------------ the cells


def test_cells_show_mean_spread_mark_and_the_papers_number() -> None:
    published = published_aucs("table1")["cycp-pairwise", "cifar10"]
    cell = Cell(expected=3, finished=3, stopped=0, numbers={"auc": Spread(0.911, 0.0012, 3)}, published=published)
    assert format_auc(replace(cell, mark="*")) == ".9110 ± .0012* [.8480]"
    assert format_auc(replace(cell, mark="~")) == ".9110 ± .0012~ [.8480]"
    assert format_auc(replace(cell, mark="?")) == ".9110 ± .0012? [.8480]"
    assert format_auc(cell) == ".9110 ± .0012 [.8480]"
    single = replace(cell, numbers={"auc": Spread(0.911, 0.0, 1)}, finished=1, stopped=1)
    assert format_auc(single) == ".9110 (1 of 3, 1 stopped) [.8480]"
    assert format_auc(replace(cell, finished=0, stopped=3, numbers={})) == "stopped 3 of 3 [.8480]"


def test_marks_say_how_rows_compare_with_the_best() -> None:
    different, alike = Difference(0.1, 0.05, 0.01), Difference(0.1, 0.2, 0.2)
    tests = {"best": None, "lower": different, "alike": alike, "untested": None}
    assert mark_rows(tests, "best") == {"best": "*", "lower": "", "alike": "~", "untested": "?"}
    # Nothing was tested: there are no marks.
    assert mark_rows({"best": None, "other": None}, "best") == {}


def test_rounds_are_shown_with_their_ratio_to_the_first_rows() -> None:
    """The first row is at .9 after 300 rounds, in its second evaluation; the other one after 120."""

    def reaches(*points: tuple[int, int, float]) -> Cell:
        curve = tuple(Point(0, rounds, sent, auc, None) for rounds, sent, auc in points)
        return Cell(expected=3, finished=3, stopped=0, numbers={"auc": Spread(0.911, 0.0012, 3)}, curve=curve)

    first = reaches((60, 1, 0.5), (300, 8_000_000_000, 0.9))
    cell = reaches((60, 1, 0.5), (120, 3_200_000_000, 0.91))
    assert format_rounds(cell, first, None) == "-"
    assert format_rounds(cell, first, 0.9) == "120 (0.40), 3.2 GB"
    assert format_rounds(first, first, 0.9) == "300 (1.00), 8 GB"
    assert format_rounds(reaches((120, 3_200_000_000, 0.91)), first, 0.9) == "≤ 120 (0.40), 3.2 GB"
    assert format_rounds(reaches((120, 1, 0.8)), first, 0.9) == "not reached"
    assert format_rounds(replace(cell, finished=1), first, 0.9) == "1 of 3 runs"


def test_without_records_the_papers_numbers_stand_alone(tmp_path: Path) -> None:
    spec = build_tables(PAPER)["table1"].select(["cifar10"], ["cycp-fedavg"])
    frame = make_frame(TableBuilder(RecordStore(tmp_path), PAPER, [0, 1, 2]).build(spec))
    assert frame.to_dict() == {"cifar10": {"cycp-fedavg": "- [.7836]"}}


# ----------------------------------------------------------------------------------------------------- the command line

SMOKED = ("--scale", "smoke", "--columns", "cifar10", "--tuning", "steps:36")


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FEDAUC_RECORDS", raising=False)
    return tmp_path


def test_a_table_runs_resumes_and_prints_the_same(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("table1", *SMOKED, "--methods", "cycp-fedavg,cycp-pairwise", "--seeds", "0,1")
    first = paper_command(capsys, *asked)
    assert first.code == 0, first.err
    files = {path: path.stat().st_mtime_ns for path in (inside / "paper" / "records").rglob("*.jsonl")}
    sheet = build_tables(SMOKE)["table1"].select(["cifar10"], ["cycp-fedavg", "cycp-pairwise"])
    store = RecordStore(inside / "paper" / "records")
    table = TableBuilder(store, SMOKE, [0, 1]).build(sheet)
    assert [row for row, _ in table.cells] == ["cycp-fedavg", "cycp-pairwise"]
    for (row, _), cell in table.cells.items():
        assert cell.auc is not None
        line = next(line for line in first.out.splitlines() if line.startswith(row))
        assert f"{cell.auc.mean:.4f}".removeprefix("0") in line
        assert "[" not in line, "smoke results do not stand beside the paper's"
    assert first.out.count("*") == 2, "one best row, and the legend"
    again = paper_command(capsys, *asked)
    assert again.out == first.out
    # With a third seed each of the two rows needs one more run; the five rows that were not named have no record.
    missing = (
        "missing",
        "table1",
        "--scale",
        "smoke",
        "--columns",
        "cifar10",
        "--methods",
        "cycp-fedavg,cycp-pairwise",
    )
    for seeds, count in (("0,1", 0), ("0,1,2", 2)):
        listed = paper_command(capsys, *missing, "--seeds", seeds)
        assert f"{count} runs are missing" in listed.out
        assert ("table1" in listed.out) == bool(count)
    assert paper_command(capsys, *missing[:-2], "--seeds", "0").out.splitlines()[-2].split()[2:5] == ["7", "5", "5"]
    assert {path: path.stat().st_mtime_ns for path in (inside / "paper" / "records").rglob("*.jsonl")} == files


def test_a_table_out_of_time_says_so_and_goes_on(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("run", "table2", *SMOKED, "--methods", "cycp-fedavg", "--seeds", "0")
    late = paper_command(capsys, *asked, "--budget-minutes", "1e-6")
    assert late.code == 0
    assert "stopped after 1e-06 minutes; go on by the same command" in late.out
    told = paper_command(capsys, *asked).out
    assert "stopped after" not in told
    assert any(line.startswith("cycp-fedavg  .") for line in told.splitlines())


def test_a_figure_and_the_traffic_table_come_from_records(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scale", "smoke", "--seeds", "0", "--tuning", "none")
    figure = paper_command(capsys, "figure1", *options, "--columns", "cifar10-I1,cifar10-I3")
    assert figure.code == 0, figure.err
    assert (inside / "paper" / "records" / "figures" / "smoke-figure1.png").read_bytes().startswith(b"\x89PNG")
    (inside / "paper" / "records" / "figures" / "smoke-figure1.png").unlink()
    with monkeypatch.context() as sealed:
        # What cannot be written is shown without its curves.
        sealed.setattr("fedauc.data.io.stored.os.access", lambda path, mode: False)
        shown = paper_command(capsys, "show", "figure1", *options[:4], "--columns", "cifar10-I1,cifar10-I3")
    assert (shown.code, "Curves" in figure.out, "Curves" in shown.out) == (0, True, False)
    assert not list((inside / "paper" / "records" / "figures").iterdir())
    told = paper_command(capsys, "traffic", *options, "--columns", "cifar10", "--methods", "cycp-fedavg,cycp-minimax")
    store, sheet = (
        RecordStore(inside / "paper" / "records"),
        build_tables(SMOKE)["traffic"].select(["cifar10"], ["cycp-fedavg"]),
    )
    table = TableBuilder(store, SMOKE, [0]).build(sheet)
    (cell,) = table.cells.values()
    reach = cell.find_reach(table.find_target("cifar10"))
    assert reach is not None
    # FedAvg reaches its own last AUC in its last round of twelve, or before.
    assert reach.rounds <= 12
    rounds = f"{'≤ ' if reach is cell.curve[0] else ''}{reach.rounds}"
    assert any(line.split("cycp-fedavg")[-1].strip().startswith(f"{rounds} (1.00), ") for line in told.out.splitlines())


def test_the_report_is_made_from_records_alone(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("report", "--scale", "smoke", "--seeds", "0", "--tables", "table2,classes")
    # A page from another folder is not overwritten by an empty one.
    told = paper_command(capsys, *asked)
    assert (told.code, list(inside.iterdir())) == (2, [])
    assert (
        told.err == "error: paper/records has no records: name their folder in FEDAUC_RECORDS, or run a table first\n"
    )
    paper_command(capsys, "classes", *SMOKED, "--methods", "cycp-fedavg,cycp-minimax", "--seeds", "0")
    told = paper_command(capsys, *asked[:-1], "table2")
    assert told.code == 2
    missing = "no run of table2 at scale smoke has finished in paper/records: docs/smoke.md is as it was"
    assert (told.err, (inside / "docs").exists()) == (f"error: {missing}\n", False)
    # The smoke scale's page does not take the place of the paper's.
    assert paper_command(capsys, *asked).out.startswith("wrote docs/smoke.md")
    assert paper_command(capsys, *asked, "--out", "page.md").code == 0
    page = (inside / "page.md").read_text()
    assert "`classes` repeats Table 1 for classes 0 to 4 and shows the mean:" in page
    assert "Label noise" not in page
    # What it says of the paper's scale is not true of this one.
    assert "the settings that Table 1 tuned for" not in page
    choices = read_json_lines(inside / "paper" / "records" / "smoke-choices.jsonl", dict)
    (choice,) = [content for content in choices if content["job"] == "cifar10-cycp-minimax"]
    chosen = ", ".join(f"{key} {value}" for key, value in choice["settings"].items())
    # 9 candidates for 2 cycles, then 3 for 6.
    assert f"| cifar10 | cycp-minimax | {chosen} | steps | 9 | 12 | 36 |" in page
    # Two rows on five data seeds.
    assert "<summary>10 runs, " in page
    sheet = build_tables(SMOKE)["classes"].select(["cifar10"], ["cycp-fedavg", "cycp-minimax"])
    store = RecordStore(inside / "paper" / "records")
    for cell in list_cells(sheet):
        aucs = [
            known.auc
            for (case,) in TableBuilder(store, SMOKE, [0]).list_configs(cell)
            if (known := store.find_record(case))
        ]
        assert len(aucs) == 5
        assert f"| {cell.row.name} | {format_share(float(np.mean(np.array(aucs, float))), 4)}" in page


def test_a_table_is_shown_from_records_alone(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows tuned in two ways, which is said; of rows that have not run there is nothing to show."""
    for row, tuning in (("cycp-fedavg", "steps:9"), ("cycp-minimax", "none")):
        paper_command(capsys, "table1", *SMOKED[:4], "--tuning", tuning, "--methods", row, "--seeds", "0")
    files = sorted((inside / "paper" / "records").rglob("*"))
    told = paper_command(capsys, "show", "table1", *SMOKED[:4], "--seeds", "0")
    assert told.code == 0, told.err
    shown = {line.split()[0]: line.split()[1] for line in told.out.splitlines() if line.startswith(("cycp-", "rs-"))}
    assert shown.keys() == {"cycp-fedavg", "cycp-minimax", "cycp-pairwise", "rs-minimax", "rs-pairwise"}
    assert shown["rs-pairwise"] == shown["cycp-pairwise"] == "-"
    assert shown["cycp-fedavg"].startswith(".")
    assert "Rows of cifar10 were tuned differently: cycp-fedavg tuned with steps:9; cycp-minimax not tuned." in told.out
    assert sorted((inside / "paper" / "records").rglob("*")) == files


def test_numbers_beside_auc_are_printed_too(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--scale", "smoke", "--methods", "cycp-fedavg", "--tuning", "none")
    told = paper_command(capsys, "creditcard", *options, "--columns", "creditcard").out
    assert "\nAverage precision\n" in told
    # There is no number of the paper's to be explained.
    assert "in brackets" not in told
    told = paper_command(capsys, "schedules", "--scale", "smoke", "--methods", "cycp-fedavg-0.1").out
    assert "\nValidation AUC\n" in told


def test_data_that_is_not_there_hides_no_record(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-10 has run; ChestMNIST is not there."""
    monkeypatch.setenv("FEDAUC_DATA", str(inside / "nothing"))
    store = RecordStore(inside / "paper" / "records")
    for cell in list_cells(build_tables(PAPER)["table1"].select(["cifar10"], ["cycp-fedavg"])):
        for config in by_default(store, cell, [0])[0]:
            keep(store, config, [0.9], (labelled(30, 30), scored(labelled(30, 30), 1.0, 0)))
    asked = ("--columns", "cifar10,chestmnist", "--methods", "cycp-fedavg", "--seeds", "0", "--tuning", "none")
    told = paper_command(capsys, "table1", *asked)
    assert told.code == 2
    assert told.err.startswith("error: chestmnist needs chestmnist.npz")
    assert told.err.endswith("; or name columns whose data is there: --columns\n")
    assert ".9000" in told.out
    # A long address is not broken: it is to be copied.
    counts = paper_command(capsys, "table7", "--columns", "chestmnist").out
    assert counts.splitlines()[1].split() == ["chestmnist", "-", "missing"]
    assert counts.splitlines()[-1].endswith("https://zenodo.org/records/10519652/files/chestmnist.npz?download=1")


def test_a_folder_that_cannot_hold_records_is_named_before_anything_runs(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (inside / "file").write_text("")
    monkeypatch.setenv("FEDAUC_RECORDS", str(inside / "file" / "results"))
    told = paper_command(capsys, "table1", *SMOKED, "--methods", "cycp-fedavg")
    assert told.code == 2
    where = inside / "file" / "results"
    remedy = "name another folder for records in FEDAUC_RECORDS, or look at these with `python -m paper show`"
    assert told.err == f"error: {where} cannot be written: {remedy}\n"
    assert [path.name for path in inside.iterdir()] == ["file"]


def test_help_breaks_lines_only_where_the_terminal_does(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns no line of a paragraph but its last ends before the next word would."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = paper_command(capsys, "table1", "--help").out.splitlines()
    start = next(place for place, line in enumerate(shown) if "100 cycles of 10 groups" in line)
    end = next(place for place in range(start, len(shown)) if not shown[place].strip())
    for line, after in pairwise(shown[start:end]):
        assert len(f"{line.rstrip()} {after.split()[0]}") > 79


def test_an_unfinished_row_is_never_the_best(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both rows have seed 0, only one has seed 1."""
    options = ("--scale", "smoke", "--columns", "cifar10", "--tuning", "none")
    for row, seeds in (("cycp-fedavg", "0"), ("cycp-minimax", "0,1")):
        paper_command(capsys, "table1", *options, "--methods", row, "--seeds", seeds)
    sheet = build_tables(SMOKE)["table1"].select(["cifar10"], ["cycp-fedavg", "cycp-minimax"])
    for ran, whole in (([0], 2), ([0, 1], 1)):
        cells_built = TableBuilder(RecordStore(inside / "paper" / "records"), SMOKE, ran).build(sheet).cells.values()
        assert [cell.finished == cell.expected for cell in cells_built].count(True) == whole
        (best,) = [cell for cell in cells_built if cell.best]
        others = [cell for cell in cells_built if not cell.best and cell.finished == cell.expected]
        assert best.finished == best.expected
        assert all(best.auc and cell.auc and best.auc.mean >= cell.auc.mean for cell in others)


def test_the_list_and_the_counts_run_nothing(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = paper_command(capsys, "list").out
    assert all(name in listed for name in (*TABLES, "table7"))
    counted = paper_command(capsys, "table7", "--scale", "smoke", "--columns", "cifar10")
    # Synthetic's own 20 clients of 100 rows, a tenth of them positive.
    assert "200 / 1,800" in counted.out
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tabel1",), "No such command 'tabel1'"),
        (("run", "tabel1"), "unknown table 'tabel1': did you mean 'table1'"),
        (("table1", "--columns", "cifar"), "unknown column of table1 'cifar': did you mean 'cifar10'"),
        (("table1", "--scale", "smok"), "unknown scale 'smok': did you mean 'smoke'"),
        (("table1", "--scale", "smoke", "--columns", "cifar10", "--tuning", "steps:2"), "candidates need at least 3"),
        (("table7", "--columns", "cifar"), "unknown column of table7 'cifar'"),
        (("run", "table7"), "table7 is counted, not run: use `python -m paper table7`"),
        (("show", "table1"), "paper/records has no records"),
    ],
)
def test_mistakes_are_one_line(
    inside: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    found = paper_command(capsys, *words)
    assert found.code == 2
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert list(inside.iterdir()) == []


def test_differences_over_classes_are_tested_over_classes_alone() -> None:
    store = RecordStore(Path(__file__).parents[2] / "paper/records")
    table = TableBuilder(store, PAPER, [0]).build(build_tables(PAPER)["all-classes"])
    first, second = (
        np.array([case.mean for case in table.cells[row, "cifar10"].case_aucs if case])
        for row in ("cycp-pairwise", "cycp-fedavg")
    )
    gains = first - second
    assert len(gains) == 10
    frame = make_class_frame(table).loc["cifar10: cycp-pairwise minus cycp-fedavg"]
    # Quantiles of Student's t with 4 and 9 degrees of freedom.
    for name, part, quantile in (("classes 5-9", gains[5:], 2.776), ("all 10", gains, 2.262)):
        half = quantile * part.std(ddof=1) / np.sqrt(len(part))
        mean, interval = frame[name].split(", p ")[0].split(" ± ")
        assert float(mean) == pytest.approx(part.mean(), abs=1e-4)
        assert float(interval) == pytest.approx(half, abs=1e-4)
