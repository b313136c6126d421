"""How a method of the literature is declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedauc.interfaces import Algorithm


@dataclass(frozen=True)
class Method:
    """A method of the literature: an algorithm, a participation, and default settings that train well."""

    name: str
    algorithm: type[Algorithm]
    participation: str
    learning_rate: float
    parameters: tuple[tuple[str, Any], ...] = ()
    reference: str = ""
