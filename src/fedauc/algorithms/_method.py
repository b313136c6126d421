"""How a method of the literature is told: an algorithm, a schedule, and defaults that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedauc.interfaces import Algorithm


@dataclass(frozen=True)
class Method:
    """A name from the literature for an algorithm under a participation, with defaults that train."""

    name: str
    algorithm: type[Algorithm]
    participation: str
    learning_rate: float
    parameters: tuple[tuple[str, Any], ...] = ()
    reference: str = ""
