"""What happens beside training, one file each: evaluation, records, early stopping, the best model, progress."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedauc.discovery import find_members
from fedauc.experiments.callbacks.best_model import BestModel
from fedauc.experiments.callbacks.callback import Callback
from fedauc.experiments.callbacks.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from fedauc.experiments.recipe import Recipe

__all__ = ["Callback", "choose_callbacks", "find_callbacks"]


def find_callbacks() -> dict[str, type[Callback]]:
    """Every callback that a configuration can name."""
    return find_members(__name__, Callback)


def choose_callbacks(
    recipe: Recipe, given: Sequence[Callback], has_validation: bool, how_to_hold_out: str = ""
) -> tuple[Callback, ...]:
    """The callbacks that a recipe asks for with `keep` and `patience`, then the given ones.

    `how_to_hold_out` is what errors say about how to get validation rows.
    """
    for name, value, kind in (("keep", recipe.keep, BestModel), ("patience", recipe.patience, EarlyStopping)):
        if value not in ("last", None) and any(isinstance(callback, kind) for callback in given):
            raise ValueError(
                f"{name} is {value!r}, and callbacks lists {kind.name!r} too, which does the same; give one of them"
            )
    for name, value, default in (("keep", recipe.keep, "last"), ("patience", recipe.patience, None)):
        if value != default and not has_validation:
            remedy = f"{how_to_hold_out or 'hold out validation rows'}, or leave {name} at its default"
            raise ValueError(f"{name} is {value!r}, but there are no validation rows to compare rounds by: {remedy}")
    for callback in given:
        if callback.needs_validation and not has_validation:
            shown, remedy = getattr(callback, "name", callback), how_to_hold_out or "hold some out"
            raise ValueError(f"callbacks lists {shown!r}, which needs validation rows: {remedy}, or leave it out")
    for callback in given:
        missing = [package for package in callback.needs_packages if importlib.util.find_spec(package) is None]
        if missing:
            shown = getattr(callback, "name", callback)
            raise ValueError(f"callbacks lists {shown!r}, which needs a package: run pip install {' '.join(missing)}")
    best = [BestModel()] if recipe.keep == "best" else []
    stopping = [] if recipe.patience is None else [EarlyStopping(recipe.patience)]
    return (*best, *stopping, *given)
