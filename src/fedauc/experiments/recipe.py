"""How to train, whatever the data and the model: a frozen recipe, and its assembly into a `Training`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fedauc.algorithms import methods
from fedauc.data.clients import Clients
from fedauc.data.weighting import WEIGHTINGS
from fedauc.discovery import lookup
from fedauc.engines.loop import LoopEngine
from fedauc.interfaces import Algorithm, BatchSize, Participation, Setting
from fedauc.ledger import Ledger
from fedauc.network import ModuleNetwork
from fedauc.participation import participations
from fedauc.stages import Budget, Milestones, Plan, StageOutput, StageRule, Theory
from fedauc.training import State, Training

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm, a schedule, and the numbers of a run.

    >>> recipe = Recipe.of("cycp-pairwise", cycles=5, groups=4, per_round=2)
    >>> recipe.participation.groups, recipe.step_size
    (4, 0.1)
    """

    method: str
    algorithm: Algorithm
    participation: Participation
    stages: StageRule = Milestones()
    output: StageOutput = "last"
    cycles: int = 30
    step_size: float = 0.1
    local_steps: int = 16
    positives: int = 16
    negatives: int = 16
    weighting: str = "clients"
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    engine: Literal["loop"] = "loop"

    def __post_init__(self) -> None:
        for name in ("cycles", "local_steps", "positives", "negatives"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 < self.step_size < math.inf:
            raise ValueError(f"step_size is {self.step_size}; it must be above 0 and finite")
        lookup("dtype", self.dtype, DTYPES)
        lookup("stage output", self.output, dict.fromkeys(("last", "cycle_mean", "round_mean")))
        lookup("engine", self.engine, {"loop": LoopEngine})
        lookup("weighting", self.weighting, WEIGHTINGS)
        check_device(self.device)
        if isinstance(self.stages, Theory) and getattr(self.algorithm, "prox", None) == 0:
            # The theorem's schedule stands on strongly convex stages, so it brings its proximal weight along.
            prox: dict[str, Any] = {"prox": self.stages.prox}
            object.__setattr__(self, "algorithm", dataclasses.replace(self.algorithm, **prox))

    @staticmethod
    def of(method: str, **settings: Any) -> Recipe:
        """A method with its defaults; settings are fields of the recipe, the algorithm or the schedule."""
        found = lookup("method", method, methods())
        own = {field.name for field in fields(Recipe)}
        recipe = {name: settings.pop(name) for name in own & set(settings)}
        participation = recipe.pop("participation", None) or participations()[found.participation]()
        participation = _replace(participation, settings)
        algorithm = recipe.pop("algorithm", None) or found.algorithm(**dict(found.parameters))
        algorithm = _replace(algorithm, settings)
        if settings:
            name = next(iter(settings))
            known = own | _names(algorithm) | _names(participation)
            lookup(f"setting of {method}", name, dict.fromkeys(known))
        step_size = recipe.pop("step_size", found.step_size)
        return Recipe(method=method, algorithm=algorithm, participation=participation, step_size=step_size, **recipe)

    @property
    def batch(self) -> BatchSize:
        """Active rows per local step."""
        return BatchSize(self.positives, self.negatives)


class Assembly(NamedTuple):
    """A training, its network and its first state."""

    training: Training
    network: ModuleNetwork
    start: State


def assemble(recipe: Recipe, module: nn.Module, clients: Clients) -> Assembly:
    """Check the recipe against the clients and put the parts together."""
    schedule = recipe.participation.bind(clients.roster, recipe.seed)
    setting = Setting(recipe.seed, schedule.cycle_length, recipe.batch, clients.census, recipe.weighting)
    per_round = max(1, len(schedule.cohort(0).clients))
    budget = Budget(recipe.cycles, recipe.step_size, recipe.local_steps, schedule.cycle_length, per_round)
    stages = recipe.stages.stages(budget)
    averaged = recipe.output != "last"
    scoring = [recipe.algorithm.scoring_pass and (index == 0 or averaged) for index in range(len(stages))]
    plan = Plan(stages, schedule.cycle_length, recipe.batch, scoring)
    network = ModuleNetwork(module, DTYPES[recipe.dtype], recipe.device)
    engine = LoopEngine(recipe.algorithm, network, clients, setting)
    training = Training(recipe.algorithm, engine, schedule, plan, setting, recipe.output, Ledger())
    return Assembly(training, network, training.start(network.state()))


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:0'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; use 'cpu'")


def _names(member: Any) -> set[str]:
    return {field.name for field in fields(member)}


def _replace(member: Any, settings: dict[str, Any]) -> Any:
    """The member with those settings that are its fields, which are taken off the list."""
    mine = {name: settings.pop(name) for name in _names(member) & set(settings)}
    return dataclasses.replace(member, **mine)
