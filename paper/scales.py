"""The size of an experiment, as it is written in `scales.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedauc.algorithms import find_methods
from fedauc.experiments.config import Config
from fedauc.experiments.options import build_config
from fedauc.experiments.presets import find_settings
from fedauc.experiments.recipe import Recipe
from fedauc.participation import find_participations

Options = Mapping[str, str]
"""Options of `fedauc run` and their values."""


@dataclass(frozen=True)
class Scale:
    """The length of a run, the options of each dataset, and the values that figures vary.

    `published` says whether results may stand beside the paper's, `positive_option` is the option that repetitions over
    positive classes change, and `method_options` are the options that a method changes on a dataset.
    """

    name: str
    published: bool
    cycles: int
    local_steps: int
    groups: int
    common: Options
    datasets: Mapping[str, Options]
    intervals: Sequence[int]
    cohorts: Sequence[int]
    group_counts: Sequence[int]
    positive_option: str
    method_options: Mapping[str, Mapping[str, Options]] = field(default_factory=dict)

    @staticmethod
    def read(name: str) -> Scale:
        """A scale of `scales.toml`, with the options of a dataset's kind in those of the dataset."""
        text: dict[str, Any] = tomllib.loads((Path(__file__).parent / "scales.toml").read_text())[name]
        kinds, methods, datasets = text.pop("kinds"), text.pop("methods", {}), text.pop("datasets")
        kind_of = {dataset: options.pop("kind") for dataset, options in datasets.items()}
        return Scale(
            name=name,
            datasets={dataset: kinds[kind_of[dataset]] | options for dataset, options in datasets.items()},
            method_options={dataset: methods[kind] for dataset, kind in kind_of.items() if kind in methods},
            **text,
        )

    def build_config(self, dataset: str, method: str, options: Options) -> Config:
        """A run of a method on a dataset. `options` win over the scale's, and a preset among them over the dataset's.

        Another partition or another rule of stages drops the scale's numbers for it.
        """
        length = {"cycles": str(self.cycles), "local-steps": str(self.local_steps)}
        length |= {"participation.groups": str(self.groups)}
        usual = {**self.common, **self.datasets[dataset], **self.method_options.get(dataset, {}).get(method, {})}
        for family in ("partition", "stages"):
            usual = _drop_prefix(f"{family}.", usual) if family in options else usual
        if "preset" in options:
            decided = {_option_of(name) for name in find_settings(options["preset"], method)}
            usual = {
                name: value
                for name, value in usual.items()
                if name not in decided and name.split(".")[0] not in decided
            }
        merged = {**length, **usual, **options}
        schedule = find_participations()[find_methods()[method].participation]
        if "groups" not in {known.name for known in fields(schedule)}:
            # All clients take part in every round, or the schedule of an own method has other parameters.
            merged = _drop_prefix("participation.", merged)
        return _build_cached(method, tuple(merged.items()))


def _option_of(setting: str) -> str:
    """The option of a setting of a preset, which is a field of the recipe or of the algorithm."""
    is_of_recipe = setting in {known.name for known in fields(Recipe)} | {"objective"}
    return setting.replace("_", "-") if is_of_recipe else f"algorithm.{setting.replace('_', '-')}"


def _drop_prefix(prefix: str, options: Options) -> dict[str, str]:
    return {name: value for name, value in options.items() if not name.startswith(prefix)}


@functools.lru_cache(maxsize=8192)
def _build_cached(method: str, options: tuple[tuple[str, str], ...]) -> Config:
    """Cached, because a report needs a thousand configurations several times, and each takes milliseconds."""
    return build_config(method, None, dict(options))


PAPER, SMOKE = Scale.read("paper"), Scale.read("smoke")
SCALES = {scale.name: scale for scale in (PAPER, SMOKE)}

IMAGES = ("cifar10", "cifar100", "chestmnist", "chest-stand-in")
"""The datasets that have the settings of image models."""
