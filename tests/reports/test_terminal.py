"""What a terminal of 80 columns and 24 lines shows: help, bars, tables."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import data_files
from cli_helpers import fedauc, paper_command
from fedauc.cli.training import name_bars, option_flags
from fedauc.data import find_datasets
from fedauc.data.datasets.synthetic import SyntheticMedicare
from fedauc.experiments.options import list_options
from fedauc.experiments.run_loop import Progress
from fedauc.progress import report_activity
from fedauc.reports.caveats import has_caveat
from fedauc.reports.progress import MAX_BARS, ProgressBars
from fedauc.reports.summary import MethodSummary, Spread
from fedauc.reports.tables import tabulate_methods
from fedauc.version import VERSION
from paper.commands import print_frame
from paper.records import RecordStore
from paper.report import Report
from paper.scales import PAPER
from paper.table_specs import METHODS, build_tables, list_cells
from paper.tables import SMOKE_CAVEAT, Cell, Table, TableBuilder, list_data_caveats, make_frame
from paper_records import by_default, keep, labelled, scored

LINE = MethodSummary("a", 1, "AUC", 0.9, 0.0, 0.8, 0.95, {"AP": 0.5}, 3, 10, 10, 1.0, None)


def test_every_option_has_a_help_text_of_its_own() -> None:
    """A help text that begins with the default or the choices lacks the sentence that says what the option does."""
    bare = [
        option.name
        for option in list_options()
        if option.help.startswith(("Default:", "One of", "Required", "Opt", "Not set", "For "))
    ]
    assert bare == []


def test_help_in_80_columns_cuts_no_name_of_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = fedauc(capsys, "run", "--help").out.splitlines()
    shown = {word for line in lines for word in line.split() if word.startswith("--")}
    assert {option_flags(option.name)[0] for option in list_options()} <= {word.split(",")[0] for word in shown}
    assert max(map(len, lines)) <= 80
    words = " ".join(lines)
    assert "─ Server optimizer ─" in words
    for name in ("wrappers", "transforms", "callbacks"):
        assert any(line.split()[1:3] == [f"--{name}", "name,..."] for line in lines)


def test_an_option_that_members_understand_differently_explains_each() -> None:
    texts = {option.name: option.help for option in list_options()}
    assert texts["server-optimizer.learning-rate"].startswith(
        "Server learning rate: about the largest step of a weight in a round (adam, yogi). "
        "Server learning rate, on the velocity (momentum)."
    )


def test_no_command_at_all_shows_help_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("data",)):
        outcome = fedauc(capsys, *arguments)
        assert "Usage: fedauc" in outcome.out
        assert (outcome.code, outcome.err) == (2, "")


def test_a_usage_error_names_the_command_whose_help_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = fedauc(capsys, "run", "--bogus", "1")
    assert outcome.code == 2
    assert outcome.err.startswith("error: No such option")
    assert outcome.err.endswith(". See `fedauc run --help`.\n")


def test_a_misspelled_option_suggests_the_nearest_one_first(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = fedauc(capsys, "run", "--learningrate", "1")
    assert outcome.err.startswith("error: No such option: --learningrate (did you mean --learning-rate or ")
    assert outcome.err.endswith("?). See `fedauc run --help`.\n")


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = fedauc(capsys, "--version")
    assert (outcome.code, outcome.out) == (0, f"{VERSION}\n")


def test_of_many_bars_the_run_under_way_stays_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        under_way = bars.add_bar("slow")
        under_way(Progress(1, 2, None))
        for number in range(2 * MAX_BARS):
            bars.add_bar(f"run-{number}")(Progress(2, 2, None))
        bars.add_bar("done before")
    lines = capsys.readouterr().err.split("\n")
    names = [line.split()[0] for line in lines if line.strip()]
    # The finished ones make room, the oldest first; a run that was done before took a place, and is not shown.
    assert names == ["slow", *(f"run-{number}" for number in range(MAX_BARS + 2, 2 * MAX_BARS))]
    assert "left" in lines[0]
    assert all("took" in line for line in lines[1:] if line.strip())


def test_bars_are_named_by_what_runs_differ_in() -> None:
    assert list(name_bars(["a/seed-0", "b/seed-0"]).values()) == ["a", "b"]
    assert list(name_bars(["a/seed-0", "a/seed-1"]).values()) == ["seed-0 a", "seed-1 a"]
    assert list(name_bars(["a/lr=1/seed-0", "a/lr=2/seed-0"]).values()) == ["lr=1", "lr=2"]
    assert list(name_bars(["a/lr=1/seed-0", "b/lr=1/seed-0"]).values()) == ["a lr=1", "b lr=1"]


def test_a_bar_takes_one_line_of_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of card fraud has a name of 41 letters; 80 columns have room for 31 of them beside the rest."""
    monkeypatch.setenv("COLUMNS", "80")
    with ProgressBars() as bars:
        observe = bars.add_bar("creditcard-full-cycp-minimax-a7a9f3ec61f1")
        observe(Progress(1000, 1000, {"auc": 0.9784}))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "1000/1000" in line]
    assert line.startswith("creditcard-full-cycp-m…f3ec61f1 ")
    assert line.rstrip().endswith("test AUC 0.9784")


def test_the_settings_of_a_sweep_are_shown_whole_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [f"cycp-pairwise/learning-rate={rate}/seed-{seed}" for rate in (0.03, 0.1) for seed in (0, 1)]
    names = list(name_bars(runs).values())
    with ProgressBars() as bars:
        for name in names:
            bars.add_bar(name)(Progress(1000, 1000, {"auc": 0.9784}))
    lines = [line for line in capsys.readouterr().err.splitlines() if "1000/1000" in line]
    assert [" ".join(line.split()[:2]) for line in lines] == names
    assert names[0] == "seed-0 learning-rate=0.03"
    assert all(line.rstrip().endswith("AUC 0.9784") and len(line) <= 80 for line in lines)


def test_a_bar_names_the_metric_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with ProgressBars() as bars:
        observe = bars.add_bar("cycp-pairwise")
        observe(Progress(1000, 1000, {"tpauc@0.3:0.4": 0.25}, column="tpauc@0.3:0.4", label="tpauc@0.3:0.4"))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].rstrip().endswith("tpauc@0.3:0.4 0.2500")


def test_a_bar_says_that_its_run_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        observe = bars.add_bar("run")
        observe(Progress(1, 32, {"auc": 0.5}))
        observe(Progress(1, 32, {"auc": 0.5}, stopped=True))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "1/32" in line]
    assert line.split()[-2:] == ["1/32", "stopped"]


def test_compiling_shows_a_bar_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with ProgressBars() as bars:
        bars.add_bar("run")(Progress(0, 32, None))
        console = Console(width=80, file=io.StringIO(), force_terminal=True)
        with report_activity("compiling the training step"):
            console.print(bars._progress.get_renderable())
        console.print("then", bars._progress.get_renderable())
    shown, _, finished = console.file.getvalue().partition("then")  # type: ignore[attr-defined]
    assert "compiling the training step (about a minute the first time)" in shown
    assert "compiling" not in finished


def test_a_bar_names_the_phase_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    with ProgressBars() as bars:
        with report_activity("loading creditcard"):
            console.print(bars._progress.get_renderable())
        observe = bars.add_bar("cycp-pairwise")
        observe(Progress(0, 32, None, phase="scoring"))
        console.print(bars._progress.get_renderable())
        observe(Progress(16, 32, {"auc": 0.75}))
        console.print(bars._progress.get_renderable())
        observe(Progress(32, 32, {"auc": 0.75}, phase="done"))
        console.print(bars._progress.get_renderable())
    shown = Text.from_ansi(console.file.getvalue()).plain.splitlines()  # type: ignore[attr-defined]
    loading, scoring, training, done = [" ".join(line.split()) for line in shown if line.strip()]
    assert loading.endswith("loading creditcard")
    assert (" 0/32 left " in scoring, scoring.endswith(" scoring")) == (True, True)
    assert (" 16/32 left " in training, training.endswith(" training test AUC 0.7500")) == (True, True)
    assert ("training" in done, " took " in done) == (False, True)


def test_a_comparison_says_whether_it_shows_intervals_or_spreads() -> None:
    assert tabulate_methods([LINE, LINE]).headers[1] == "AUC [95 %]"
    assert tabulate_methods([LINE, LINE]).caption == "p: paired DeLong test of the AUC against a."
    several = replace(LINE, seeds=3)
    assert tabulate_methods([several, several]).headers[1] == "AUC ± sd"
    caption = "p: paired DeLong test of the AUC against a on the first seed's scores."
    assert tabulate_methods([several, several]).caption == caption
    assert tabulate_methods([LINE]).caption == ""


def test_p_values_are_shown_only_beside_an_auc() -> None:
    line = replace(LINE, label="recall@0.01", others={"pauc@0.05": 0.5}, p_value=0.03)
    table = tabulate_methods([line, line])
    assert ("p" in table.headers, table.caption) == (False, "")
    assert {len(row) for row in table.rows} == {len(table.headers)}
    beside = tabulate_methods([replace(line, others={"AUC": 0.9})] * 2)
    assert (beside.headers[-1], beside.rows[0][-1]) == ("p", ".030")


def test_a_comparison_in_80_columns_cuts_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """Further metrics go first, then seconds and downloads; method, interval, uploads and p stay."""
    long = replace(LINE, method="cycp-pairwisepairwise-own", bytes_up=12_300_000, bytes_down=45_600_000, p_value=0.03)
    table = tabulate_methods([long, long]).fit_width(80)
    assert table.headers == ["method", "AUC [95 %]", "rounds", "up", "down", "p"]
    assert table.caption.endswith("Omitted, for lack of room: AP, sec; `show --json` has them.")
    Console(width=80).print(table.to_rich())
    row = capsys.readouterr().out.splitlines()[1]
    assert all(cell in row for cell in (long.method, ".9000 [.800, .950]", "12.3 MB", "45.6 MB", ".030")), row


def test_status_names_the_datasets_that_need_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    outcome = fedauc(capsys, "data", "status", "--folder", str(tmp_path))
    names = "creditcard, medicare-like, synthetic, synthetic-tokens, table"
    assert outcome.out.splitlines()[-1] == f"need no files here: {names}"


# --------------------------------------------------------------------------------------------------- the paper's tables

DONE = Cell(expected=3, finished=3, stopped=0, numbers={"auc": Spread(0.911, 0.0012, 3)})
"""Shown as `.9110 ± .0012`, 13 columns."""


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without records, at a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FEDAUC_RECORDS", raising=False)
    return tmp_path


@pytest.mark.parametrize("width", [80, 40, 20])
def test_a_table_wider_than_the_terminal_comes_in_pieces(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Seven columns of a table, and a figure's columns, which go down, beside its rows."""
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("table1", "figure1"):
        spec = build_tables(PAPER)[name]
        columns, rows = [entry.name for entry in spec.columns], [entry.name for entry in spec.rows]
        across, down = (rows, columns) if name == "figure1" else (columns, rows)
        print_frame(make_frame(Table(spec, {(row, column): DONE for row in rows for column in columns})))
        pieces = [piece.splitlines() for piece in capsys.readouterr().out.split("\n\n")]
        assert [header for head, *_ in pieces for header in head.split()] == across
        for head, *lines in pieces:
            row_cells = [line.split(maxsplit=1) for line in lines]
            assert [row for row, _ in row_cells] == down
            assert {cells.count(".9110 ± .0012") for _, cells in row_cells} == {len(head.split())}
            # One column is never divided, even where it does not fit.
            assert max(map(len, [head, *lines])) <= width or len(head.split()) == 1
        wide = max(map(len, down)) + sum(2 + max(13, len(entry)) for entry in across) > width
        assert (len(pieces) > 1) == wide


def test_no_piece_has_room_for_the_next_column(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names take 13 places and a number with the two before it 15: 80 hold four numbers, and not a fifth."""
    first, last = ["cifar10", "cifar100", "chestmnist", "insurance"], ["insurance-synthetic"]
    spec = build_tables(PAPER)["table1"].select([*first, *last], [])
    print_frame(make_frame(Table(spec, {(row, column.name): DONE for row in METHODS for column in spec.columns})))
    heads = [piece.splitlines()[0].split() for piece in capsys.readouterr().out.split("\n\n")]
    assert heads == [first, last]


def test_the_table_has_the_same_caveat_as_the_page(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rows, columns = (
        RecordStore(inside / "paper" / "records"),
        ["cycp-fedavg", "cycp-minimax"],
        ["cifar10", "insurance-synthetic"],
    )
    labels = labelled(7, 30)
    spec = build_tables(PAPER)["table1"].select(columns, rows)
    for cell in list_cells(spec):
        note = "SYNTHETIC others: rows; and more" if "synthetic" in cell.column.name else "photographs"
        for config in by_default(store, cell, [0])[0]:
            keep(store, config, [0.5], (labels, scored(labels, 1.0, 0)), note)
    asked = ("--columns", ",".join(columns), "--methods", ",".join(rows), "--seeds", "0")
    outcome = paper_command(capsys, "table1", *asked)
    assert outcome.code == 0, outcome.err
    caveat = "`insurance-synthetic` is not the paper's data: SYNTHETIC others: rows, 7 positives to test on."
    assert caveat in Report(store, PAPER, [0], ["table1"]).text
    text = " ".join(outcome.out.split())
    assert text.index("insurance-synthetic") < text.index(caveat) < text.index("Test AUC after")
    assert text.count("is not the paper's data") == 1
    monkeypatch.setenv("COLUMNS", "40")
    # A name of 12 places, `.5000 [.7836]` of 13 and the other column's name of 18, two between, are 47.
    narrow = paper_command(capsys, "table1", *asked).out.splitlines()
    assert sum(line.startswith("cycp-minimax ") for line in narrow) == 2
    # Without the scores that count them, what is known is still said.
    for file in (inside / "paper" / "records").glob("*-ranks.npz"):
        file.unlink()
    store = RecordStore(inside / "paper" / "records")
    (less,) = list_data_caveats(TableBuilder(store, PAPER, [0]).build(spec), store)
    assert less == "`insurance-synthetic` is not the paper's data: SYNTHETIC others: rows."


def test_counts_say_whose_they_are_not(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_files.make_chest_stand_in(inside, monkeypatch)
    monkeypatch.setenv("FEDAUC_DATA", str(inside))
    text = " ".join(paper_command(capsys, "table7", "--columns", "chest-stand-in").out.split())
    note = "STAND-IN for ChestMNIST: 4,999 NIH chest X-rays, mass or none"
    assert text.endswith(f"- `chest-stand-in` is not the paper's data: {note}.")
    assert " ".join(paper_command(capsys, "table7", "--scale", "smoke").out.split()).endswith(f"- {SMOKE_CAVEAT}")


def test_datasets_that_stand_in_are_those_whose_notes_say_so(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name: kind.caveat for name, kind in find_datasets().items() if kind.caveat}
    assert sorted(named) == ["chest-stand-in", "medicare-like"]
    for dataset in (data_files.make_chest_stand_in(inside, monkeypatch), SyntheticMedicare(rows=2000)):
        note = dataset.load(0).note
        assert has_caveat(note)
        assert note.startswith(named[dataset.name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # CyCp-Pairwise has 324 candidates in the paper's grid.
        (("--tuning", "paper"), "tuning has 120 cycles; 324 candidates need at least 1944: use --tuning paper:1944"),
        (("--budget-minutes", "-1"), "budget-minutes is -1; it must be above 0: leave it out to set no limit"),
        (("--budget-minutes", "0"), "budget-minutes is 0; it must be above 0: leave it out to set no limit"),
        (("--budget-minutes", "nan"), "budget-minutes is nan; it must be above 0: leave it out to set no limit"),
    ],
)
def test_a_budget_that_cannot_be_says_what_to_write(
    inside: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    outcome = paper_command(capsys, "table1", "--scale", "smoke", "--columns", "cifar10", *words)
    assert (outcome.code, outcome.err) == (2, f"error: {message}\n")
    assert list(inside.iterdir()) == []
