"""The page of results: every sentence comes from records, and may come out either way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedauc.metrics import auc
from paper.claims import claims
from paper.filling import Filler
from paper.orderings import Gain, Ordering, Shown, compared, gained, gains, matrix, orderings, overview
from paper.pictures import Panel, _labels, draw, panels, picture
from paper.records import Point, RecordStore
from paper.report import page
from paper.scales import PAPER, SMOKE
from paper.short import short
from paper.table_specs import TABLES, CellSpec, Row, cell_configs, list_cells
from paper.tables import by_case, rows
from paper.tuning import ChoiceStore, TuningChoice, TuningJob
from paper_records import by_default, keep, labelled, scored

ROOT = Path(__file__).parents[2]
SEEDS = [0, 1, 2]


def store_of(folder: Path, sheet: str, columns: Sequence[str], skill: Callable[[CellSpec, int], float]) -> RecordStore:
    """Finished runs of a sheet's cells at the paper's scale, with so much skill on 1,000 test rows, half positive."""
    store, labels = RecordStore(folder), labelled(500, 500)
    for place, cell in enumerate(list_cells(TABLES[sheet](PAPER).select(columns, []))):
        for case in by_default(store, cell, SEEDS):
            for config in case:
                scores = scored(labels, skill(cell, config.recipe.seed), seed=100 * place + config.recipe.seed)
                last = auc(labels, scores)
                keep(store, config, [0.5, last - 0.1, last], (labels, scores))
    return store


def shown(store: RecordStore, sheet: str, columns: Sequence[str]) -> Shown:
    made = TABLES[sheet](PAPER).select(columns, [])
    return Shown(made, Filler(store, PAPER, SEEDS).fill(made))


# ------------------------------------------------------------------------------------------------------ the kept page


def test_the_page_of_results_is_what_the_records_say() -> None:
    """`python -m paper report` writes it; every figure that it links to is there."""
    made = page(RecordStore(ROOT / "paper" / "records"), PAPER, SEEDS)
    assert (ROOT / "docs" / "results.md").read_text() == made.text, (
        "run `python -m paper report` and look at what changed"
    )
    linked = re.findall(r"\]\((figures/[^)]*)\)", made.text)
    assert [f"figures/{name}" for name in made.pictures] == linked
    assert all((ROOT / "docs" / path).is_file() for path in linked)


# ---------------------------------------------------------------------------------------------------------- orderings

HIGH, LOW = 1.5, 1.0
"""AUC .86 and .76 on noise of one standard deviation; the test tells them apart, having 500 rows of either class."""


@pytest.mark.parametrize(("ours", "theirs", "verdict"), [(HIGH, LOW, "above"), (LOW, HIGH, "below")])
def test_an_ordering_is_said_as_it_is(tmp_path: Path, ours: float, theirs: float, verdict: str) -> None:
    """CyCp-Minimax at one level and the others at another; CyCp-Pairwise is as good as its baselines."""
    store = store_of(
        tmp_path, "table1", ["cifar10"], lambda cell, _: ours if cell.row.name == "cycp-minimax" else theirs
    )
    found = list(orderings(shown(store, "table1", ["cifar10"])))
    said = {(each.method, each.baseline): each.verdict for each in found}
    assert len(said) == 10
    assert {way for (method, _), way in said.items() if method == "cycp-minimax"} == {verdict}
    assert {way for (method, _), way in said.items() if method == "cycp-pairwise"} == {"no difference found"}
    gap = next(each for each in found if (each.method, each.baseline) == ("cycp-minimax", "a-fedavg"))
    # The paper prints .8446 and .7950.
    assert gap.paper == pytest.approx(0.0496)
    sign = "+" if verdict == "above" else "-"
    # Two methods against five baselines: the baselines go down.
    line = next(line for line in matrix(found) if line[0] == "a-fedavg")
    # The paper's methods are compared with each other on demand, and count as no baseline.
    extra = [each for each in orderings(shown(store, "table1", ["cifar10"]), own=True) if each not in found]
    assert [(each.method, each.baseline) for each in extra] == [("cycp-pairwise", "cycp-minimax")]
    assert extra[0].verdict == ("below" if verdict == "above" else "above")
    assert re.fullmatch(rf"\{sign}\.[01]\d\d\d {verdict}, p <\.001 \[\+\.0496\]", line[1])


def test_the_overview_and_the_comparisons_count_both_ways(tmp_path: Path) -> None:
    """On CIFAR-100 the paper has CyCp-Minimax below RS-Pairwise and above A-FedAvg; these records turn both round."""
    level = {"rs-pairwise": LOW, "a-fedavg": 2.0, "cycp-minimax": HIGH}
    store = store_of(tmp_path, "table1", ["cifar100"], lambda cell, _: level.get(cell.row.name, HIGH))
    sheets = [shown(store, "table1", ["cifar100"])]
    assert list(overview(sheets)) == [
        ["table", "method", "above", "no difference found", "below", "not tested"],
        ["table1", "cycp-minimax", "1", "3", "1", "0"],
        ["table1", "cycp-pairwise", "1", "3", "1", "0"],
    ]
    higher, lower = compared(sheets)
    # Three draws and a defeat of each method, less the draw with RS-Minimax that the paper has below (.9318, .9392).
    assert higher == (
        "Where the paper has the CyCp method higher, 8 tests at p < .05, uncorrected: 1 above, 5 no difference found, "
        "2 below (table1 cifar100: cycp-minimax below a-fedavg; table1 cifar100: cycp-pairwise below a-fedavg; "
        "table1 cifar100: cycp-pairwise above rs-pairwise)."
    )
    assert lower == (
        "Where the paper has the CyCp method not higher, 2 tests at p < .05, uncorrected: 1 above, "
        "1 no difference found (table1 cifar100: cycp-minimax above rs-pairwise)."
    )


def test_rows_stand_beside_the_papers_numbers(tmp_path: Path) -> None:
    """On CIFAR-10 the paper has .7836 for CyCp-FedAvg and .8480 for CyCp-Pairwise; these records have .88 and .76.

    A row that lacks a run has no place there.
    """
    store, level = RecordStore(tmp_path), {"cycp-fedavg": 0.88, "cycp-pairwise": 0.76, "a-fedavg": 0.9}
    for cell in list_cells(TABLES["table1"](PAPER).select(["cifar10"], list(level))):
        for config in by_default(store, cell, SEEDS)[0][: 2 if cell.row.name == "a-fedavg" else 3]:
            keep(store, config, [level[cell.row.name]], None)
    made = shown(store, "table1", ["cifar10"])
    assert gained(gains([made])) == [
        ["AUC less the paper's", "table1 cifar10"],
        ["cycp-fedavg", "+.0964"],
        ["cycp-pairwise", "-.0880"],
    ]
    assert list(short([made])) == [
        "Highest test AUC in `table1`: cifar10 cycp-fedavg .8800 of 2 rows, without a-fedavg, a-scaffold, rs-minimax, "
        "rs-pairwise, cycp-minimax.",
        "Above the paper's number for the same row: `table1` 1 of 2, from -.0880 (cifar10, cycp-pairwise) to +.0964 "
        "(cifar10, cycp-fedavg).",
        "Where the paper has the CyCp method higher, 1 tests at p < .05, uncorrected: 1 not tested.",
    ]


def test_a_row_that_only_one_table_has_leaves_the_other_empty() -> None:
    found = [Gain("table1", "fedavg", "cifar10", 0.1), Gain("table2", "scaffold", "cifar10", -0.1)]
    assert gained(found)[1:] == [["fedavg", "+.1000", "-"], ["scaffold", "-", "-.1000"]]


def test_other_data_than_the_papers_stands_apart(tmp_path: Path) -> None:
    store = store_of(tmp_path, "table1", ["chest-stand-in"], lambda cell, _: HIGH)
    found = [shown(store, "table1", ["chest-stand-in"])]
    assert [line[0] for line in list(overview(found))[1:]] == ["table1, chest-stand-in"] * 2
    assert list(compared(found)) == []
    assert gains(found) == []
    # Neither the paper's rows nor its numbers: there is nothing to say in short.
    assert list(short(found)) == []


def test_an_unfinished_row_is_not_compared(tmp_path: Path) -> None:
    """CyCp-FedAvg lacks a seed."""
    store_of(tmp_path, "table1", ["cifar10"], lambda cell, _: HIGH)
    path = tmp_path / "cifar10.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines.remove(next(line for line in lines if '"method":"cycp-fedavg"' in line))
    path.write_text("".join(lines))
    found = list(orderings(shown(RecordStore(tmp_path), "table1", ["cifar10"])))
    assert "cycp-fedavg" not in {each.baseline for each in found}
    assert len(found) == 8


def test_without_ranks_nothing_is_tested() -> None:
    column = TABLES["table1"](PAPER).columns[0]
    assert Ordering(column, "cycp-minimax", "fedavg", 0.1, None, None).verdict == "not tested"


# ------------------------------------------------------------------------------------------------------------- claims


def series(folder: Path, sheet: str, dataset: str, curves: dict[str, list[float]]) -> list[str]:
    """What a figure's records say, from the curve of each column."""
    store, columns = RecordStore(folder), [f"{dataset}-{value}" for value in curves]
    for cell in list_cells(TABLES[sheet](PAPER).select(columns, ["cycp-minimax"])):
        for case in by_default(store, cell, SEEDS):
            for config in case:
                keep(store, config, curves[cell.column.name.removeprefix(f"{dataset}-")], None)
    return [f"{where}: {claim.said}." for where, claim in claims(shown(store, sheet, columns)).items()]


FALL = "AUC falls from .9100 (I = 16) to {} (I = 64) at most, by {} with a standard error of .0000: {}"


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (0.9, FALL.format(".9000", ".0100", "within")),
        (0.88, FALL.format(".8800", ".0300", "more than")),
        (0.92, "no interval up to I = 64 is below a shorter one"),
    ],
)
def test_the_interval_is_judged_by_its_largest_fall_from_a_shorter_one(tmp_path: Path, last: float, said: str) -> None:
    """Not by the shortest alone, which has .9."""
    (found,) = series(tmp_path, "figure1", "cifar10", {"I4": [0.9], "I16": [0.91], "I64": [last]})
    assert found.removesuffix(".").removesuffix(" .01") == f"cifar10, cycp-minimax: {said}"
    (told,) = short([shown(RecordStore(tmp_path), "figure1", ["cifar10-I4", "cifar10-I16", "cifar10-I64"])])
    head, pairs = (
        "A longer interval I costs no more than .01 AUC at equal local steps (`figure1`)",
        "pairs of data and method",
    )
    kept = f"0 of 1 {pairs}; not cifar10, cycp-minimax." if "more" in said else f"1 of 1 {pairs}."
    assert told == f"{head}: {kept}"


@pytest.mark.parametrize(("apart", "verdict"), [(0.004, "more than"), (0.007, "not told from")])
def test_a_loss_must_be_told_from_the_one_that_is_allowed(tmp_path: Path, apart: float, verdict: str) -> None:
    """The three runs of I = 64 have .892 and so much less and more: a standard error of apart / √3, .0023 or .0040.

    The loss of .018 exceeds .01 by .008, which is more than twice the first, and less than twice the second.
    """
    store, columns = RecordStore(tmp_path), ["cifar10-I16", "cifar10-I64"]
    for cell in list_cells(TABLES["figure1"](PAPER).select(columns, ["cycp-minimax"])):
        for config in by_default(store, cell, SEEDS)[0]:
            spread = 0.91 if cell.column.name == "cifar10-I16" else 0.892 + apart * (config.recipe.seed - 1)
            keep(store, config, [spread], None)
    (claim,) = claims(made := shown(store, "figure1", columns)).values()
    assert claim.said.endswith(
        f"by .0180 with a standard error of {apart / 3**0.5:.4f}".replace(" 0.", " .") + f": {verdict} .01"
    )
    assert claim.holds is (None if verdict == "not told from" else False)
    (told,) = short([made])
    assert told.endswith(
        "; not told: cifar10, cycp-minimax." if claim.holds is None else "; not cifar10, cycp-minimax."
    )


def test_points_of_figures_and_single_runs_have_no_marks(tmp_path: Path) -> None:
    """Table 1's runs are told apart in its own columns over three seeds, not with one, and not as a figure's."""
    level = {"cycp-minimax": LOW}
    store = store_of(tmp_path, "table1", ["cifar10"], lambda cell, _: level.get(cell.row.name, HIGH))
    for cell in list_cells(TABLES["figure1"](PAPER).select(["cifar10-I16"], [])):
        by_default(store, cell, SEEDS)
    table, figure = shown(store, "table1", ["cifar10"]), shown(store, "figure1", ["cifar10-I16"])
    assert "*" in "".join(cell for line in rows(*table) for cell in line)
    assert not set("*~?") & set("".join(cell for line in rows(*figure) for cell in line))
    alone = Filler(store, PAPER, [0]).fill(table.sheet)
    assert not set("*~?") & set("".join(cell for line in rows(table.sheet, alone) for cell in line))
    assert {each.verdict for each in orderings(Shown(table.sheet, alone))} == {"not tested"}


def test_means_over_classes_show_every_class_beside_the_papers_number(tmp_path: Path) -> None:
    """Class c has .9 less c hundredths, but that the last has not run; their mean needs them all."""
    store, sheet = RecordStore(tmp_path), TABLES["classes"](PAPER).select(["cifar10"], ["cycp-fedavg", "cycp-minimax"])
    for cell in list_cells(sheet):
        for place, (config,) in enumerate(by_default(store, cell, SEEDS)):
            if cell.row.name == "cycp-fedavg" or place < 4:
                keep(store, config, [0.9 - place / 100], None)
    text = page(store, PAPER, SEEDS, ["classes"]).text
    assert "| cycp-fedavg | .8800 [.7836] |" in text
    assert "|  | cycp-fedavg |\n| --- | --- |\n| cifar10, data.positive 0 | .9000 |\n" in text
    filled = Filler(store, PAPER, SEEDS).fill(sheet)
    assert by_case(sheet, filled)[-1] == ["cifar10, data.positive 4", ".8600", "-"]


@pytest.mark.parametrize(
    ("early", "holds"), [(0.6, True), (0.79, False)], ids=["both targets fall", "the early one does not"]
)
def test_rounds_must_fall_to_both_targets(tmp_path: Path, early: float, holds: bool) -> None:
    """M = 1 comes to .8 in the third evaluation and M = 2 in the second; to .78 both in the second, or in turn."""
    series(tmp_path, "figure2", "cifar100", {"M1": [0.6, early, 0.8], "M2": [0.6, 0.8, 0.8]})
    (claim,) = claims(shown(RecordStore(tmp_path), "figure2", ["cifar100-M1", "cifar100-M2"])).values()
    assert claim.holds is holds


@pytest.mark.parametrize(
    ("sheet", "symbol", "rounds", "said"),
    [
        ("figure2", "M", (3, 2, 1), "they fall with every step"),
        ("figure2", "M", (2, 3, 1), "they fall, not with every step"),
        ("figure2", "M", (1, 2, 3), "they do not fall"),
        ("figure3", "K", (3, 2, 1), "they fall with every step"),
        ("figure3", "K", (3, 3, 2), "they fall, not with every step"),
        ("figure3", "K", (3, 3, 3), "they do not fall"),
    ],
)
def test_rounds_to_a_common_target_are_told_as_they_are(
    tmp_path: Path, sheet: str, symbol: str, rounds: tuple[int, ...], said: str
) -> None:
    """Curves at .6 and from some evaluation on at .8, which all but the first end with; an evaluation is ten rounds.

    They come to .78 when they come to .8.
    """
    values = {"M": (1, 2, 5), "K": (5, 10, 20)}[symbol]
    curves = {
        f"{symbol}{v}": [0.6] * (count - 1) + [0.8] * (4 - count) for v, count in zip(values, rounds, strict=True)
    }
    curves[f"{symbol}{values[0]}"].append(0.9)
    (found,) = series(tmp_path, sheet, "cifar100", curves)
    listed = ", ".join(f"{10 * count} ({symbol} = {v})" for v, count in zip(values, rounds, strict=True))
    told = f"{listed}: {said}"
    assert found == f"cifar100, cycp-minimax: rounds to AUC .8000 are {told}; to AUC .7800 are {told}."


def test_an_early_target_has_rounds_of_its_own_unless_all_begin_there(tmp_path: Path) -> None:
    late = {"M1": [0.6, 0.79, 0.8], "M2": [0.6, 0.7, 0.8]}
    (found,) = series(tmp_path / "late", "figure2", "cifar100", late)
    assert "rounds to AUC .8000 are 30 (M = 1), 30 (M = 2): they do not fall; to AUC .7800 are 20 (M = 1), 30" in found
    (found,) = series(tmp_path / "early", "figure2", "cifar100", {"M1": [0.79, 0.8], "M2": [0.79, 0.8]})
    assert found.endswith("20 (M = 2): they do not fall.")
    (found,) = series(tmp_path / "once", "figure2", "cifar100", {"M1": [0.8], "M2": [0.8]})
    assert found.endswith("rounds to AUC .8000 are 10 (M = 1), 10 (M = 2): they do not fall.")


# --------------------------------------------------------------------------------------------------- the whole page


def test_a_page_shows_what_has_begun_and_nothing_else(tmp_path: Path) -> None:
    """Table 1's runs are also figure 1's at I = 16: that figure has not begun, while the traffic table is a view."""
    store = store_of(tmp_path, "table1", ["cifar10", "chest-stand-in"], lambda cell, _: HIGH)
    made = page(store, PAPER, SEEDS)
    heads = re.findall(r"^## (.*)$", made.text, flags=re.MULTILINE)
    assert heads == [
        "In short",
        "Table 1: original labels, dir = 0.5 (`table1`)",
        "Orderings",
        "Rounds and bytes to a common AUC (`traffic`)",
        "Data",
        "Tuning",
        "Not run",
        "Runs",
    ]
    lacking = "| `python -m paper table1` | cifar100, chestmnist, insurance, insurance-synthetic |"
    assert lacking in made.text
    # Repeated removal has Table 1's data as the first of three draws: 21 of 63 runs.
    assert "| `python -m paper table9` | cifar10 (21 of 63), cifar100 |" in made.text
    assert "`python -m paper traffic`" not in made.text
    # Seven rows, two columns, three seeds of a second each.
    assert "\n42 runs, 42 seconds of training and evaluation, on:\n" in made.text
    assert "| cifar10 | made up; for a test | 500 |" in made.text
    assert list(made.pictures) == ["paper-table1.png"]
    assert [panel.title for panel in made.pictures["paper-table1.png"]] == ["cifar10", "chest-stand-in"]


def test_stand_ins_are_labelled_and_in_a_table_of_their_own(tmp_path: Path) -> None:
    store, labels = RecordStore(tmp_path), labelled(20, 30)
    for cell in list_cells(TABLES["table1"](PAPER).select(["cifar10", "chest-stand-in"], [])):
        note = "STAND-IN for others, rows; and more" if "stand-in" in cell.column.name else "photographs"
        for config in by_default(store, cell, SEEDS)[0]:
            keep(store, config, [0.5], (labels, scored(labels, 1.0, 0)), note)
    text = page(store, PAPER, SEEDS, ["table1"]).text
    warning = "`chest-stand-in` is not the paper's data: STAND-IN for others, rows, 20 positives to test on.\n"
    assert text.index("|  | cifar10 |\n") < text.index(warning) < text.index("|  | chest-stand-in |\n")
    assert "`cifar10` is not" not in text


def test_a_single_row_is_shown(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    for cell in list_cells(TABLES["table1"](PAPER).select(["cifar10"], ["cycp-pairwise"])):
        keep(store, by_default(store, cell, [0])[0][0], [0.5], None)
    text = page(store, PAPER, SEEDS, ["table1"]).text
    assert "No run has finished yet." not in text
    assert "| cycp-pairwise | .5000 (1 of 3) [.8480] |" in text


def test_the_page_says_how_many_runs_the_settings_of_images_took(tmp_path: Path) -> None:
    """In four columns three rows of CyCp-FedAvg and four of CyCp-Pairwise; two of CyCp-Minimax, and two in half.

    A run that both tables have counts once: FedAvg's at .1 with a weight decay of 1e-3.
    """
    store = RecordStore(tmp_path)
    for cell in list_cells(TABLES["batches"](PAPER)):
        if not ("minimax-16" in cell.row.name and "pooled" in cell.column.name):
            keep(store, cell_configs(PAPER, cell, {}, [0])[0][0], [0.5], None)
    text = " ".join(page(store, PAPER, SEEDS, ["table1", "batches"]).text.split())
    told = "(`schedules` and `batches`): cycp-fedavg 12, cycp-minimax 12, cycp-pairwise 16;"
    assert told in text
    # Of these, pairwise's at .03 and .1 are there too.
    assert told in " ".join(page(store, PAPER, SEEDS, ["table1", "schedules", "batches"]).text.split())
    assert "(`schedules` and `batches`)" not in page(store, PAPER, SEEDS, ["table1"]).text


def test_a_row_that_is_still_to_be_tuned_shows_no_run_of_its_defaults(tmp_path: Path) -> None:
    store, sheet = RecordStore(tmp_path), TABLES["table1"](PAPER).select(["cifar10"], ["cycp-fedavg", "cycp-minimax"])
    tuned, untuned = list_cells(sheet)
    for config in by_default(store, tuned, SEEDS)[0]:
        keep(store, config, [0.9], None)
    for config in cell_configs(PAPER, untuned, {}, SEEDS)[0]:
        keep(store, config, [0.9], None)
    filled = Filler(store, PAPER, SEEDS).fill(sheet)
    assert [cell.auc is not None for cell in filled.values()] == [True, False]


def test_a_point_that_is_not_tuned_by_itself_is_told(tmp_path: Path) -> None:
    """It has its dataset's settings until then, and is done only when its own runs are."""
    store = store_of(tmp_path, "figure2", ["cifar10-M1", "cifar10-M10"], lambda cell, _: HIGH)
    told = "Not tuned by themselves yet, with a table's settings on the same data: cifar10-M1 (cycp-pairwise)."
    listed = "| `python -m paper figure2` | cifar10-M1 (6 of 6, to be tuned), cifar10-M2"
    assert told not in (text := page(store, PAPER, SEEDS).text)
    assert "| `python -m paper figure2` | cifar10-M2, cifar10-M5" in text
    assert "| cifar10-M1 | cycp-pairwise | defaults |" in text
    claim = "- cifar10, cycp-pairwise: rounds to AUC"
    assert claim in text
    path = tmp_path / "paper-choices.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"cifar10-M1-cycp-pairwise"' not in line))
    text = page(store, PAPER, SEEDS).text
    assert told in text
    assert listed in text
    # What is not tuned says nothing of M.
    assert claim not in text
    assert claim.replace("pairwise", "minimax") in text


def test_card_fraud_shows_average_precision_too(tmp_path: Path) -> None:
    """The made-up records have half of AUC, which is 1 here and 0.5 there."""
    store, level = RecordStore(tmp_path), {"cycp-fedavg": 1.0, "cycp-minimax": 0.5}
    for cell in list_cells(TABLES["creditcard"](PAPER).select(["creditcard"], list(level))):
        for (config,) in by_default(store, cell, SEEDS):
            keep(store, config, [level[cell.row.name]], None)
    text = page(store, PAPER, SEEDS, ["creditcard"]).text
    table = text[text.index("Average precision") :]
    assert "| cycp-fedavg | .5000 ± .0000 |" in table
    assert "| cycp-minimax | .2500 ± .0000 |" in table


def test_a_cycle_is_selected_on_validation_alone(tmp_path: Path) -> None:
    """Two rows whose test AUC is highest in the second of three cycles; one of them is selected there."""
    store, sheet = RecordStore(tmp_path), TABLES["table1"](PAPER).select(["cifar10"], ["cycp-fedavg", "cycp-pairwise"])
    judged = {"cycp-fedavg": [0.6, 0.7, 0.8], "cycp-pairwise": [0.6, 0.8, 0.8]}
    for cell in list_cells(sheet):
        for config in by_default(store, cell, SEEDS)[0]:
            keep(store, config, [0.7, 0.9, 0.85], None, validation=judged[cell.row.name])
    text = page(store, PAPER, SEEDS, ["table1"]).text
    _, _, selected = text.partition("where a run's validation AUC was highest")
    assert "| cycp-fedavg | .8500 ± .0000 |" in selected
    assert "| cycp-pairwise | .9000 ± .0000 |" in selected


def test_the_tuning_says_how_often_the_grid_ended(tmp_path: Path) -> None:
    """Of three rows, one has the largest learning rate and one the smallest; 6 cycles each."""
    store = RecordStore(tmp_path)
    choices = ChoiceStore(store, PAPER)
    for method, step in (("cycp-fedavg", "0.1"), ("a-fedavg", "0.01"), ("cycp-minimax", "0.001")):
        judged = tuple({"settings": {"learning-rate": each}, "cycles": 2} for each in ("0.1", "0.01", "0.001"))
        choices.add_choice(
            TuningJob("cifar10", Row(method, method)),
            TuningChoice({"learning-rate": step}, "steps", 6, judged, 3, 6, 1.0),
        )
    for cell in list_cells(TABLES["table1"](PAPER).select(["cifar10"], [])):
        for config in cell_configs(PAPER, cell, choices.chosen_settings(TuningJob("cifar10", cell.row)), SEEDS)[0]:
            keep(store, config, [0.5], None)
    text = " ".join(page(store, PAPER, SEEDS, ["table1"]).text.split())
    assert "In all 9 runs, 18 cycles, 0 seconds." in text
    wide = "Of 3 rows with more than two learning rates, 1 chose the smallest of their grid and 1 the largest"
    assert f"{wide}, so that a larger one might do better: cifar10 (cycp-fedavg)." in text
    # Of two learning rates each is an end, which says nothing.
    choices.add_choice(
        TuningJob("cifar10", Row("cycp-fedavg", "cycp-fedavg")), TuningChoice({"learning-rate": "0.1"}, "full", 200)
    )
    text = " ".join(page(store, PAPER, SEEDS, ["table1"]).text.split())
    assert "Of 2 rows with more than two learning rates, 1 chose the smallest of their grid and 0 the largest." in text
    assert "| cifar10 | a-fedavg | learning-rate 0.01 | steps | 9 | 3 | 6 | 1 |" in text


def test_whole_runs_with_settings_that_were_not_chosen_are_told(tmp_path: Path) -> None:
    """FedAvg is shown at .01 and has run at .1 too, with every seed; minimax has done so with one alone."""
    store, sheet = RecordStore(tmp_path), TABLES["table1"](PAPER).select(["cifar10"], ["cycp-fedavg", "cycp-minimax"])
    choices = ChoiceStore(store, PAPER)
    for cell in list_cells(sheet):
        choices.add_choice(
            TuningJob("cifar10", cell.row), TuningChoice({"learning-rate": "0.01"}, "steps", 6, (), 3, 6, 1.0)
        )
        for config in cell_configs(PAPER, cell, {"learning-rate": "0.01"}, SEEDS)[0]:
            keep(store, config, [0.8], None)
        other = {"learning-rate": "0.1"} | ({"algorithm.prox": "0.1"} if cell.row.name == "cycp-minimax" else {})
        for config in cell_configs(PAPER, cell, other, SEEDS if cell.row.name == "cycp-fedavg" else SEEDS[:1])[0]:
            keep(store, config, [0.9], None)
    text = page(store, PAPER, SEEDS, ["table1"]).text
    _, _, told = text.partition("Runs of full length with settings that were not chosen")
    assert "| cifar10 | cycp-fedavg | learning-rate 0.1 | .9000 ± .0000 |" in told
    assert "cycp-minimax" not in told


def test_the_traffic_table_has_rounds_ratio_and_bytes(tmp_path: Path) -> None:
    """The lowest of the three ends is minimax's .75: FedAvg is there after 30 rounds, it after 20, A-FedAvg never.

    Those are means over seeds, which spread around them, those of FedAvg the other way round.
    """
    curves = {"cycp-fedavg": [0.6, 0.7, 0.75, 0.8], "cycp-minimax": [0.7, 0.85, 0.8, 0.75]}
    curves |= {"cycp-pairwise": [0.8] * 4, "a-fedavg": [0.7] * 4}
    store = RecordStore(tmp_path)
    for cell in list_cells(TABLES["traffic"](PAPER).select(["cifar10"], list(curves))):
        for config in by_default(store, cell, SEEDS)[0]:
            apart = 0.05 * (config.recipe.seed - 1) * (1 if cell.row.name == "cycp-fedavg" else -1)
            keep(store, config, [value + apart for value in curves[cell.row.name]], None)
    text = page(store, PAPER, SEEDS, ["traffic"]).text
    assert "| AUC to reach | .7500 |" in text
    assert "| cycp-fedavg | 30 (1.00), 30 kB |" in text
    assert "| cycp-minimax | 20 (0.67), 20 kB |" in text
    # It is there in its first evaluation, and may have been before.
    assert "| cycp-pairwise | ≤ 10 (0.33), 10 kB |" in text
    assert "| a-fedavg | not reached |" in text
    # Nearly there, .02 below: FedAvg no sooner, as .7 is too low.
    _, _, early = text.partition("| AUC to reach | .7300 |")
    assert "| cycp-fedavg | 30 (1.00), 30 kB |" in early
    assert "| cycp-pairwise | ≤ 10 (0.33), 10 kB |" in early
    told = "- Rounds until .02 below a common AUC, as a multiple of cycp-fedavg's: cifar10 cycp-minimax 0.67,"
    assert f"{told} cycp-pairwise ≤ 0.33." in " ".join(text.split())


def test_a_picture_has_a_panel_for_each_column_or_dataset_and_row(tmp_path: Path) -> None:
    """CIFAR-100 has one value alone, which says nothing; card fraud has others than CIFAR-10, in a colour each."""
    columns = ["cifar10-M10", "cifar10-M2", "cifar100-M5", "creditcard-M1", "creditcard-M2"]
    store = store_of(tmp_path, "figure2", columns, lambda cell, _: HIGH)
    found = panels(*shown(store, "figure2", columns))
    assert [panel.title for panel in found] == [
        f"{row}, {dataset}" for dataset in ("cifar10", "creditcard") for row in ("cycp-minimax", "cycp-pairwise")
    ]
    assert [list(panel.curves) for panel in found] == [["M10", "M2"]] * 2 + [["M1", "M2"]] * 2
    assert _labels(found) == ["M1", "M2", "M10"]
    draw(found, tmp_path / "made" / "picture.png")
    assert (tmp_path / "made" / "picture.png").read_bytes().startswith(b"\x89PNG")
    # A legend beside each line of panels; a value has one colour in all of them, and no other value has it.
    axes = picture(found).axes
    legends = [axis.get_legend() for axis in axes]
    assert [each and [text.get_text() for text in each.get_texts()] for each in legends] == [
        None,
        ["M2", "M10"],
        None,
        ["M1", "M2"],
    ]
    drawn = {
        (text.get_text(), line.get_color())
        for each in legends
        if each
        for text, line in zip(each.get_texts(), each.get_lines(), strict=True)
    }
    assert len(drawn) == len({label for label, _ in drawn}) == len({colour for _, colour in drawn}) == 3


def test_a_single_collapse_leaves_the_other_curves_room(tmp_path: Path) -> None:
    """One of twenty points is at .5: the axis ends below .9, where the rest is. A curve that stays low is shown."""

    def curve(aucs: list[float]) -> list[Point]:
        return [Point(place, place + 1, 0, auc, None) for place, auc in enumerate(aucs)]

    steady = [0.9 + 0.001 * place for place in range(20)]
    collapsed = [*steady[:10], 0.5, *steady[11:]]
    (alone,) = [axis for axis in picture([Panel("", {"M1": curve(steady), "M2": curve(collapsed)})]).axes if axis.lines]
    assert 0.89 < alone.get_ylim()[0] < 0.902
    assert 0.919 < alone.get_ylim()[1] < 0.921
    (low,) = [axis for axis in picture([Panel("", {"M1": curve(steady), "M2": curve([0.5] * 20)})]).axes if axis.lines]
    assert low.get_ylim()[0] < 0.5


def test_a_value_is_dashed_in_every_figure_or_in_none() -> None:
    """I = 16 is third of five in one figure, and second of three in another."""
    points = [Point(0, 10, 10, 0.7, None), Point(1, 20, 20, 0.8, None)]
    styles = []
    for values in ((4, 8, 16, 32, 64), (4, 16, 64)):
        axis = picture([Panel("", {f"I{value}": points for value in values})]).axes[0]
        styles.append(axis.lines[values.index(16)].get_linestyle())
    assert styles[0] == styles[1]


def test_a_tables_picture_has_one_legend_for_all_panels(tmp_path: Path) -> None:
    """A row that only the second line of panels has is in it too."""
    curve = [Point(0, 10, 10, 0.7, None), Point(1, 20, 20, 0.8, None)]
    some = [Panel(str(place), {"cycp-fedavg": curve}) for place in range(2)]
    first, *rest = [axis.get_legend() for axis in picture([*some, Panel("2", {"central": curve})]).axes][1:]
    assert first is not None
    assert [text.get_text() for text in first.get_texts()] == ["cycp-fedavg", "central"]
    assert rest == [None, None]


def test_a_page_of_the_smoke_scale_says_so(tmp_path: Path) -> None:
    assert "Smoke scale" in page(RecordStore(tmp_path), SMOKE, SEEDS).text


def test_ranks_of_made_up_records_have_the_auc_of_their_scores(tmp_path: Path) -> None:
    """The helper itself: 500 + 500 rows, noise of one standard deviation, so AUC is Φ(1.5 / √2) = .856."""
    store = store_of(tmp_path, "table1", ["cifar10"], lambda cell, _: HIGH)
    config = cell_configs(PAPER, next(list_cells(TABLES["table1"](PAPER))), {}, [0])[0][0]
    ranks, record = store.load_ranks(config), store.find_record(config)
    assert ranks is not None
    assert record is not None
    assert auc(ranks.labels, ranks.ranks) == record.auc == pytest.approx(0.856, abs=0.025)
    assert np.count_nonzero(ranks.labels) == 500
