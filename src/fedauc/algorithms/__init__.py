"""One file per algorithm, each with the method names it goes by. A new file is found, not registered."""

from __future__ import annotations

from fedauc.algorithms._method import Method
from fedauc.discovery import find_members, import_modules
from fedauc.interfaces import Algorithm


def find_algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by name."""
    return find_members(__name__, Algorithm)  # type: ignore[type-abstract]


def find_methods() -> dict[str, Method]:
    """Every method of the literature by name: an algorithm under a participation, with defaults that train."""
    return {method.name: method for module in import_modules(__name__) for method in getattr(module, "METHODS", ())}
