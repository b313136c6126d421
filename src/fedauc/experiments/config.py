"""The frozen configuration of a run: data, model and recipe, to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedauc.data.dataset import Dataset
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.preparation import Preparation
from fedauc.experiments.codec import from_plain, to_plain
from fedauc.experiments.recipe import Recipe
from fedauc.models.linear import Linear
from fedauc.models.model import ModelConfig

FORMAT = 1
"""Raised when an old reader could misunderstand a new configuration."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's records.

    `data_seed` keys the split, the removal, the label noise and the partition; `recipe.seed` everything in training.
    Evaluation and checkpoints come every so many cycles, and after the last.

    >>> config = Config(recipe=Recipe.of("cycp-minimax", cycles=2))
    >>> Config.from_json(config.to_json()) == config
    True
    """

    recipe: Recipe
    data: Dataset = CreditCard()
    preparation: Preparation = Preparation()
    model: ModelConfig = Linear()
    data_seed: int = 0
    evaluate_every: int = 1
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        for name in ("evaluate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1 cycle")

    def to_json(self) -> str:
        """Indented JSON, with the format it is written in."""
        return json.dumps({"format": FORMAT, **to_plain(self)}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "configuration") -> Config:
        """Read a configuration; one line says what is wrong with it."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON (line {error.lineno}: {error.msg}); fix or regenerate it") from error
        if not isinstance(data, dict):
            raise ValueError(f"{where} is a {type(data).__name__}; it must be a JSON object")
        found = data.pop("format", FORMAT)
        if not isinstance(found, int) or found > FORMAT:
            raise ValueError(f"{where} has format {found}; this version reads up to {FORMAT}: upgrade fedauc")
        data["recipe"] = _filled(data.get("recipe"), where)
        config: Config = from_plain(Config, data, where)
        return config

    @staticmethod
    def read(path: Path) -> Config:
        """Read a configuration file."""
        if not path.is_file():
            raise ValueError(f"configuration {path} does not exist; give the path of a JSON file")
        return Config.from_json(path.read_text(encoding="utf-8"), f"configuration {path}")


def _filled(recipe: Any, where: str) -> Any:
    """A recipe that leaves things out gets its method's defaults."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("method"), str):
        raise ValueError(f"{where}.recipe is {recipe!r}; it must be an object with a method, such as 'cycp-pairwise'")
    return _merged(to_plain(Recipe.of(recipe["method"])), recipe)


def _merged(default: Any, given: Any) -> Any:
    """What is given, over defaults of the same member."""
    if not isinstance(default, dict) or not isinstance(given, dict):
        return given
    if given.get("name", default.get("name")) != default.get("name"):
        return given
    return default | {key: _merged(default.get(key), value) for key, value in given.items()}
