"""Who takes part in which round: one file per schedule."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import Participation


def find_participations() -> dict[str, type[Participation]]:
    """Every participation in this folder, by name."""
    # mypy wants a concrete class for `type[T]`, but discovery looks for the subclasses of an abstract one.
    return find_members(__name__, Participation)  # type: ignore[type-abstract]
