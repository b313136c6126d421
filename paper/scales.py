"""How large an experiment is: the paper's, or a smoke test of seconds on drawn rows.

Everything is said in the options of `fedauc run`, so that a record can be repeated by hand.
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
    """The numbers of a run, the data behind each dataset's name, and the values that figures go through.

    `positive` is the option that tells apart the repetitions over positive classes; `published` says whether results
    may stand beside the paper's; `ways` is what methods change on a dataset.
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

    def build_config(self, dataset: str, method: str, texts: Options) -> Config:
        """A run of a method on a dataset; later texts win over the scale's, and another partition drops its numbers."""
        numbers = {"cycles": str(self.cycles), "local-steps": str(self.local_steps)}
        numbers |= {"participation.groups": str(self.groups)}
        own = _drop_prefix("partition.", self.datasets[dataset]) if "partition" in texts else self.datasets[dataset]
        merged = {**numbers, **self.common, **own, **self.method_options.get(dataset, {}).get(method, {}), **texts}
        if find_methods()[method].participation == "full":
            # Everyone takes part in every round: there are no groups to count.
            merged = _drop_prefix("participation.", merged)
        return _build_cached(method, tuple(merged.items()))


def _drop_prefix(prefix: str, texts: Options) -> dict[str, str]:
    return {name: text for name, text in texts.items() if not name.startswith(prefix)}


@functools.lru_cache(maxsize=8192)
def _build_cached(method: str, texts: tuple[tuple[str, str], ...]) -> Config:
    """Kept, because a report asks for a thousand configurations several times, and each takes milliseconds."""
    return build_config(method, None, dict(texts))


IMAGES = ("cifar10", "cifar100", "chestmnist", "chest-stand-in")
"""The datasets that have the settings of image models."""

_IMAGES = {"partition": "dirichlet", "partition.clients": "100", "partition.concentration": "0.5"}
_IMAGES |= {"precision": "mixed", "stages.decay": "1", "stage-output": "round_mean", "algorithm.weight-decay": "0.001"}
_PHOTOGRAPHS = _IMAGES | {"model": "resnet18", "augment": "crop-flip"}
_LUNGS = _IMAGES | {"model": "densenet121", "remove-positives": "0.5"}
_FEW_POSITIVES = {"positives": "4", "negatives": "28"}
_MINIMAX = _FEW_POSITIVES | {"algorithm.weight-decay": "0.003"}
_PAIRWISE = _FEW_POSITIVES | {"weighting": "pooled"}
_WAYS = {f"{way}-minimax": _MINIMAX for way in ("cycp", "rs")} | {
    f"{way}-pairwise": _PAIRWISE for way in ("cycp", "rs")
}
_STATES = {"partition": "natural", "model": "linear"}
_HOURS = {"data": "creditcard-full", "data.validation-fraction": "0.2", "partition": "natural"}
_HOURS |= {"participation.groups": "none"}

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
        "insurance": _STATES | {"data": "medicare"},
        "chest-stand-in": _LUNGS | {"data": "chest-stand-in", "remove-positives": "0"},
        "insurance-synthetic": _STATES | {"data": "medicare-like", "evaluate-every": "10"},
        "creditcard": _HOURS | {"model": "linear"},
        "creditcard-mlp": _HOURS | {"model": "mlp"},
    },
    intervals=(4, 8, 16, 32, 64),
    cohorts=(1, 2, 5, 10),
    group_counts=(1, 5, 10, 20, 50),
    positive_option="data.positive",
    method_options=dict.fromkeys(IMAGES, _WAYS),
)
"""The paper's settings, read as in docs/paper_map.md. Groups take part whole: 10 of 100 clients where none is empty.

Image models keep their learning rate, and hand on the mean over each stage's rounds; `sheets.schedules` shows why, and
`sheets.batches` why the AUC methods draw few positives, and weigh rows or clients alike."""

_DRAWN = {"data": "synthetic", "data.clients": "40", "data.rows-per-client": "60", "model": "linear"}
_DRAWN |= {"partition": "dirichlet", "partition.clients": "40", "partition.concentration": "0.5"}
_DRAWN |= {"remove-positives": "0.5"}

SMOKE = Scale(
    name="smoke",
    published=False,
    cycles=3,
    local_steps=2,
    groups=4,
    common={"positives": "4", "negatives": "4", "algorithm.weight-decay": "0.0001", "evaluate-every": "1"},
    datasets={name: _DRAWN | {"data.features": str(features)} for features, name in enumerate(PAPER.datasets, start=5)},
    intervals=(1, 2, 3),
    cohorts=(1, 2, 5),
    group_counts=(1, 2, 4),
    positive_option="data-seed",
)
"""Drawn rows and a linear scorer in place of every dataset: it shows that an experiment runs, and nothing else."""

SCALES = {scale.name: scale for scale in (PAPER, SMOKE)}
