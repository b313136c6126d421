"""Sites that join or leave between cycles: who belongs to a run from which round on.

The operator pauses the run at the end of a cycle, changes the site table, and resumes. A site that is new in the table
registers its class counts and gets the next client number; one that is no longer in the table keeps its number and
counts as without rows; one that returns registers again under its old number. Class totals, weightings and the schedule
are computed anew from then on. The model and everything else that the server holds stay as they are, so that the run
equals a simulation that goes on from the same state with the other clients.

membership.json in the run's folder holds one entry per change, with the first round that it counts for. A run that is
rewound to an earlier checkpoint forgets the changes of later rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.config import from_plain, to_plain
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import find_secure_sum
from fedauc.federation.agreement import SiteEntry
from fedauc.files import write_atomically
from fedauc.interfaces import Census
from fedauc.stages import Plan

MEMBERSHIP_FILE = "membership.json"


class Members(NamedTuple):
    """The sites of a run in the order of their client numbers, with their class counts, from a round on.

    `left` are the clients that are no longer in the site table.
    """

    round: int
    sites: tuple[SiteEntry, ...]
    census: Census
    left: frozenset[int] = frozenset()

    @property
    def names(self) -> list[str]:
        """The names of all sites, also of those that have left."""
        return [site.name for site in self.sites]

    def to_json(self) -> dict[str, Any]:
        """Plain values for an entry of membership.json."""
        counts = {"positives": self.census.positives.tolist(), "negatives": self.census.negatives.tolist()}
        left = [self.sites[client].name for client in sorted(self.left)]
        return {"round": self.round, "sites": to_plain(self.sites), "left": left, **counts}

    @staticmethod
    def from_json(stored: Mapping[str, Any], where: str) -> Members:
        """What `to_json` wrote."""
        sites = tuple(from_plain(SiteEntry, entry, where) for entry in stored["sites"])
        left = frozenset(client for client, site in enumerate(sites) if site.name in stored["left"])
        census = Census(np.array(stored["positives"]), np.array(stored["negatives"]))
        return Members(int(stored["round"]), sites, census, left)


class TableChange(NamedTuple):
    """How a site table differs from a run's members, and the members with the table's keys and new rows.

    `joining` are clients that must register; those that are new have the last numbers, in the order of their names.
    """

    members: Members
    joining: tuple[int, ...]
    leaving: tuple[int, ...]

    @property
    def unchanged_members(self) -> Members:
        """The members as they were, with the table's keys."""
        return self.members._replace(sites=self.members.sites[: len(self.members.census.positives)])

    def settle(self, round: int, counts: Mapping[int, Sequence[int]]) -> Members:
        """The members from a round on; those of the joining sites that are not in `counts` have not registered."""
        members = self.members
        known = len(members.census.positives)
        settled = [*range(known), *(client for client in self.joining if client >= known and client in counts)]
        columns = np.zeros((2, len(settled)), dtype=np.int64)
        columns[:, :known] = members.census
        columns[:, list(self.leaving)] = 0
        for number, client in enumerate(settled):
            if client in counts:
                columns[:, number] = counts[client]
        if not columns.sum(axis=1).all():
            held = f"the sites would hold {columns[0].sum()} positives and {columns[1].sum()} negatives"
            raise ValueError(f"with the changed site table {held}; both are needed: restore it")
        left = (members.left | {*self.leaving}) - {*counts}
        return Members(round, tuple(members.sites[client] for client in settled), Census(*columns), frozenset(left))


def read_members(folder: Path, sites: tuple[SiteEntry, ...], census: Census, round: int) -> Members:
    """The members of a run before a round: those that it began with, or those of the last change until then."""
    path = folder / MEMBERSHIP_FILE
    members = Members(0, sites, census)
    for entry in _read_changes(path):
        if entry["round"] <= round:
            members = Members.from_json(entry, str(path))
    return members


def list_member_names(folder: Path, names: list[str]) -> list[str]:
    """The names of all sites that belong or belonged to a run, given those that it began with."""
    changes = _read_changes(folder / MEMBERSHIP_FILE)
    return [site["name"] for site in changes[-1]["sites"]] if changes else names


def compare_table(members: Members, table: tuple[SiteEntry, ...]) -> TableChange:
    """Who joins and who leaves with a site table; its keys count from now on, a site's group stays."""
    listed, known = {site.name: site for site in table}, members.names
    sites = [replace(site, key=listed[site.name].key) if site.name in listed else site for site in members.sites]
    new = sorted(set(listed) - set(known))
    returning = [client for client in sorted(members.left) if known[client] in listed]
    joining = (*returning, *range(len(known), len(known) + len(new)))
    leaving = tuple(client for client, name in enumerate(known) if name not in listed and client not in members.left)
    changed = members._replace(sites=(*sites, *(listed[name] for name in new)))
    return TableChange(changed, joining, leaving)


def check_change(change: TableChange, recipe: Recipe, plan: Plan, round: int) -> None:
    """Refuse a change in the middle of a cycle, and in runs whose promise depends on who belongs to them."""
    names = change.members.names
    changed = [names[client] for client in (*change.joining, *change.leaving)]
    text = f"the site table has changed since the run began ({changed})"
    if recipe.is_private or find_secure_sum(recipe) is not None:
        reason = "a private run and secure sums keep the sites that they began with"
        raise ValueError(f"{text}, but {reason}: restore it, or start a new run")
    if round and not plan.phase(round - 1).ends_cycle:
        cycle = plan.phase(round - 1).cycle
        remedy = "restore it, resume, and use `fedauc federation pause --at-cycle-end`"
        raise ValueError(f"{text}, but the run is in the middle of cycle {cycle + 1}: {remedy}")


def check_same_plan(old: Plan, new: Plan) -> None:
    """Refuse sites with which the rounds of the run would have other groups or another length."""
    old_shape, new_shape = ((plan.stages, plan.total_rounds, plan.scoring_rounds) for plan in (old, new))
    if old_shape != new_shape:
        lengths = f"{new.total_rounds} rounds instead of {old.total_rounds}"
        raise ValueError(
            f"with the changed site table the run would have {lengths}; keep the groups that it began with, or start "
            "a new run"
        )


def write_members(folder: Path, members: Members) -> None:
    """Add an entry to membership.json, in place of one of the same round."""
    path = folder / MEMBERSHIP_FILE
    changes = [entry for entry in _read_changes(path) if entry["round"] < members.round]
    _write_changes(path, [*changes, members.to_json()])


def forget_later_changes(folder: Path, round: int) -> None:
    """Remove the changes after a round, to which a run was rewound because later checkpoints are missing."""
    path = folder / MEMBERSHIP_FILE
    changes = _read_changes(path)
    remaining = [entry for entry in changes if entry["round"] <= round]
    if len(remaining) < len(changes):
        _write_changes(path, remaining)


def _write_changes(path: Path, changes: list[dict[str, Any]]) -> None:
    write_atomically(path, f"{json.dumps(changes, indent=2)}\n".encode())


def _read_changes(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        changes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; put a copy of it back, or start a new run") from error
    if not isinstance(changes, list):
        raise ValueError(f"{path} is damaged: it holds no list; put a copy of it back, or start a new run")
    return changes
