"""The size of an experiment: the paper's, or a smoke test of seconds on synthetic rows.

Everything is an option of `fedauc run`, so that a run can be repeated by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedauc.algorithms import find_methods
from fedauc.experiments.config import Config
from fedauc.experiments.options import build_config

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
    intervals: tuple[int, ...]
    cohorts: tuple[int, ...]
    group_counts: tuple[int, ...]
    positive_option: str
    method_options: Mapping[str, Mapping[str, Options]] = field(default_factory=dict)

    def build_config(self, dataset: str, method: str, options: Options) -> Config:
        """A run of a method on a dataset. `options` win over the scale's; another partition drops its numbers."""
        length = {"cycles": str(self.cycles), "local-steps": str(self.local_steps)}
        length |= {"participation.groups": str(self.groups)}
        data = self.datasets[dataset]
        data = _drop_prefix("partition.", data) if "partition" in options else data
        merged = {**length, **self.common, **data, **self.method_options.get(dataset, {}).get(method, {}), **options}
        if find_methods()[method].participation == "full":
            # All clients take part in every round, so that there are no groups.
            merged = _drop_prefix("participation.", merged)
        return _build_cached(method, tuple(merged.items()))


def _drop_prefix(prefix: str, options: Options) -> dict[str, str]:
    return {name: value for name, value in options.items() if not name.startswith(prefix)}


@functools.lru_cache(maxsize=8192)
def _build_cached(method: str, options: tuple[tuple[str, str], ...]) -> Config:
    """Cached, because a report needs a thousand configurations several times, and each takes milliseconds."""
    return build_config(method, None, dict(options))


IMAGES = ("cifar10", "cifar100", "chestmnist", "chest-stand-in")
"""The datasets that have the settings of image models."""

_IMAGES = {"partition": "dirichlet", "partition.clients": "100", "partition.concentration": "0.5"}
_IMAGES |= {"precision": "mixed", "stages.decay": "1", "stage-output": "round_mean", "algorithm.weight-decay": "0.001"}
_PHOTOGRAPHS = _IMAGES | {"model": "resnet18", "augment": "crop-flip"}
_LUNGS = _IMAGES | {"model": "densenet121", "remove-positives": "0.5"}
_FEW_POSITIVES = {"positives": "4", "negatives": "28"}
_MINIMAX = _FEW_POSITIVES | {"algorithm.weight-decay": "0.003"}
_PAIRWISE = _FEW_POSITIVES | {"weighting": "pooled"}
_METHOD_OPTIONS = {f"{clients}-minimax": _MINIMAX for clients in ("cycp", "rs")} | {
    f"{clients}-pairwise": _PAIRWISE for clients in ("cycp", "rs")
}
_INSURANCE = {"partition": "natural", "model": "linear"}
_CARD_FRAUD = {"data": "creditcard-full", "data.validation-fraction": "0.2", "partition": "natural"}
_CARD_FRAUD |= {"participation.groups": "none"}

PAPER = Scale(
    name="paper",
    published=True,
    cycles=100,
    local_steps=16,
    groups=10,
    common={
        "positives": "16",
        "negatives": "16",
        "algorithm.weight-decay": "0.0001",
        "evaluate-every": "2",
    },
    datasets={
        "cifar10": _PHOTOGRAPHS | {"data": "cifar10", "remove-positives": "0.95"},
        "cifar100": _PHOTOGRAPHS | {"data": "cifar100", "remove-positives": "0.5"},
        "chestmnist": _LUNGS | {"data": "chestmnist"},
        "insurance": _INSURANCE | {"data": "medicare"},
        "chest-stand-in": _LUNGS | {"data": "chest-stand-in", "remove-positives": "0"},
        "insurance-synthetic": _INSURANCE | {"data": "medicare-like", "evaluate-every": "10"},
        "creditcard": _CARD_FRAUD | {"model": "linear"},
        "creditcard-mlp": _CARD_FRAUD | {"model": "mlp"},
    },
    intervals=(4, 8, 16, 32, 64),
    cohorts=(1, 2, 5, 10),
    group_counts=(1, 5, 10, 20, 50),
    positive_option="data.positive",
    method_options=dict.fromkeys(IMAGES, _METHOD_OPTIONS),
)
"""The paper's settings, read as in docs/paper_map.md. All clients of a group take part in its round.

Image models have a constant learning rate, and each stage hands on the mean over its rounds; the table `schedules`
shows why. The table `batches` shows why AUC methods have few positives per batch, and how they weight rows."""

_SYNTHETIC_ROWS = {"data": "synthetic", "data.clients": "40", "data.rows-per-client": "60", "model": "linear"}
_SYNTHETIC_ROWS |= {"partition": "dirichlet", "partition.clients": "40", "partition.concentration": "0.5"}
_SYNTHETIC_ROWS |= {"remove-positives": "0.5"}

SMOKE = Scale(
    name="smoke",
    published=False,
    cycles=3,
    local_steps=2,
    groups=4,
    common={"positives": "4", "negatives": "4", "algorithm.weight-decay": "0.0001", "evaluate-every": "1"},
    datasets={
        name: _SYNTHETIC_ROWS | {"data.features": str(features)}
        for features, name in enumerate(PAPER.datasets, start=5)
    },
    intervals=(1, 2, 3),
    cohorts=(1, 2, 5),
    group_counts=(1, 2, 4),
    positive_option="data-seed",
)
"""Synthetic rows and a linear model in place of every dataset: it shows that a table runs, and nothing else."""

SCALES = {scale.name: scale for scale in (PAPER, SMOKE)}
