"""What a terminal of 80 columns and 24 lines shows: help, bars, tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.cli import _bar_names
from fedauc.experiments.options import options
from fedauc.experiments.runner import Progress
from fedauc.reports.progress import MOST, Bars
from fedauc.reports.summary import Line
from fedauc.reports.tables import caption, headers
from fedauc.reports.words import WORDS
from fedauc.version import VERSION

LINE = Line("a", 1, 0.9, 0.0, 0.8, 0.95, 0.5, 3, 10, 10, 1.0, None)


def test_options_that_stand_for_themselves_say_what_they_mean() -> None:
    own = {option.name for option in options() if "." not in option.name}
    assert own <= set(WORDS) <= {option.name for option in options()}


def test_no_command_at_all_shows_help_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("data",), ("paper",)):
        told = fedauc(capsys, *arguments)
        assert "Usage: fedauc" in told.out
        assert (told.code, told.err) == (2, "")


def test_a_usage_error_names_the_command_whose_help_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    told = fedauc(capsys, "run", "--bogus", "1")
    assert told.code == 2
    assert told.err.startswith("error: No such option")
    assert told.err.endswith(". See `fedauc run --help`.\n")


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = fedauc(capsys, "--version")
    assert (told.code, told.out) == (0, f"{VERSION}\n")


def test_of_many_bars_the_run_under_way_stays_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        under_way = bars.bar("slow")
        under_way(Progress(1, 2, None))
        for number in range(2 * MOST):
            bars.bar(f"run-{number}")(Progress(2, 2, None))
        bars.bar("done before")
    lines = capsys.readouterr().err.split("\n")
    names = [line.split()[0] for line in lines if line.strip()]
    # The finished ones make room, the oldest first; a run that was done before took a place, and is not shown.
    assert names == ["slow", *(f"run-{number}" for number in range(MOST + 2, 2 * MOST))]
    assert "left" in lines[0]
    assert all("took" in line for line in lines[1:] if line.strip())


def test_bars_are_named_by_what_runs_differ_in() -> None:
    assert list(_bar_names(["a/seed-0", "b/seed-0"]).values()) == ["a", "b"]
    assert list(_bar_names(["a/seed-0", "a/seed-1"]).values()) == ["seed-0 a", "seed-1 a"]
    assert list(_bar_names(["a/lr-1/seed-0", "a/lr-2/seed-0"]).values()) == ["lr-1", "lr-2"]
    assert list(_bar_names(["a/lr-1/seed-0", "b/lr-1/seed-0"]).values()) == ["a lr-1", "b lr-1"]


def test_a_comparison_says_whether_it_shows_intervals_or_spreads() -> None:
    assert headers([LINE, LINE])[1] == "AUC [95 %]"
    assert caption([LINE, LINE]) == "p: paired DeLong test against a."
    several = replace(LINE, seeds=3)
    assert headers([several, several])[1] == "AUC ± sd"
    assert caption([several, several]) == "p: paired DeLong test against a on the first seed's scores."
    assert caption([LINE]) == ""


def test_status_names_the_datasets_that_need_no_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = fedauc(capsys, "data", "status", "--folder", str(tmp_path))
    assert told.out.splitlines()[-1] == "need no files here: creditcard, medicare-like, synthetic, table"
