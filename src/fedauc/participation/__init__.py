"""Who takes part in which round: one file per schedule, found by discovery."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import Participation


def find_participations() -> dict[str, type[Participation]]:
    """Every participation of this folder, by name."""
    # mypy wants a concrete class for `type[T]`; an abstract base is exactly what discovery looks under.
    return find_members(__name__, Participation)  # type: ignore[type-abstract]
