"""The frozen configuration of a run (data, model and recipe), and how it is written to JSON and read back.

A component, such as a dataset or an objective, is written with its `name` and found again by it in its family.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.algorithms import find_algorithms
from fedauc.data import find_datasets
from fedauc.data.dataset import Dataset
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.partitions import Partition, find_partitions
from fedauc.data.preparation import Preparation
from fedauc.discovery import lookup
from fedauc.experiments.callbacks import Callback, find_callbacks
from fedauc.experiments.plugin_use import import_used_plugins, list_used_plugins
from fedauc.experiments.recipe import Recipe, list_decided
from fedauc.fields import check_fields, describe, list_fields, option, unwrap_optional
from fedauc.interfaces import Algorithm, Mean, Objective, Participation, ServerOptimizer, UploadTransform, Wrapper
from fedauc.metrics import DEFAULT_METRICS, parse_metrics
from fedauc.models import find_models
from fedauc.models.linear import Linear
from fedauc.models.model import ModelConfig
from fedauc.objectives import find_objectives
from fedauc.participation import find_participations
from fedauc.plugins import cache_until_registration
from fedauc.server_optimizers import find_server_optimizers
from fedauc.stages import StageRule, find_stage_rules
from fedauc.transforms import find_means, find_transforms
from fedauc.wrappers import find_wrappers

FORMAT = 2
"""Raised when an old reader could misunderstand a new configuration, or a new reader an old one."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run's records.

    `data_seed` keys the split, the removal, the label noise and the partition; `recipe.seed` everything in training.
    The model is evaluated every `evaluate_every` cycles and after the last one.

    >>> config = Config(recipe=Recipe.of("cycp-minimax", cycles=2))
    >>> Config.from_json(config.to_json()) == config
    True
    """

    recipe: Recipe = field(metadata=describe("How to train."))
    data: Dataset = option(CreditCard(), "The dataset.")
    preparation: Preparation = option(Preparation(), "What is changed in the training rows before they are used.")
    model: ModelConfig = option(Linear(), "The model.")
    data_seed: int = option(0, "Seed of the split, the removal of positives, the label noise and the partition.")
    evaluate_every: int = option(1, "Cycles between evaluations.", at_least=1)
    metrics: tuple[str, ...] = option(DEFAULT_METRICS, "What is measured; the first one compares rounds and settings.")
    callbacks: tuple[Callback, ...] = option((), "What happens beside training.")

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "metrics", tuple(metric.text for metric in parse_metrics(self.metrics)))
        for callback in self.callbacks:
            if not isinstance(getattr(callback, "name", None), str):
                remedy = "use one that `fedauc list callbacks` shows, or pass it to fedauc.fit"
                raise ValueError(f"callbacks holds {callback!r}, which has no name for a configuration: {remedy}")

    def to_json(self) -> str:
        """Indented JSON, with the format it is written in."""
        return json.dumps(self.to_document(), indent=2) + "\n"

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON: the format, the plug-ins that the configuration uses, if any, and every field."""
        return {"format": FORMAT, **list_used_plugins(self), **to_plain(self)}

    @staticmethod
    def from_json(text: str, where: str = "configuration") -> Config:
        """Read a configuration. What the recipe leaves out comes from its method's defaults."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON (line {error.lineno}: {error.msg}); fix or regenerate it") from error
        except RecursionError as error:
            reason = "its brackets are nested deeper than any configuration's"
            raise ValueError(f"{where} cannot be read, because {reason}; fix or regenerate it") from error
        if not isinstance(data, dict):
            raise ValueError(f"{where} is a {type(data).__name__}; it must be a JSON object")
        written = data.pop("format", FORMAT)
        if not isinstance(written, int) or written > FORMAT:
            raise ValueError(f"{where} has format {written}; this version reads format {FORMAT}: upgrade fedauc")
        if written < FORMAT:
            remedy = "start it again, or use the fedauc that wrote it"
            raise ValueError(
                f"{where} has format {written}; this version reads format {FORMAT}, with other names: {remedy}"
            )
        if "recipe" not in data:
            raise ValueError(f"{where} has no recipe; start from the config.json of a run folder")
        recipe = data["recipe"]
        if not isinstance(recipe, dict) or not isinstance(recipe.get("method"), str):
            needs = "it must be an object with a method, such as 'cycp-pairwise'"
            raise ValueError(f"{where}.recipe is {recipe!r}; {needs}")
        with import_used_plugins(data, where):
            config: Config = from_plain(Config, data, where, Config(recipe=Recipe.of(recipe["method"])))
        if not {*recipe, *list_decided(config.recipe.method, None)} & {"weighting"}:
            config = replace(config, recipe=config.recipe.with_default_weighting())
        return config

    @staticmethod
    def read(path: Path) -> Config:
        """Read a configuration file."""
        if not path.is_file():
            raise ValueError(f"configuration {path} does not exist; give the path of a JSON file")
        return Config.from_json(path.read_text(encoding="utf-8"), f"configuration {path}")


def resolve_data_paths(config: Config) -> Config:
    """The same configuration with absolute paths of data files, so that a run can be resumed from any folder."""
    changes: dict[str, Any] = {}
    for name in config.data.path_fields:
        value = getattr(config.data, name)
        if not isinstance(value, str):
            raise ValueError(
                f"data.{name} is a {type(value).__name__} in memory, which a run folder cannot load again; save it as "
                "a file and give its path, or use fedauc.fit"
            )
        # An error about a file that does not exist names it as it was given.
        if value and Path(value).expanduser().exists():
            changes[name] = str(Path(value).expanduser().absolute())
    return replace(config, data=replace(config.data, **changes)) if changes else config


class Family(NamedTuple):
    """A kind of component: its name, base class and members, where a configuration holds it, and its help text.

    Where a configuration holds `several` members, the field is a tuple of them, in the order in which they are applied.
    """

    kind: str
    base: type
    members: Mapping[str, type]
    path: tuple[str, ...]
    help: str
    several: bool = False


@cache_until_registration
def list_families() -> tuple[Family, ...]:
    """Every kind of component that a configuration can name; the folders are scanned once, which takes milliseconds."""
    algorithm = ("recipe", "algorithm")
    return (
        Family("data", Dataset, find_datasets(), ("data",), "The dataset; creditcard unless given."),
        Family(
            "partition",
            Partition,
            find_partitions(),
            ("preparation", "partition"),
            "Which client holds which rows; as the data says (natural) unless given.",
        ),
        Family("model", ModelConfig, find_models(), ("model",), "The model; linear unless given."),
        Family("algorithm", Algorithm, find_algorithms(), algorithm, "What clients and server compute."),
        Family(
            "objective", Objective, find_objectives(), (*algorithm, "objective"), "The loss; the method has its own."
        ),
        Family(
            "participation",
            Participation,
            find_participations(),
            ("recipe", "participation"),
            "Who takes part in which round; the method has its own.",
        ),
        Family(
            "wrappers",
            Wrapper,
            find_wrappers(),
            ("recipe", "wrappers"),
            "Changes of the local steps, the innermost first; none unless given.",
            several=True,
        ),
        Family(
            "callbacks",
            Callback,
            find_callbacks(),
            ("callbacks",),
            "What happens beside training; nothing more unless given.",
            several=True,
        ),
        Family(
            "stages",
            StageRule,
            find_stage_rules(),
            ("recipe", "stages"),
            "How learning rate and length change from stage to stage; milestones unless given.",
        ),
        Family(
            "transforms",
            UploadTransform,
            find_transforms(),
            ("recipe", "transforms"),
            "What happens to an upload on its way to the server, in order; nothing unless given.",
            several=True,
        ),
        Family("mean", Mean, find_means(), ("recipe", "mean"), "How uploads become one; weighted unless given."),
        Family(
            "server-optimizer",
            ServerOptimizer,
            find_server_optimizers(),
            ("recipe", "server_optimizer"),
            "How the server moves the model; plain unless given.",
        ),
    )


@cache_until_registration
def find_family(kind: Any) -> Family | None:
    """The family of a base class, or of a narrower one such as PairObjective; a single member has none."""
    for family in list_families() if isinstance(kind, type) else ():
        if issubclass(kind, family.base) and kind not in family.members.values():
            members = {name: member for name, member in family.members.items() if issubclass(member, kind)}
            return family._replace(members=members)
    return None


def to_plain(value: Any) -> Any:
    """Plain JSON values. A dataclass with a `name` is written with it."""
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(type(value), "name", None)
        head = {"name": name} if isinstance(name, str) else {}
        return head | {known.name: to_plain(getattr(value, known.name)) for known in list_fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} cannot be written to a configuration; use numbers, strings, tuples or dataclasses")


def from_plain(kind: Any, data: Any, where: str, default: Any = None) -> Any:
    """The value of type `kind` that JSON data describe; `where` names it in errors.

    Fields that an object leaves out come from `default`, if that is of the same class.
    """
    family = find_family(kind)
    if family is not None:
        name = data.get("name", getattr(default, "name", None)) if isinstance(data, Mapping) else None
        if not isinstance(name, str):
            known = ", ".join(family.members)
            raise ValueError(f"{where} is {data!r}; it must be an object with a name, one of {known}")
        kind = lookup(family.kind, name, family.members)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return convert_value(kind, data, where)
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {data!r}; it must be an object")
    types_by_name = {known.name: known.type for known in list_fields(kind)}
    described = {key: value for key, value in data.items() if key != "name" or "name" in types_by_name}
    for key in described:
        lookup(f"field of {where}", key, types_by_name)
    base = default if type(default) is kind else None
    values = {
        key: from_plain(types_by_name[key], value, f"{where}.{key}", getattr(base, key, None))
        for key, value in described.items()
    }
    if base is not None:
        return replace(base, **values)
    if missing := [known.name for known in list_fields(kind) if known.default is MISSING and known.name not in values]:
        raise ValueError(f"{where} lacks {', '.join(missing)}; give a value for it")
    return kind(**values)


def convert_value(kind: Any, data: Any, where: str) -> Any:
    """A plain value from JSON: a number, a string, one of several words, None where it is allowed, or a tuple."""
    if unwrap_optional(kind) is not kind:
        return None if data is None else from_plain(unwrap_optional(kind), data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal and isinstance(data, (str, int)):
        return lookup(where, data, {choice: choice for choice in arguments})  # type: ignore[arg-type]
    if origin is tuple and isinstance(data, (list, tuple)):
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(data):
            raise ValueError(f"{where} is {data!r}; it must have {len(kinds)} entries")
        return tuple(from_plain(inner, value, where) for inner, value in zip(kinds, data, strict=True))
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        # A whole number beyond the largest float stays as it is: the check of the field refuses it.
        return float(data) if abs(data) <= sys.float_info.max else data
    if isinstance(kind, type) and isinstance(data, kind) and isinstance(data, bool) == (kind is bool):
        return data
    raise ValueError(f"{where} is {data!r}; it must be {getattr(kind, '__name__', kind)}")
