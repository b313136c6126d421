"""Suites for your own members: `check_objective(MyLoss())` raises an AssertionError with a sentence, or returns.

Each suite is a file, `algorithm.py` with `check_algorithm`, and the library's own members pass the same suites in its
tests. They need torch and numpy, and no test framework.

>>> from fedauc.objectives.sigmoid import PairwiseSigmoid
>>> check_objective = __getattr__("check_objective")
>>> check_objective(PairwiseSigmoid(scale=0.5))
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from fedauc.discovery import lookup

if TYPE_CHECKING:
    from fedauc.testing.algorithm import check_algorithm as check_algorithm
    from fedauc.testing.callback import check_callback as check_callback
    from fedauc.testing.dataset import check_dataset as check_dataset
    from fedauc.testing.engine import check_engine as check_engine
    from fedauc.testing.mean import check_mean as check_mean
    from fedauc.testing.metric import check_metric as check_metric
    from fedauc.testing.model import check_model as check_model
    from fedauc.testing.objective import check_objective as check_objective
    from fedauc.testing.participation import check_participation as check_participation
    from fedauc.testing.partition import check_partition as check_partition
    from fedauc.testing.server_optimizer import check_server_optimizer as check_server_optimizer
    from fedauc.testing.stage_rule import check_stage_rule as check_stage_rule
    from fedauc.testing.transform import check_transform as check_transform
    from fedauc.testing.wrapper import check_wrapper as check_wrapper

PREFIX = "check_"


def list_suites() -> list[str]:
    """The names of all suites: one for every file of this folder that others than its neighbours need."""
    return [f"{PREFIX}{module.name}" for module in pkgutil.iter_modules(__path__) if _is_suite(module.name)]


def _is_suite(module: str) -> bool:
    return not module.startswith("_") and module != "small_federation"


def __getattr__(name: str) -> Any:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        lookup("suite", name, dict.fromkeys(list_suites()))
    except ValueError as error:
        raise AttributeError(str(error)) from error
    return getattr(importlib.import_module(f"{__name__}.{name.removeprefix(PREFIX)}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *list_suites()})
