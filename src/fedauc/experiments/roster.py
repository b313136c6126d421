"""`roster.json`: who takes part in a run. It is written when the run starts, and reports read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.clients import Clients
from fedauc.interfaces import Roster
from fedauc.training import Training

ROSTER_FILE = "roster.json"

MAX_CLIENTS_LISTED = 10_000
"""Of more clients the file holds totals only, so that it stays small for a million of them."""

MAX_GROUPS_LISTED = 1_000
"""Of more groups the file holds the first ones only."""


def describe_roster(clients: Clients, training: Training) -> dict[str, Any]:
    """Clients, rows and positives of a run: in all, per group of its schedule, and per client unless they are many."""
    positives, negatives = clients.census.positives, clients.census.negatives
    groups, sizes = training.schedule.groups, positives + negatives
    labels = [*([] if clients.groups is None else [clients.groups]), *clients.columns.values()]
    names = name_groups(groups[:MAX_GROUPS_LISTED], labels)
    roster = {
        "rounds": training.plan.total_rounds,
        "cycle_length": training.schedule.cycle_length,
        "clients": len(sizes),
        "rows": int(sizes.sum()),
        "positives": int(positives.sum()),
        "group_count": len(groups),
        "groups": [
            {
                "name": name,
                "clients": len(members),
                "rows": int(sizes[members].sum()),
                "positives": int(positives[members].sum()),
            }
            for name, members in zip(names, groups, strict=False)
        ],
    }
    if len(sizes) > MAX_CLIENTS_LISTED:
        return roster
    group_of_client = np.full(len(sizes), -1)
    for number, members in enumerate(groups):
        group_of_client[members] = number
    listed = {
        "name": [str(name) for name in clients.names.tolist()],
        "group": group_of_client.tolist(),
        "rows": sizes.tolist(),
        "positives": positives.tolist(),
        "label": None if clients.groups is None else clients.groups.tolist(),
        "columns": {name: values.tolist() for name, values in clients.columns.items()},
    }
    return roster | {"listed": listed}


def name_groups(groups: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> list[str]:
    """Names of groups: the labels that distinguish exactly these groups, or else numbers from 1.

    >>> name_groups([np.array([0, 1]), np.array([2])], [np.array(["day", "day", "night"])])
    ['day', 'night']
    >>> name_groups([np.array([0, 2]), np.array([1])], [np.array(["day", "day", "night"])])
    ['group 1', 'group 2']
    """
    for values in labels:
        shared = [set(values[members].tolist()) for members in groups]
        names = [str(next(iter(distinct))) for distinct in shared if len(distinct) == 1]
        if len(names) == len(set(names)) == len(groups):
            return names
    return [f"group {number + 1}" for number in range(len(groups))]


class RunRoster(NamedTuple):
    """What `roster.json` says. `listed` is None where there are too many clients to list them."""

    rounds: int
    cycle_length: int
    clients: int
    rows: int
    positives: int
    group_count: int
    groups: list[dict[str, Any]]
    listed: dict[str, Any] | None = None

    def for_participation(self) -> Roster:
        """What a participation needs to bind itself to these clients again; the clients must be listed."""
        assert self.listed is not None
        label = self.listed["label"]
        columns = {name: np.array(values) for name, values in self.listed["columns"].items()}
        return Roster(np.array(self.listed["rows"]), None if label is None else np.array(label), columns)
