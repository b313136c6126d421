"""Federated AUC maximization for clients that take part in cycles."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedauc.version import VERSION as __version__

if TYPE_CHECKING:
    from fedauc.data import Clients, Examples, examples
    from fedauc.data.datasets.table import Table
    from fedauc.estimator import FederatedAUCClassifier
    from fedauc.experiments.config import Config
    from fedauc.experiments.fitting import Fitted, fit
    from fedauc.experiments.recipe import Recipe
    from fedauc.experiments.registration import register
    from fedauc.guards import TrainingStopped
    from fedauc.scoring.scorer import Scorer, load

__all__ = [
    "Clients",
    "Config",
    "Examples",
    "FederatedAUCClassifier",
    "Fitted",
    "Recipe",
    "Scorer",
    "Table",
    "TrainingStopped",
    "__version__",
    "examples",
    "fit",
    "load",
    "register",
]

_HOMES = {
    "Clients": "fedauc.data",
    "Config": "fedauc.experiments.config",
    "Examples": "fedauc.data",
    "FederatedAUCClassifier": "fedauc.estimator",
    "Fitted": "fedauc.experiments.fitting",
    "Recipe": "fedauc.experiments.recipe",
    "Scorer": "fedauc.scoring.scorer",
    "Table": "fedauc.data.datasets.table",
    "TrainingStopped": "fedauc.guards",
    "examples": "fedauc.data",
    "fit": "fedauc.experiments.fitting",
    "load": "fedauc.scoring.scorer",
    "register": "fedauc.experiments.registration",
}
"""Where the public names are defined. They are imported on first use, because torch takes seconds to import."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedauc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
