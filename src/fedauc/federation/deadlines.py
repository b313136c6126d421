"""How long a round waits for the sites of each group, and what the server's policy asks of groups and their sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np


def read_group_deadlines(text: str) -> dict[str, float]:
    """Seconds by group from `group=seconds` pairs.

    >>> read_group_deadlines("day=3600,night=43200")
    {'day': 3600.0, 'night': 43200.0}
    """
    deadlines: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        group, _, number = (part.strip() for part in pair.partition("="))
        try:
            seconds = float(number)
        except ValueError:
            seconds = math.nan
        if not group or not 0 < seconds < math.inf:
            raise ValueError(f"group_deadlines holds {pair!r}; it must be pairs of a group and seconds, as in day=3600")
        if group in deadlines:
            raise ValueError(f"group_deadlines lists {group!r} twice; list each group once")
        deadlines[group] = seconds
    return deadlines


def check_deadline_groups(deadlines: Mapping[str, float], groups: Collection[str]) -> None:
    """Refuse a deadline for a group that no site of the table has."""
    unknown = sorted(set(deadlines) - set(groups))
    if unknown:
        known = ", ".join(map(repr, sorted({group for group in groups if group}))) or "no groups"
        raise ValueError(f"group_deadlines lists {unknown[0]!r}; the site table has {known}: correct one of them")


def check_enough(enough: int | None, groups: Sequence[np.ndarray], has_single_uploads: bool) -> None:
    """Refuse a number of answers that no round can exceed, or that would decide who is part of a protected sum."""
    if enough is None:
        return
    largest = max(len(group) for group in groups)
    if enough > largest:
        raise ValueError(f"enough is {enough}; the largest group has {largest} sites with rows: lower enough")
    if not has_single_uploads:
        reason = "a private run and a secure sum wait for every site until the deadline"
        raise ValueError(f"enough is {enough}, but {reason}: leave it out")
