"""How a cohort's local steps are run. Every engine gives the reference loop's result."""

from __future__ import annotations

from fedauc.discovery import members
from fedauc.engines.simulator import Simulator


def engines() -> dict[str, type[Simulator]]:
    """Every engine that simulates a federation in this process, by name."""
    return members(__name__, Simulator)  # type: ignore[type-abstract]
