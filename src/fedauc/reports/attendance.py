"""Who took part in which round: from the schedule of a simulation, or from the attendance lines of a federation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fedauc.experiments.roster import RunRoster
from fedauc.federation.server import ATTENDANCE_FILE
from fedauc.reports.report_runs import ReportRun

MAX_CLIENTS = 200
"""A calendar of more clients has a row per group."""

MAX_ROUNDS = 300
"""A calendar of more rounds shows the last ones."""


class Calendar(NamedTuple):
    """Counts of clients that took part and that were absent, `[rows, rounds]`, from round `first_round` on.

    A row is a client of the group `row_groups`, or a whole group. `visits` and `absences` cover all rounds so far,
    `[rows]`; `sizes` is the number of clients of a row.
    """

    rows: list[str]
    row_groups: np.ndarray
    group_names: list[str]
    sizes: np.ndarray
    first_round: int
    present: np.ndarray
    absent: np.ndarray
    visits: np.ndarray
    absences: np.ndarray

    @property
    def is_aggregate(self) -> bool:
        """Whether a row is a group."""
        return bool((self.sizes > 1).any())


def build_calendar(run: ReportRun) -> Calendar | str:
    """The calendar of a run, or a sentence that says why there is none."""
    roster = run.roster
    if roster is None:
        return "This folder has no roster.json, which newer runs write when they start, so that nobody can be named."
    if roster.listed is None:
        return f"The run has {roster.clients:,} clients; more than 10,000 are not listed one by one."
    if not run.records and not run.is_federation:
        return "No round has been evaluated yet."
    names, groups = list(roster.listed["name"]), np.array(roster.listed["group"])
    group_names = [group["name"] for group in roster.groups]
    if roster.clients <= MAX_CLIENTS:
        # Clients of one group stand together; those without rows are in no group and never come.
        order = np.lexsort((np.arange(len(names)), groups))
        order = order[groups[order] >= 0]
        row_of_client = np.full(len(names), -1)
        row_of_client[order] = np.arange(len(order))
        rows, row_groups, sizes = [names[client] for client in order], groups[order], np.ones(len(order), dtype=int)
    else:
        row_of_client = groups
        rows, row_groups = group_names, np.arange(len(group_names))
        sizes = np.array([group["clients"] for group in roster.groups])
    try:
        rounds, cohorts = _list_cohorts(run, roster)
    except ValueError as error:
        return f"The schedule cannot be read again: {error}."
    first = max(0, rounds - MAX_ROUNDS)
    present, absent = (np.zeros((len(rows), rounds - first), dtype=np.int64) for _ in range(2))
    visits, absences = (np.zeros(len(rows), dtype=np.int64) for _ in range(2))
    for round, cohort in enumerate(cohorts):
        for clients, total, cells in zip(cohort, (visits, absences), (present, absent), strict=True):
            members = row_of_client[clients]
            counts = np.bincount(members[(members >= 0) & (members < len(rows))], minlength=len(rows))
            total += counts
            if round >= first:
                cells[:, round - first] = counts
    return Calendar(rows, row_groups, group_names, sizes, first, present, absent, visits, absences)


def _list_cohorts(run: ReportRun, roster: RunRoster) -> tuple[int, Iterator[tuple[np.ndarray, np.ndarray]]]:
    """How many rounds are done, and for each the clients that took part and those that were absent."""
    if run.is_federation:
        assert roster.listed is not None
        number = {name: client for client, name in enumerate(roster.listed["name"])}
        lines = run.folder.read_lines(ATTENDANCE_FILE)
        # An answer to an earlier round counts in the round that has used it.
        cohorts = (([*line["answered"], *line.get("late", ())], [*line["absent"], *line["refused"]]) for line in lines)
        return len(lines), (
            (_to_indices(number[name] for name in came), _to_indices(number[name] for name in missing))
            for came, missing in cohorts
        )
    schedule = run.recipe.participation.bind(roster.for_participation(), run.recipe.seed)
    drawn = (schedule.cohort(round) for round in range(run.rounds_done))
    return run.rounds_done, ((_to_indices(cohort.clients), _to_indices(cohort.absent)) for cohort in drawn)


def _to_indices(clients: Iterable[int]) -> np.ndarray:
    return np.array(list(clients), dtype=np.int64)
