"""How to train, whatever the data and the model: a frozen recipe, and its assembly into a `Training`."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fedauc.algorithms import find_methods
from fedauc.data.augment import AUGMENTS
from fedauc.data.clients import Clients
from fedauc.data.weighting import WEIGHTINGS
from fedauc.discovery import lookup
from fedauc.engines import Parts, check_engine, make_engine
from fedauc.engines.distributed import DistributedEngine
from fedauc.engines.graphed import GraphedEngine
from fedauc.interfaces import Algorithm, BatchSize, Engine, Participation, Setting
from fedauc.ledger import Ledger
from fedauc.network import Compute, ModuleNetwork
from fedauc.objectives import find_objectives
from fedauc.participation import find_participations
from fedauc.stages import (
    MAX_LOCAL_STEPS,
    STAGE_RULES,
    Budget,
    Milestones,
    Plan,
    StageOutput,
    StageRule,
    Theory,
)
from fedauc.training import State, Training

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An algorithm, a schedule, and the numbers of a run.

    >>> recipe = Recipe.of("cycp-pairwise", cycles=5, groups=4, per_round=2)
    >>> recipe.participation.groups, recipe.learning_rate
    (4, 0.1)
    """

    method: str
    algorithm: Algorithm
    participation: Participation
    stages: StageRule = Milestones()
    stage_output: StageOutput = "last"
    cycles: int = 30
    learning_rate: float = 0.1
    local_steps: int = 16
    positives: int = 16
    negatives: int = 16
    weighting: str = "clients"
    augment: str = "none"
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    precision: Literal["full", "mixed"] = "full"
    device: str = "cpu"
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("cycles", "local_steps", "positives", "negatives", "seed"):
            object.__setattr__(self, name, _as_whole_number(name, getattr(self, name)))
        for name in ("cycles", "local_steps", "positives", "negatives"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.learning_rate, (int, float)) or not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate!r}; it must be a number above 0 and finite")
        lookup("dtype", self.dtype, DTYPES)
        lookup("precision", self.precision, dict.fromkeys(("full", "mixed")))
        if self.precision == "mixed" and self.dtype != "float32":
            raise ValueError(
                f"precision is 'mixed', but dtype is {self.dtype!r}; mixed precision keeps float32 weights"
            )
        lookup("stage output", self.stage_output, dict.fromkeys(("last", "cycle_mean", "round_mean")))
        check_engine(self.engine)
        lookup("weighting", self.weighting, WEIGHTINGS)
        lookup("augment", self.augment, AUGMENTS)
        check_device(self.device)
        for name, kind in (("algorithm", Algorithm), ("participation", Participation), ("stages", StageRule)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be a {kind.__name__}, such as Recipe.of makes"
                )

    @staticmethod
    def of(method: str, **settings: Any) -> Recipe:
        """A method with its defaults; settings are fields of the recipe, the algorithm or the schedule."""
        found = lookup("method", method, find_methods())
        own = {field.name for field in fields(Recipe)}
        recipe = {name: settings.pop(name) for name in own & set(settings)}
        _resolve_member_names(recipe, settings)
        participation = recipe.pop("participation", None) or find_participations()[found.participation]()
        participation = _replace_fields(participation, settings)
        algorithm = recipe.pop("algorithm", None) or found.algorithm(**dict(found.parameters))
        algorithm = _replace_fields(algorithm, settings)
        if settings:
            name = next(iter(settings))
            known = own | _field_names(algorithm) | _field_names(participation)
            lookup(f"setting of {method}", name, dict.fromkeys(known))
        learning_rate = recipe.pop("learning_rate", found.learning_rate)
        return Recipe(
            method=method, algorithm=algorithm, participation=participation, learning_rate=learning_rate, **recipe
        )

    @property
    def batch(self) -> BatchSize:
        """Active rows per local step."""
        return BatchSize(self.positives, self.negatives)


class Assembly(NamedTuple):
    """A training, its network and its first state."""

    training: Training
    network: ModuleNetwork
    start: State


def assemble_training(recipe: Recipe, module: nn.Module, clients: Clients) -> Assembly:
    """Check the recipe against the clients and put the parts together."""
    schedule = recipe.participation.bind(clients.roster, recipe.seed)
    numbers = (recipe.seed, schedule.cycle_length, recipe.batch)
    setting = Setting(*numbers, clients.census, recipe.weighting, _check_augment(recipe, clients))
    per_round = max(1, len(schedule.cohort(0).clients))
    budget = Budget(recipe.cycles, recipe.learning_rate, recipe.local_steps, schedule.cycle_length, per_round)
    stages, algorithm = recipe.stages.divide_budget(budget), _with_prox(recipe)
    averaged = recipe.stage_output != "last"
    scoring = [algorithm.scoring_pass and (index == 0 or averaged) for index in range(len(stages))]
    plan = Plan(stages, schedule.cycle_length, recipe.batch, scoring)
    # A recorded trace may end early; better to hear of it now than in its last round.
    schedule.cohort(plan.total_rounds - 1)
    cuda = recipe.device.startswith("cuda")
    compute = Compute(recipe.device, recipe.precision == "mixed", channels_last=cuda)
    network = ModuleNetwork(module, DTYPES[recipe.dtype], compute)
    _check_model(algorithm, network, clients)
    steps = sum(stage.cycles * stage.local_steps for stage in stages) * schedule.cycle_length
    engine: Engine = make_engine(recipe.engine, Parts(algorithm, network, clients, setting, steps))
    if isinstance(engine, GraphedEngine):
        first = range(min(schedule.cycle_length, plan.total_rounds))
        # Nobody may come in a whole cycle.
        engine.widest = max(1, *(len(schedule.cohort(number).clients) for number in first))
    if dist.is_available() and dist.is_initialized():
        engine = DistributedEngine(engine)
    training = Training(algorithm, engine, schedule, plan, setting, recipe.stage_output, Ledger())
    return Assembly(training, network, training.initial_state(network.state()))


def _check_augment(recipe: Recipe, clients: Clients) -> str:
    """Only images can be cropped and mirrored."""
    shape = tuple(clients.inputs.shape[1:])
    if recipe.augment != "none" and len(shape) != 3:
        raise ValueError(f"augment is {recipe.augment!r}, but rows have shape {shape}; it needs images [C, H, W]")
    return recipe.augment


def _with_prox(recipe: Recipe) -> Algorithm:
    """The theorem's schedule stands on strongly convex stages, so it brings its proximal weight along."""
    if isinstance(recipe.stages, Theory) and getattr(recipe.algorithm, "prox", None) == 0:
        prox: dict[str, Any] = {"prox": recipe.stages.proximal_weight}
        return dataclasses.replace(recipe.algorithm, **prox)
    return recipe.algorithm


def _check_model(algorithm: Algorithm, network: ModuleNetwork, clients: Clients) -> None:
    """Run two rows through the model, so that what does not fit is said before anything is written."""
    rows, objective = clients.inputs[:2], algorithm.objective
    try:
        outputs = network.predict(network.state(), rows)
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        shape, reason = tuple(rows.shape[1:]), " ".join(str(error).split())
        raise ValueError(f"the model does not accept rows of shape {shape} and type {rows.dtype}: {reason}") from error
    if (outputs.ndim == 2) != objective.takes_embeddings:
        found = outputs.shape[1] if outputs.ndim == 2 else 1
        needs = "at least 2 (an embedding)" if objective.takes_embeddings else "1 (a score), or objective 'contrastive'"
        raise ValueError(f"the model gives {found} numbers per row; objective {objective.name!r} needs {needs}")


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; use 'cpu', 'cuda' or 'cuda:0'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; use 'cpu'")


def _as_whole_number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a whole number") from error


def _check_count(name: str, value: int) -> None:
    most = MAX_LOCAL_STEPS if name == "local_steps" else math.inf
    if not 1 <= value <= most:
        bound = f" and at most {most}" if most < math.inf else ""
        raise ValueError(f"{name} is {value}; it must be at least 1{bound}")


def _resolve_member_names(recipe: dict[str, Any], settings: dict[str, Any]) -> None:
    """Members given by name become members with their defaults."""
    folders: dict[str, Mapping[str, type]] = {
        "participation": find_participations(),
        "stages": STAGE_RULES,
        "objective": find_objectives(),
    }
    for name, members in folders.items():
        for given in (recipe, settings):
            if isinstance(given.get(name), str):
                given[name] = lookup(name, given[name], members)()


def _field_names(member: Any) -> set[str]:
    return {field.name for field in fields(member)}


def _replace_fields(member: Any, settings: dict[str, Any]) -> Any:
    """The member with those settings that are its fields, which are taken off the list."""
    if not dataclasses.is_dataclass(member) or isinstance(member, type):
        return member
    mine = {name: settings.pop(name) for name in _field_names(member) & set(settings)}
    return dataclasses.replace(member, **mine)
