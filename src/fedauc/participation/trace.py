"""A recorded availability trace, which lists the clients that were available in each round."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._common import ClientLists, check_round, make_cohort, nonempty_clients, to_integer_rows
from fedauc.participation.cyclic import Cyclic

COLUMNS = ("round", "client")


@dataclass(frozen=True)
class Trace(Participation):
    """Rows of (round, client) list who is available, from `path` (CSV with header round,client, or .npz) or `rows`.

    Without a `schedule`, the cohort of a round is the clients that the trace lists, and `cycle_length` gives the rounds
    of a cycle. With a `schedule`, its cohort is due, clients that the trace does not list are skipped and named in
    `Cohort.absent`, and a cycle is that of the schedule. A cohort may be empty. The trace ends with the last round that
    it lists; with `repeat` it then starts again.

    >>> trace = Trace(rows=((0, 0), (1, 2)), schedule=Cyclic(given=((0, 1), (2,))))
    >>> trace.bind(Roster(sizes=np.array([5, 5, 5])), seed=0).cohort(0)
    Cohort(round=0, clients=(0,), weights=(1.0,), absent=(1,), expected_size=None)
    """

    name: ClassVar[str] = "trace"

    path: str = option("", "File with columns round and client, CSV or .npz.")
    rows: tuple[tuple[int, int], ...] = option((), "Pairs of (round, client), instead of a file.")
    cycle_length: int | None = option(None, "Rounds per cycle, where there is no schedule.", at_least=1)
    schedule: Cyclic | None = option(None, "Schedule whose clients are due; the trace then says who is absent.")
    repeat: bool = option(False, "Whether the trace starts again after its last round.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", to_integer_rows("rows", self.rows))
        malformed = [row for row in self.rows if len(row) != 2]
        if malformed:
            raise ValueError(f"rows holds {malformed[0]}; each row must be (round, client): correct the row")
        super().__post_init__()
        if bool(self.path) == bool(self.rows):
            raise ValueError(f"path is {self.path!r} and rows has {len(self.rows)} entries: give one of them")
        if self.cycle_length is None and self.schedule is None:
            raise ValueError("cycle_length is None; it must be at least 1: set it, or give a schedule that has one")

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Read the trace, and check it against the clients."""
        table = _read_trace(self.path) if self.path else np.array(self.rows, dtype=np.int64)
        _check_trace(table, len(clients.sizes))
        last_round = int(table[:, 0].max())
        nonempty = nonempty_clients(clients)
        # A client that is listed twice in a round counts once, and an empty client is never available.
        table = np.unique(table[np.isin(table[:, 1], nonempty)], axis=0)
        available = ClientLists(table[:, 0], table[:, 1], last_round + 1)
        if self.schedule is None:
            assert self.cycle_length is not None
            return _TraceSchedule(available, self.repeat, [nonempty], self.cycle_length, None)
        due = self.schedule.bind(clients, seed)
        if self.cycle_length not in (None, due.cycle_length):
            raise ValueError(
                f"cycle_length is {self.cycle_length} but the schedule has {due.cycle_length} groups: drop cycle_length"
            )
        return _TraceSchedule(available, self.repeat, due.groups, due.cycle_length, due)


class _TraceSchedule(Schedule):
    """The clients that the trace lists; with another schedule, its clients less those that the trace does not list."""

    def __init__(
        self,
        available: ClientLists,
        repeat: bool,
        groups: Sequence[np.ndarray],
        cycle_length: int,
        due: Schedule | None,
    ) -> None:
        self.groups, self.cycle_length = groups, cycle_length
        self._available, self._repeat, self._due = available, repeat, due

    def cohort(self, round: int) -> Cohort:
        round, length = check_round(round), len(self._available)
        if round >= length and not self._repeat:
            remedy = "run fewer rounds or set repeat=True"
            raise ValueError(f"round is {round}; the trace ends at round {length - 1}: {remedy}")
        available = self._available[round % length]
        if self._due is None:
            return make_cohort(round, available)
        due = np.array(self._due.cohort(round).clients, dtype=np.int64)
        present = np.isin(due, available)
        return make_cohort(round, due[present], tuple(due[~present].tolist()))


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


def _read_trace(path: str) -> np.ndarray:
    """The rows of a trace, int64 `[rows, 2]`: round and client. Other columns and arrays are ignored."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"path is {path!r}, which is no file: give a CSV or .npz with round and client")
    try:
        return _read_npz(file) if file.suffix == ".npz" else _read_csv(file)
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read trace {path!r} ({reason}): it needs columns round,client of integers") from None


def _read_npz(file: Path) -> np.ndarray:
    # numpy leaves a broken file open when it is given a path.
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        columns = [arrays[name] for name in COLUMNS]
    if any(column.dtype.kind not in "iu" for column in columns):
        raise ValueError("arrays are not integers")
    return np.stack(columns, axis=1).astype(np.int64)


def _read_csv(file: Path) -> np.ndarray:
    with file.open(encoding="utf-8-sig") as lines:
        header = [word.strip() for word in lines.readline().split(",")]
        positions = [header.index(name) for name in COLUMNS]
        rows = (line for line in lines if line.strip())
        first = list(itertools.islice(rows, 1))
        # numpy warns about an empty table; the caller has a better message.
        if not first:
            return np.empty((0, 2), dtype=np.int64)
        every_row = itertools.chain(first, rows)
        return np.loadtxt(every_row, dtype=np.int64, delimiter=",", comments=None, usecols=positions, ndmin=2)
