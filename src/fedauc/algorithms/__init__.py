"""One file per algorithm, which also lists the methods of the literature that use it. New files are found by name."""

from __future__ import annotations

from fedauc.algorithms._local import Method
from fedauc.discovery import find_members, import_modules
from fedauc.interfaces import Algorithm
from fedauc.plugins import name_clash, registered_methods

__all__ = ["Method", "find_algorithms", "find_methods"]


def find_algorithms() -> dict[str, type[Algorithm]]:
    """Every algorithm by name."""
    return find_members(__name__, Algorithm)  # type: ignore[type-abstract]


def find_methods() -> dict[str, Method]:
    """Every method of the literature by name."""
    methods: dict[str, Method] = {}
    for module in import_modules(__name__):
        methods |= {method.name: method for method in getattr(module, "METHODS", ())}
    for method, module_name in registered_methods():
        if methods.setdefault(method.name, method) is not method:
            owner = methods[method.name].algorithm.__module__
            raise ValueError(name_clash("method", method.name, owner, module_name))
    return methods
