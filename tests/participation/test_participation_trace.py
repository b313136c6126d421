"""Recorded traces: who is there, who was due and absent, files, wrap-around, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedauc.interfaces import Cohort, Roster
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace

# Six clients of which client 5 holds nothing. Unsorted, client 3 twice in round 0, nobody in round 2, round 4 last.
CLIENTS = Roster(np.array([4, 4, 4, 4, 4, 0]))
ROWS = ((3, 1), (0, 3), (0, 0), (0, 3), (1, 2), (4, 4), (4, 5), (1, 1))
THERE = [(0, 3), (1, 2), (), (1,), (4,)]
TURNS = Cyclic(given=((0, 1), (2, 3, 4)))


def write_csv(path: Path, text: str) -> str:
    (path / "trace.csv").write_text(text, encoding="utf-8")
    return str(path / "trace.csv")


def write_npz(path: Path, **arrays: Any) -> str:
    np.savez(path / "trace.npz", **arrays)
    return str(path / "trace.npz")


def as_rows(path: Path) -> Trace:
    return Trace(rows=ROWS, cycle_length=2)


def as_csv(path: Path) -> Trace:
    # A byte-order mark, spaces, a blank line, a further column and another column order are all harmless.
    body = "".join(f"{client},x,{round}\n" for round, client in ROWS)
    return Trace(path=write_csv(path, "\ufeffclient, note,round\n\n" + body), cycle_length=2)


def as_npz(path: Path) -> Trace:
    rounds, clients = np.array(ROWS, dtype=np.int32).T
    return Trace(path=write_npz(path, round=rounds, client=clients), cycle_length=2)


@pytest.mark.parametrize("make", [as_rows, as_csv, as_npz])
def test_a_trace_alone_is_the_cohort(make: Any, tmp_path: Path) -> None:
    schedule = make(tmp_path).bind(CLIENTS, 0)
    assert [schedule.cohort(round).clients for round in range(5)] == THERE
    assert schedule.cycle_length == 2
    assert [group.tolist() for group in schedule.groups] == [[0, 1, 2, 3, 4]]


def test_nobody_available_is_an_empty_cohort() -> None:
    assert Trace(rows=ROWS, cycle_length=1).bind(CLIENTS, 0).cohort(2) == Cohort(2, (), ())


@pytest.mark.parametrize(
    ("round", "clients", "absent"),
    # Even rounds are (0, 1)'s turn, odd rounds (2, 3, 4)'s; client 2 is there in round 1 and client 1 there is not due.
    [(0, (0,), (1,)), (1, (2,), (3, 4)), (2, (), (0, 1)), (3, (), (2, 3, 4)), (4, (), (0, 1))],
)
def test_with_a_schedule_the_due_who_are_not_there_are_absent(
    round: int, clients: tuple[int, ...], absent: tuple[int, ...]
) -> None:
    schedule = Trace(rows=ROWS, schedule=TURNS).bind(CLIENTS, 0)
    cohort = schedule.cohort(round)
    assert (cohort.clients, cohort.absent) == (clients, absent)
    assert cohort.weights == (1.0,) * len(clients)
    assert schedule.cycle_length == 2
    assert [group.tolist() for group in schedule.groups] == [[0, 1], [2, 3, 4]]


def test_present_and_absent_together_are_the_schedules_cohort() -> None:
    random = np.random.default_rng(0)
    rows = tuple(map(tuple, np.argwhere(random.random((40, 60)) < 0.5).tolist()))
    clients, cyclic = Roster(np.full(60, 4)), Cyclic(groups=4, per_round=6)
    due, met = cyclic.bind(clients, 3), Trace(rows=rows, schedule=cyclic, repeat=True).bind(clients, 3)  # type: ignore[arg-type]
    for round in range(60):
        cohort = met.cohort(round)
        assert tuple(sorted(cohort.clients + cohort.absent)) == due.cohort(round).clients
        # Every client listed in a round of 40 is there in that round and 40 rounds later, and no other is.
        assert all((round % 40, client) in rows for client in cohort.clients)
        assert not any((round % 40, client) in rows for client in cohort.absent)


@pytest.mark.parametrize("schedule", [None, TURNS])
def test_a_round_beyond_the_trace_is_refused(schedule: Cyclic | None) -> None:
    bound = Trace(rows=ROWS, cycle_length=2, schedule=schedule).bind(CLIENTS, 0)
    with pytest.raises(ValueError) as caught:
        bound.cohort(5)
    assert str(caught.value) == "round is 5; the trace ends at round 4: run fewer rounds or set repeat=True"


def test_repeat_starts_again_but_the_turns_go_on() -> None:
    alone = Trace(rows=ROWS, cycle_length=2, repeat=True).bind(CLIENTS, 0)
    assert [alone.cohort(round).clients for round in range(10)] == THERE * 2
    # Round 5 reads the trace's round 0 (clients 0, 3) while it is the second group's turn.
    turns = Trace(rows=ROWS, schedule=TURNS, repeat=True).bind(CLIENTS, 0)
    assert turns.cohort(5) == Cohort(5, (3,), (1.0,), (2, 4))


def test_a_far_round_costs_no_memory_for_the_gap() -> None:
    # A table with one entry per round would need 8 TB here.
    schedule = Trace(rows=((10**12, 1),), cycle_length=1).bind(CLIENTS, 0)
    assert schedule.cohort(10**12).clients == (1,)
    assert schedule.cohort(10**11).clients == ()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"cycle_length": 1}, "path is '' and rows has 0 entries: give one of them"),
        (
            {"cycle_length": 1, "path": "a.csv", "rows": ((0, 0),)},
            "path is 'a.csv' and rows has 1 entries: give one of them",
        ),
        ({"rows": ((0, 0),)}, "cycle_length is None; it must be at least 1: set it, or give a schedule that has one"),
        (
            {"rows": ((0, 0),), "cycle_length": 0},
            "cycle_length is 0; it must be a whole number of at least 1: raise cycle_length",
        ),
        ({"rows": ((0, 0, 0),)}, "rows holds (0, 0, 0); each row must be (round, client): correct the row"),
        ({"rows": ((0, "a"),)}, "rows is ((0, 'a'),); it must hold rows of integers: change rows"),
    ],
)
def test_parameters_are_checked_alone(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Trace(**parameters)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rows": ((0, 0), (3, 6)), "cycle_length": 1},
            "the trace lists client 6 in round 3; clients run from 0 to 5: correct the trace",
        ),
        (
            {"rows": ((3, -1),), "cycle_length": 1},
            "the trace lists client -1 in round 3; clients run from 0 to 5: correct the trace",
        ),
        (
            {"rows": ((-2, 0),), "cycle_length": 1},
            "the trace lists round -2; it must be at least 0: rounds count from 0",
        ),
        (
            {"rows": ROWS, "cycle_length": 3, "schedule": TURNS},
            "cycle_length is 3 but the schedule has 2 groups: drop cycle_length",
        ),
    ],
)
def test_rows_are_checked_against_the_clients(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Trace(**parameters).bind(CLIENTS, 0)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("round,client\n", "the trace has no rows; it must have at least 1"),
        ("", "cannot read trace"),
        ("time,client\n0,1\n", "it needs columns round,client of integers"),
        ("round,client\n0,one\n", "it needs columns round,client of integers"),
        ("round,client\n0,1.5\n", "it needs columns round,client of integers"),
        ("round,client\n0\n", "it needs columns round,client of integers"),
    ],
)
def test_broken_csv_is_refused_in_one_line(text: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        Trace(path=write_csv(tmp_path, text), cycle_length=1).bind(CLIENTS, 0)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arrays",
    [{"round": [0]}, {"round": [0.5], "client": [1]}, {"round": [0, 1], "client": [1]}],
    ids=["missing", "fractions", "unequal"],
)
def test_broken_npz_is_refused_in_one_line(arrays: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^cannot read trace .*it needs columns round,client of integers$"):
        Trace(path=write_npz(tmp_path, **arrays), cycle_length=1).bind(CLIENTS, 0)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"plain"])
def test_a_file_that_is_no_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"^cannot read trace "):
        Trace(path=str(tmp_path / "trace.npz"), cycle_length=1).bind(CLIENTS, 0)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^path is 'nowhere.csv', which is no file: give a CSV or .npz"):
        Trace(path="nowhere.csv", cycle_length=1).bind(CLIENTS, 0)
