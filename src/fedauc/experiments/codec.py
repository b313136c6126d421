"""Frozen dataclasses to JSON and back. A member of a folder is written with its name and found again by it."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from fedauc.algorithms import find_algorithms
from fedauc.data import find_datasets
from fedauc.data.dataset import Dataset
from fedauc.data.partitions import Partition, find_partitions
from fedauc.discovery import lookup
from fedauc.interfaces import Algorithm, Objective, Participation
from fedauc.models import find_models
from fedauc.models.model import ModelConfig
from fedauc.objectives import find_objectives
from fedauc.participation import find_participations
from fedauc.stages import STAGE_RULES, StageRule


class Family(typing.NamedTuple):
    """A folder of interchangeable members: what one is called, its base class, and the members by name."""

    kind: str
    base: type
    members: Mapping[str, type]


class MissingFields(ValueError):
    """Fields that have no default were not given."""

    def __init__(self, where: str, names: list[str]) -> None:
        super().__init__(f"{where} lacks {', '.join(names)}; give a value for it")
        self.where, self.names = where, names


@functools.cache
def list_families() -> tuple[Family, ...]:
    """Every folder whose members a configuration can name; folders are scanned once, which takes milliseconds."""
    return (
        Family("data", Dataset, find_datasets()),
        Family("partition", Partition, find_partitions()),
        Family("model", ModelConfig, find_models()),
        Family("algorithm", Algorithm, find_algorithms()),
        Family("objective", Objective, find_objectives()),
        Family("participation", Participation, find_participations()),
        Family("stages", StageRule, STAGE_RULES),
    )


def to_plain(value: Any) -> Any:
    """Plain JSON values. A dataclass with a `name` is written with it."""
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(type(value), "name", None)
        head = {"name": name} if isinstance(name, str) else {}
        return head | {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} cannot be written to a configuration; use numbers, strings, tuples or dataclasses")


def from_plain(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that JSON data describe; `where` names the place in errors."""
    if isinstance(kind, type) and (found := _family(kind)):
        return _member(found, data, where)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, data, where)
    return convert_value(kind, data, where)


def convert_value(kind: Any, data: Any, where: str) -> Any:
    """A plain value: number, string, literal, optional, tuple."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return from_plain(next(a for a in arguments if a is not type(None)), data, where)
    if origin is typing.Literal and isinstance(data, (str, int)):
        return lookup(where, data, {choice: choice for choice in arguments})  # type: ignore[arg-type]
    if origin is tuple and isinstance(data, (list, tuple)):
        item = arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else None
        kinds = [item] * len(data) if item else arguments
        if len(kinds) != len(data):
            raise ValueError(f"{where} is {data!r}; it must have {len(kinds)} entries")
        return tuple(from_plain(each, value, where) for each, value in zip(kinds, data, strict=True))
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind) and isinstance(data, bool) == (kind is bool):
        return data
    raise ValueError(f"{where} is {data!r}; it must be {getattr(kind, '__name__', kind)}")


def _family(kind: type) -> Family | None:
    """The family of a base class, or of a narrower one such as PairObjective; a single member is no family."""
    for family in list_families():
        if issubclass(kind, family.base) and kind not in family.members.values():
            members = {name: member for name, member in family.members.items() if issubclass(member, kind)}
            return family._replace(members=members)
    return None


def _member(family: Family, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise ValueError(f"{where} is {data!r}; it must be an object with a name, one of {', '.join(family.members)}")
    member = lookup(family.kind, data["name"], family.members)
    return _dataclass(member, data, where)


@functools.lru_cache(maxsize=512)
def type_hints(owner: type) -> Mapping[str, Any]:
    """The types of a class's fields; kept, because reading them takes longer than all else about a configuration."""
    return typing.get_type_hints(owner)


def _dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is {data!r}; it must be an object")
    hints = type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    given = {key: value for key, value in data.items() if key != "name" or "name" in known}
    for key in given:
        lookup(f"field of {where}", key, known)
    required = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - set(given)):
        raise MissingFields(where, missing)
    return kind(**{key: from_plain(known[key], value, f"{where}.{key}") for key, value in given.items()})
