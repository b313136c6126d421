"""The report page: complete, without network, and with the numbers of the metrics."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.data.example_table import encode_claims
from fedauc.experiments.runner import Run
from fedauc.metrics import auc, delong_interval, delong_test
from fedauc.reports.page import build_document, render_page
from fedauc.reports.page_sections import build_sections
from fedauc.reports.report_runs import read_report_runs
from fedauc.reports.sentences import answer_run, describe_privacy
from fedauc.reports.tables import format_bytes
from report_runs_helpers import make_config

SECTIONS = [
    "answer",
    "comparison",
    "ranking",
    "learning",
    "sites",
    "participation",
    "scores",
    "thresholds",
    "traffic",
    "privacy",
    "settings",
    "methods",
]


def without_plotly(page: str) -> str:
    """The page without its longest script, which is not ours."""
    longest = max(re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL), key=len)
    assert len(longest) > 1_000_000
    return page.replace(longest, "")


def test_the_command_writes_a_page_with_every_section(
    comparison_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    done = fedauc(capsys, "report", str(comparison_folder), "--out", str(path))
    assert (done.code, done.out) == (0, f"{path}\n")
    page = path.read_text()
    assert re.findall(r'<section id="([a-z]+)"', page) == SECTIONS
    assert re.findall(r'<a href="#([a-z]+)"', page) == SECTIONS


def test_the_page_loads_nothing(comparison_folder: Path) -> None:
    """No address in any attribute or style, and the browser is told to refuse all of them."""
    page = without_plotly(render_page(read_report_runs([comparison_folder])))
    assert re.findall(r"https?://", page) == []
    assert re.findall(r'(?:src|href)="(?!#|data:)', page) == []
    assert "default-src 'none'" in page
    assert "connect-src" not in page


def test_every_figure_of_the_page_has_a_place_a_summary_and_numbers(comparison_folder: Path) -> None:
    page = without_plotly(render_page(read_report_runs([comparison_folder])))
    figures = json.loads(re.findall(r'id="figure-data">(.*?)</script>', page, flags=re.DOTALL)[0])
    places = dict(re.findall(r'class="plot" id="([^"]+)" role="img" aria-label="([^"]+)"', page))
    assert places.keys() == figures.keys()
    assert all(len(summary) > 20 for summary in places.values())
    assert all(trace.get("x") or trace.get("z") for figure in figures.values() for trace in figure["data"])


def test_the_numbers_are_those_of_the_metrics(comparison_folder: Path) -> None:
    runs = read_report_runs([comparison_folder])
    first, second = (run.scored for run in runs)
    assert first is not None
    assert second is not None
    texts = build_document(runs)["texts"]
    interval = delong_interval(second.labels, second.scores)
    shown = f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]"
    assert shown in texts["comparison-0"]
    tested = delong_test(second.labels, second.scores, first.scores)
    assert f"{tested.difference:+.4f}" in texts["comparison-0"]
    assert f"{tested.p_value:.3f}" in texts["comparison-0"]


def test_the_tables_of_sites_and_groups_begin_with_the_lowest_auc(comparison_folder: Path) -> None:
    run = read_report_runs([comparison_folder])[0]
    rows = run.scored
    assert rows is not None
    assert rows.clients is not None
    assert run.roster is not None
    assert run.roster.listed is not None
    groups = dict(zip(run.roster.listed["name"], run.roster.listed["group"], strict=True))
    by_group = np.array([groups[str(name)] for name in rows.clients])
    expected = sorted(auc(rows.labels[by_group == group], rows.scores[by_group == group]) for group in range(3))
    text = build_document([run])["texts"]["sites-0"]
    table = text[: text.index("<details>")]
    shown = [float(value) for value in re.findall(r'data-value="([\d.]+)">0\.\d{4}<', table)]
    assert shown == pytest.approx(expected, abs=1e-12)


def test_the_saved_operating_point_is_counted_on_the_test_rows(comparison_folder: Path) -> None:
    run = read_report_runs([comparison_folder])[0]
    saved, rows = run.scorer["operating_point"], run.scored
    assert rows is not None
    alerts = rows.scores >= saved["threshold"]
    recall, fpr = (float(alerts[rows.labels == label].mean()) for label in (1, 0))
    table = build_document([run])["texts"]["thresholds-0"]
    first = table[table.index("<tbody>") : table.index("FPR at most")]
    assert "saved with the model" in first
    assert f">{recall:.3f} [" in first
    assert f">{fpr:.3f} [" in first


def test_an_unfinished_run_has_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    Run.create(make_config(), tmp_path / "run")
    runs = read_report_runs([tmp_path / "run"])
    texts = build_document(runs)["texts"]
    assert "has not been evaluated yet" in texts["answer-0"]
    assert "written when the run is done" in texts["ranking-0"]
    assert "No round has been evaluated yet" in texts["participation-0"]


def test_an_old_folder_without_roster_and_clients_says_so(comparison_folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(comparison_folder / "cycp-minimax" / "seed-0", old)
    (old / "roster.json").unlink()
    with np.load(old / "scores.npz") as stored:
        labels, scores = stored["labels"], stored["scores"]
    np.savez(old / "scores.npz", labels=labels, scores=scores)
    texts = build_document(read_report_runs([old]))["texts"]
    assert "no roster.json" in texts["participation-0"]
    assert "intervals are missing" in texts["sites-0"]
    assert "<strong>" not in texts["answer-0"]


def test_names_of_clients_cannot_become_markup(comparison_folder: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "run"
    shutil.copytree(comparison_folder / "cycp-minimax" / "seed-0", hostile)
    roster = json.loads((hostile / "roster.json").read_text())
    roster["listed"]["name"][0] = "</script><script>alert(1)</script>"
    (hostile / "roster.json").write_text(json.dumps(roster))
    assert "<script>alert(1)" not in render_page(read_report_runs([hostile]))


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = fedauc(capsys, "report", str(tmp_path))
    assert done.code == 2
    assert "is not a run folder" in done.err


def test_settings_with_several_seeds_are_judged_by_their_means(comparison_folder: Path) -> None:
    """The two runs stand for two seeds of one setting, and the first of them alone for another setting."""
    first, second = read_report_runs([comparison_folder])
    runs = [replace(first, setting="a"), replace(second, setting="a"), replace(first, name="c", setting="b")]
    finals = [run.final["auc"] for run in runs if run.final is not None]
    texts = build_document(runs)["texts"]
    assert f"{np.mean(finals[:2]):.4f} ± {np.std(finals[:2], ddof=1):.4f}" in texts["comparison-0"]
    assert "Of 2 settings" in texts["answer-0"]


@pytest.mark.parametrize("command", [("report",), ("board", "--port", "0")])
def test_a_missing_package_is_named_with_its_remedy(
    command: tuple[str, ...],
    comparison_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve_nothing(server: HTTPServer) -> None:
        """A board that goes on without the package must end in a test."""

    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(HTTPServer, "serve_forever", serve_nothing)
    done = fedauc(capsys, *command, str(comparison_folder))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: plotly is not installed; a report needs it: ")


def test_of_many_runs_the_best_six_are_detailed(comparison_folder: Path) -> None:
    first, second = read_report_runs([comparison_folder])
    sections = {section.key: section for section in build_sections([first, second] * 4)}
    assert len(sections["sites"].blocks) == 6


def train_on_claims(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Path:
    """A run on the synthetic table of claims with quantiles and validation rows."""
    table = folder / "claims.csv"
    table.write_bytes(encode_claims(rows=1500, seed=0))
    columns = ("--data.label", "fraud", "--data.positive", "yes", "--data.client", "state")
    rows = ("--data.numbers", "quantiles", "--data.validation-fraction", "0.2")
    training = ("--cycles", "6", "--groups", "2", "--out", str(folder / "run"))
    done = fedauc(capsys, "run", "--data", "table", "--data.path", str(table), *columns, *rows, *training, *options)
    assert done.code == 0, done.err
    return folder / "run"


def test_the_privacy_section_names_the_summaries_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Preparation and calibration send summaries as well, and these hold single values."""
    (run,) = read_report_runs([train_on_claims(tmp_path, capsys)])
    sent = json.loads((run.folder.path / "data.json").read_text())["preparation"]["bytes_up"]
    lines = dict(describe_privacy(run))
    assert f"prepared ({format_bytes(sent)} from all clients together)" in lines["Once, at the start"]
    for part in ("the smallest and the largest value", "a sketch of its quantiles", "which values the client has"):
        assert part in lines["Once, at the start"]
    assert "the range of the scores of the validation rows" in lines["At the end"]
    assert "except the smallest and the largest of a column and its categories" in lines["Never"]
    assert "beside scores of sampled rows" in lines["Never"]


def test_without_summaries_no_feature_leaves(comparison_folder: Path) -> None:
    lines = dict(describe_privacy(read_report_runs([comparison_folder])[0]))
    assert "Summaries" not in lines["Once, at the start"]
    assert lines["Never"] == "A row's features; labels, except as counts per class."


def test_the_first_sentence_and_the_card_name_the_round_of_the_saved_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = train_on_claims(tmp_path, capsys, "--keep", "best", "--learning-rate", "3", "--evaluate-every", "1")
    (run,) = read_report_runs([path])
    saved = run.result["kept_round"] + 1
    assert saved < run.rounds_done
    assert f"After {saved} of {run.rounds_done} rounds" in answer_run(run)
    assert f"| saved after round | `{saved}` |" in (path / "MODEL_CARD.md").read_text()
