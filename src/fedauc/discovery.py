"""Find the members of a folder: a new loss, schedule, algorithm or dataset is one new file, not an entry in a list."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def import_modules(package: str) -> list[ModuleType]:
    """Import every public module of a package and of the packages inside it, in alphabetical order."""
    home = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.walk_packages(home.__path__, f"{package}."))
    return [importlib.import_module(name) for name in names if not name.rpartition(".")[2].startswith("_")]


def find_members(package: str, base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of `base` that a package's modules define, by their `name`."""
    members: dict[str, type[T]] = {}
    for module in import_modules(package):
        for value in vars(module).values():
            is_local = inspect.isclass(value) and value.__module__ == module.__name__
            if is_local and issubclass(value, base) and not inspect.isabstract(value) and hasattr(value, "name"):
                name, new = vars(value).get("name", ""), value.__qualname__
                if name in members:
                    raise ValueError(f"name {name!r} is taken by {members[name].__qualname__}; give {new} another")
                members[value.name] = value
    return members


def lookup(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The member called `name`, or a one-line error with the nearest match.

    >>> lookup("method", "cycp-minmax", {"cycp-minimax": 1})
    Traceback (most recent call last):
    ...
    ValueError: unknown method 'cycp-minmax': did you mean 'cycp-minimax'? known: cycp-minimax
    """
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    # A list of a hundred options helps nobody.
    names = ", ".join(sorted(known)) if len(known) <= 40 else f"{len(known)} names, which --help lists"
    raise ValueError(f"unknown {kind} {name!r}: {suggestion}known: {names}")
