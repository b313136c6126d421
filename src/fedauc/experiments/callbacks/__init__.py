"""What happens beside training, one file each: evaluation, records, early stopping, the best model, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedauc.discovery import find_members
from fedauc.experiments.callbacks.best_model import BestModel
from fedauc.experiments.callbacks.callback import Callback
from fedauc.experiments.callbacks.early_stopping import EarlyStopping

if TYPE_CHECKING:
    from fedauc.experiments.recipe import Recipe

__all__ = ["Callback", "find_callbacks", "make_recipe_callbacks"]


def find_callbacks() -> dict[str, type[Callback]]:
    """Every callback that a configuration can name."""
    return find_members(__name__, Callback)


def make_recipe_callbacks(recipe: Recipe, has_validation: bool) -> list[Callback]:
    """The callbacks that a recipe asks for with `keep` and `patience`; both choose by the validation rows."""
    given = {"keep": recipe.keep != "last" and repr(recipe.keep), "patience": recipe.patience}
    for name, value in given.items():
        if value and not has_validation:
            remedy = f"hold out validation rows, or leave {name} at its default"
            raise ValueError(f"{name} is {value}, but there are no validation rows to compare rounds by: {remedy}")
    best = [BestModel()] if recipe.keep == "best" else []
    stopping = [] if recipe.patience is None else [EarlyStopping(recipe.patience)]
    return [*best, *stopping]
