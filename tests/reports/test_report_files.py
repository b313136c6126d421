"""Figures and tables of a report as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.reports.figure_files import render_figure
from fedauc.reports.page_sections import build_sections
from fedauc.reports.report_runs import read_report_runs

SIGNATURES = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}


def test_the_command_writes_figures_and_latex_tables(
    comparison_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = comparison_folder / "cycp-minimax" / "seed-0", tmp_path / "report.html"
    done = fedauc(capsys, "report", str(run), "--out", str(page), "--format", "svg", "--latex")
    assert done.code == 0
    figures = {path.stem for path in (tmp_path / "report_figures").iterdir()}
    assert {"roc", "precision-recall", "learning-rounds", "calendar", "calibration", "auc-by-group"} <= figures
    tables = {path.stem: path.read_text() for path in (tmp_path / "report_tables").iterdir()}
    assert {"summary", "auc-by-client", "thresholds", "traffic"} <= tables.keys()
    for text in tables.values():
        assert text.count(r"\begin{") == text.count(r"\end{") == 2
        rows = text.partition(r"\toprule")[2].partition(r"\bottomrule")[0].count("\\\\\n")
        assert rows >= 2


@pytest.mark.parametrize("file_format", SIGNATURES)
def test_a_figure_is_drawn_in_every_format_and_always_the_same(comparison_folder: Path, file_format: str) -> None:
    runs = read_report_runs([comparison_folder])
    figures = [figure for section in build_sections(runs[:1]) for block in section.blocks for figure in block.figures]
    calendar = next(figure for figure in figures if figure.key == "calendar")
    drawn = render_figure(calendar, file_format)
    assert drawn.startswith(SIGNATURES[file_format])
    assert drawn == render_figure(calendar, file_format)


def test_an_unknown_format_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fedauc(capsys, "report", str(tmp_path / "none"), "--format", "pdf,doc")
    assert (done.code, done.err) == (2, "error: format is 'doc'; it must be one of pdf, svg, png\n")
