"""The report of a federation's run folder: what the server knows, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import fedauc
from fedauc.federation.pausing import request_pause
from fedauc.guards import TrainingStopped
from fedauc.participation.cyclic import Cyclic
from fedauc.reports.attendance import Calendar, build_calendar
from fedauc.reports.operation import Operation
from fedauc.reports.page import build_document, render_page
from fedauc.reports.report_runs import read_report_runs
from fedauc.reports.watch import read_watched
from fedauc.stages import Constant
from fedauc.training import Round
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers.example_dp import ExampleDP
from federation.memory_grid import NAMES, Fault, collect_rounds, create_run, make_agreement, make_grid, resume_run
from small_federations import held_out


@pytest.fixture(scope="module")
def federation_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The messages to site 4 are lost in round 4, however often they are sent."""
    folder = tmp_path_factory.mktemp("federation")
    grid = make_grid(folder / "sites", [Fault(site=4, round=4, kind="lost", times=9)], held_out())
    create_run(make_agreement("cycp-pairwise", cycles=3, participation=Cyclic()), grid, folder / "run").train_to_end()
    return folder


def test_the_calendar_shows_who_answered(federation_folder: Path) -> None:
    (run,) = read_report_runs([federation_folder])
    calendar = build_calendar(run)
    assert isinstance(calendar, Calendar)
    result = json.loads((federation_folder / "run" / "result.json").read_text())["attendance"]
    assert set(calendar.rows) == set(NAMES)
    for row, name in enumerate(calendar.rows):
        assert calendar.visits[row] == result[name]["answered"]
        assert calendar.absences[row] == result[name]["absent"] + result[name]["refused"]
    assert calendar.absences[calendar.rows.index("site-4")] == 1


def test_validation_rows_are_shown(tmp_path: Path) -> None:
    """Rounds 3 and 6 are evaluated, on the rows that sites hold out as well; a run without them has no such column."""
    agreement = make_agreement("cycp-fedavg", {"validation_fraction": 0.3}, participation=Cyclic(), keep="best")
    create_run(agreement, make_grid(tmp_path / "sites", test=held_out()), tmp_path / "run").train_to_end()
    (run,) = read_report_runs([tmp_path])
    table = Operation(run).tabulate_rounds()
    shown = {int(row[0].text): row[table.headers.index("validation AUC")].value for row in table.rows}
    values = {record["round"] + 1: record["validation_auc"] for record in run.records}
    assert shown == {round: values.get(round) for round in range(1, 7)}
    assert None not in values.values()
    assert "The same of the validation rows, 0.3 of each class" in render_page([run])


def test_the_calendar_shows_late_answers_and_sites_that_have_joined(tmp_path: Path) -> None:
    """Site 4 is no site of the first cycle; in the second its answer to round 4 comes in round 5."""
    faults = [Fault(site=4, round=4, kind="after 15"), Fault(site=6, round=5, kind="after 8")]
    policy = {"evaluation": "none", "late_answers": "merge"}
    agreement = make_agreement("cycp-fedavg", policy, cycles=3, participation=Cyclic(), stages=Constant())
    fewer = replace(agreement, sites=tuple(site for site in agreement.sites if site.name != "site-4"))
    grid, out = make_grid(tmp_path / "sites", faults), tmp_path / "run"

    def pause(finished: Round) -> None:
        if finished.phase.round == 2:
            request_pause(out)

    with pytest.raises(TrainingStopped):
        collect_rounds(create_run(fewer, grid, out), [], pause)
    resume_run(agreement, grid, out).train_to_end()
    calendar = build_calendar(*read_report_runs([out]))
    assert isinstance(calendar, Calendar)
    row = calendar.rows.index("site-4")
    assert calendar.present[row].tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    assert calendar.absent[row].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert set(calendar.rows) == set(NAMES)


def test_the_page_says_what_left_the_sites_and_holds_no_key(federation_folder: Path) -> None:
    runs = read_report_runs([federation_folder])
    texts = build_document(runs)["texts"]
    assert "The rows stayed at the sites" in texts["privacy-0"]
    assert "Histograms of the held-out rows" in texts["privacy-0"]
    assert "None. No noise for differential privacy" in texts["privacy-0"]
    assert "stay at the sites" in texts["thresholds-0"]
    assert f"{runs[0].records[-1]['auc']:.3f}" in texts["answer-0"]
    assert "key-of-" not in render_page(runs)


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        (
            {"epsilon": 4.0},
            ["The server is trusted", "census.json and attendance.jsonl hold exact", "Whoever has the file noise.key"],
        ),
        (
            {"epsilon": 4.0, "transforms": (SecureSum(),), "weighting": "paper", "participation": "full"},
            ["epsilon holds against 1 of the clients", "not how many of which class", "from a secret of its own"],
        ),
        ({"wrappers": (ExampleDP(),), "epsilon": 4.0}, ["private for every example", "from a secret of its own"]),
    ],
    ids=["trusted server", "secure sums", "examples"],
)
def test_a_private_federation_states_its_guarantee_and_what_it_has_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], sentences: list[str]
) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, cycles=2, **settings)
    create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run").train_to_end()
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (guarantee["budget"], guarantee["noise_source"]) == (4.0, "secret")
    assert "the held-out rows" not in guarantee["public"]
    assert fedauc(capsys, "federation", "show", str(tmp_path)).out.count("epsilon 4 spent, of a budget of 4") == 1
    runs = read_report_runs([tmp_path])
    texts = build_document(runs)["texts"]
    for sentence in ("spent, of a budget of 4", *sentences):
        assert sentence.lower() in texts["privacy-0"].lower()
    assert ("hold exact" in texts["privacy-0"]) == (sentences[0] == "The server is trusted")


def test_a_secure_sum_without_noise_is_no_formal_privacy(tmp_path: Path) -> None:
    agreement = make_agreement(
        "cycp-fedavg", {"evaluation": "none"}, cycles=1, transforms=(SecureSum(),), participation="full"
    )
    create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run").train_to_end()
    text = build_document(read_report_runs([tmp_path]))["texts"]["privacy-0"]
    assert "None. No noise for differential privacy is added. The server learns sums of uploads" in text
    assert "not summed securely" not in text


def test_watch_follows_a_federation(federation_folder: Path) -> None:
    (run,) = read_watched(federation_folder)
    assert (run.phase, run.is_over, run.rounds) == ("done", True, run.total)
