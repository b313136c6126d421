"""The participation calendar against the schedule's own cohorts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedauc.reports import attendance
from fedauc.reports.attendance import Calendar, build_calendar
from fedauc.reports.report_runs import read_report_runs


def test_the_calendar_counts_the_visits_and_absences_of_the_ledger(comparison_folder: Path) -> None:
    run = read_report_runs([comparison_folder])[0]
    calendar = build_calendar(run)
    assert isinstance(calendar, Calendar)
    last = run.records[-1]
    assert calendar.present.shape == (6, 12)
    assert int(calendar.visits.sum()) == int(calendar.present.sum()) == last["visits"]
    # Client 1 is absent in the first and the third of four cycles.
    assert int(calendar.absences.sum()) == last["absences"] == 2
    assert calendar.absences[calendar.rows.index("1")] == 2


def test_a_round_belongs_to_one_group(comparison_folder: Path) -> None:
    calendar = build_calendar(read_report_runs([comparison_folder])[0])
    assert isinstance(calendar, Calendar)
    for round in range(12):
        came = calendar.row_groups[calendar.present[:, round] > 0]
        assert set(came.tolist()) == {round % 3}


def test_many_clients_have_a_row_per_group_and_long_runs_show_the_last_rounds(
    comparison_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_report_runs([comparison_folder])[0]
    clients = build_calendar(run)
    monkeypatch.setattr(attendance, "MAX_CLIENTS", 5)
    monkeypatch.setattr(attendance, "MAX_ROUNDS", 4)
    groups = build_calendar(run)
    assert isinstance(clients, Calendar)
    assert isinstance(groups, Calendar)
    assert groups.is_aggregate
    assert (groups.present.shape, groups.first_round) == ((3, 4), 8)
    for group in range(3):
        members = clients.row_groups == group
        assert (groups.present[group] == clients.present[members][:, 8:].sum(axis=0)).all()
        assert groups.visits[group] == clients.visits[members].sum()
