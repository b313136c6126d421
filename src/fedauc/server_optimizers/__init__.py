"""How the server moves the model, given the mean change of a cohort."""

from __future__ import annotations

from fedauc.discovery import find_members
from fedauc.interfaces import ServerOptimizer


def find_server_optimizers() -> dict[str, type[ServerOptimizer]]:
    """Every server optimizer, by name."""
    return find_members(__name__, ServerOptimizer)  # type: ignore[type-abstract]
