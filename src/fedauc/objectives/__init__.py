"""The losses: one file per objective, found by its `name`."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import Objective


def find_objectives() -> dict[str, type[Objective]]:
    """Every objective in this folder, by name.

    >>> find_objectives()["squared-hinge"](margin=2.0)
    SquaredHinge(score='identity', margin=2.0)
    """
    return find_members(__name__, Objective)
