"""One file per algorithm, which also lists the methods of the literature that use it. New files are found by name."""

from __future__ import annotations

from fedauc.algorithms._local import Method
from fedauc.discovery import find_members, import_modules
from fedauc.interfaces import Algorithm

__all__ = ["Method", "find_algorithms", "find_methods"]


def find_algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by name."""
    return find_members(__name__, Algorithm)  # type: ignore[type-abstract]


def find_methods() -> dict[str, Method]:
    """Every method of the literature by name."""
    return {method.name: method for module in import_modules(__name__) for method in getattr(module, "METHODS", ())}
