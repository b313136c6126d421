"""A recorded availability trace: who was there in which round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation import _tables
from fedauc.participation._clients import check_count, nonempty_clients, to_integer_rows
from fedauc.participation._cohorts import check_round, equal_cohort
from fedauc.participation._ragged import ClientLists
from fedauc.participation.cyclic import Cyclic


@dataclass(frozen=True)
class Trace(Participation):
    """Rows of (round, client) say who is available, from `path` (CSV with header round,client, or .npz) or `rows`.

    Alone, a round's cohort is the clients the trace lists, and `cycle_length` says how many rounds a cycle has. With a
    `schedule`, that schedule's cohort is due, the clients the trace does not list are skipped and named in
    `Cohort.absent`, and a cycle is the schedule's. A cohort may be empty. The trace ends with its last listed round;
    with `repeat` it then starts again.

    >>> trace = Trace(rows=((0, 0), (1, 2)), schedule=Cyclic(given=((0, 1), (2,))))
    >>> trace.bind(Roster(sizes=np.array([5, 5, 5])), seed=0).cohort(0)
    Cohort(round=0, clients=(0,), weights=(1.0,), absent=(1,))
    """

    name: ClassVar[str] = "trace"

    path: str = ""
    rows: tuple[tuple[int, int], ...] = ()
    cycle_length: int | None = None
    schedule: Cyclic | None = None
    repeat: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", to_integer_rows("rows", self.rows))
        odd = [row for row in self.rows if len(row) != 2]
        if odd:
            raise ValueError(f"rows holds {odd[0]}; each row must be (round, client): correct the row")
        check_count("cycle_length", self.cycle_length)
        if bool(self.path) == bool(self.rows):
            raise ValueError(f"path is {self.path!r} and rows has {len(self.rows)} entries: give one of them")
        if self.cycle_length is None and self.schedule is None:
            raise ValueError("cycle_length is None; it must be at least 1: set it, or give a schedule that has one")

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Read the trace and check it against the clients."""
        available = self._read_available(clients)
        if self.schedule is None:
            assert self.cycle_length is not None
            return _TraceSchedule(available, nonempty_clients(clients), self.cycle_length, self.repeat)
        due = self.schedule.bind(clients, seed)
        if self.cycle_length not in (None, due.cycle_length):
            raise ValueError(
                f"cycle_length is {self.cycle_length} but the schedule has {due.cycle_length} groups: drop cycle_length"
            )
        return _FilteredSchedule(available, due, self.repeat)

    def _read_available(self, clients: Roster) -> ClientLists:
        table = _tables.read_trace(self.path) if self.path else np.array(self.rows, dtype=np.int64)
        _check_trace(table, len(clients.sizes))
        length = int(table[:, 0].max()) + 1
        # A client listed twice in a round is there once; an empty client never is.
        table = np.unique(table[np.isin(table[:, 1], nonempty_clients(clients))], axis=0)
        return ClientLists(table[:, 0], table[:, 1], length)


def _check_trace(table: np.ndarray, total: int) -> None:
    if len(table) == 0:
        raise ValueError("the trace has no rows; it must have at least 1: list a round and a client")
    if table[:, 0].min() < 0:
        raise ValueError(f"the trace lists round {table[:, 0].min()}; it must be at least 0: rounds count from 0")
    wrong = table[(table[:, 1] < 0) | (table[:, 1] >= total)]
    if len(wrong):
        raise ValueError(
            f"the trace lists client {wrong[0, 1]} in round {wrong[0, 0]}; clients run from 0 to {total - 1}: "
            f"correct the trace"
        )


def _clients_available(available: ClientLists, round: int, repeat: bool) -> np.ndarray:
    if round >= len(available) and not repeat:
        raise ValueError(
            f"round is {round}; the trace ends at round {len(available) - 1}: run fewer rounds or set repeat=True"
        )
    return available[round % len(available)]


class _TraceSchedule(Schedule):
    def __init__(self, available: ClientLists, holding: np.ndarray, cycle_length: int, repeat: bool) -> None:
        self.groups = (holding,)
        self.cycle_length = cycle_length
        self._available = available
        self._repeat = repeat

    def cohort(self, round: int) -> Cohort:
        round = check_round(round)
        return equal_cohort(round, _clients_available(self._available, round, self._repeat))


class _FilteredSchedule(Schedule):
    def __init__(self, available: ClientLists, due: Schedule, repeat: bool) -> None:
        self.groups = due.groups
        self.cycle_length = due.cycle_length
        self._available = available
        self._due = due
        self._repeat = repeat

    def cohort(self, round: int) -> Cohort:
        round = check_round(round)
        due = np.array(self._due.cohort(round).clients, dtype=np.int64)
        here = np.isin(due, _clients_available(self._available, round, self._repeat))
        return equal_cohort(round, due[here], tuple(due[~here].tolist()))
