"""`fedauc.register`: make your own members known by name, without a file in the library."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from fedauc import plugins
from fedauc.algorithms import Method, find_methods
from fedauc.experiments.config import list_families
from fedauc.metrics import find_metrics

T = TypeVar("T", bound=type | ModuleType | Method)


def register(item: T) -> T:
    """Register a class, a `Method`, or everything that a module defines, and return it; usable as a class decorator.

    The name then works wherever the library's own names do: in `Recipe.of`, on the command line, in a configuration
    file, in a resumed run and at the sites of a federation. A name that is in use is refused.

    >>> from fedauc.objectives.kinds import GapObjective
    >>> from fedauc.objectives import find_objectives
    >>> with plugins.restore_registrations():
    ...     steep = type("Steep", (GapObjective,), {"name": "steep", "pair_loss": lambda self, gap: (-9 * gap).exp()})
    ...     register(steep) is find_objectives()["steep"]
    True
    """
    saved = plugins.save_registrations()
    try:
        _add_item(item)
        # Looking members up refuses two of one kind with the same name.
        find_methods()
        kinds = list_kinds()
        if isinstance(item, type) and not any(item in members.values() for members in kinds.values()):
            remedy = f"what can be registered is a method, {', '.join(kinds)}"
            raise ValueError(f"{plugins.describe_owner(item)} is of no kind that a configuration can name; {remedy}")
    except ValueError:
        plugins.load_registrations(saved)
        raise
    return item


def list_kinds() -> dict[str, Mapping[str, type]]:
    """The members of every kind that a configuration can name, besides methods."""
    kinds = {family.kind: family.members for family in list_families()}
    return {**kinds, "metric": find_metrics()}


def _add_item(item: Any) -> None:
    if isinstance(item, ModuleType):
        plugins.add_module(item)
    elif isinstance(item, Method):
        plugins.add_method(item)
    elif isinstance(item, type):
        plugins.add_class(item)
    else:
        raise ValueError(
            f"register takes a class, a Method or a module, not {item!r}; register the class of an instance"
        )
