"""A configuration from flat options: every field has one, named by its path, such as `participation.groups`.

A component's option (`objective`) picks a member by name; its parameters follow the dot (`objective.scale`). Tuples of
tuples (explicit groups) have no option; they come from a configuration file.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from fedauc.data.preparation import Preparation
from fedauc.discovery import lookup
from fedauc.experiments.codec import Family, MissingFields, convert_value, list_families, to_plain, type_hints
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe

PLACES: Mapping[str, tuple[str, ...]] = {
    "data": ("data",),
    "partition": ("preparation", "partition"),
    "model": ("model",),
    "algorithm": ("recipe", "algorithm"),
    "objective": ("recipe", "algorithm", "objective"),
    "participation": ("recipe", "participation"),
    "stages": ("recipe", "stages"),
}
"""Where each component stands in a configuration."""


DEFAULT_METHOD = "cycp-pairwise"
"""The method of a configuration that names none."""


class InapplicableOption(ValueError):
    """An option that the chosen member has no parameter for."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class Parameter(NamedTuple):
    """A plain field of a dataclass: its name, type and default (`MISSING` where one must be given)."""

    name: str
    kind: Any
    default: Any


class Option(NamedTuple):
    """An option: its name, where it goes in the configuration, its type (None: a member's name), and help."""

    name: str
    place: tuple[str, ...]
    kind: Any
    panel: str
    help: str


@functools.cache
def list_options() -> tuple[Option, ...]:
    """Every option, in the order help shows them. The algorithm has none of its own: `method` chooses it."""
    plain = [
        *_plain(Recipe, ("recipe",), "Training"),
        *_plain(Config, (), "Evaluation and seeds"),
        *_plain(Preparation, ("preparation",), "Data"),
    ]
    return (*plain, *(option for family in list_families() for option in _component(family)))


def build_config(method: str | None, base: Config | None, texts: Mapping[str, str]) -> Config:
    """The configuration that options describe, on top of `base` or of the method's defaults."""
    if base is None:
        tree = to_plain(Config(recipe=Recipe.of(method or DEFAULT_METHOD)))
    else:
        tree = to_plain(base)
        if method is not None:
            tree["recipe"] |= _changes(base.recipe.method, method)
    known = {option.name: option for option in list_options()}
    given = {name: lookup("option", name, known) for name in texts}
    # A component's name comes before its parameters, since it brings fresh ones.
    for name in sorted(given, key=lambda name: "." in name):
        _place(tree, given[name], texts[name])
    try:
        return Config.from_json(json.dumps(tree), "options")
    except MissingFields as error:
        family = error.where.rpartition(".")[2]
        needed = ", ".join(f"--{family}.{_dashed(name)}" for name in error.names)
        raise ValueError(f"{family} lacks {', '.join(error.names)}; give {needed}") from error


def _changes(old: str, new: str) -> dict[str, Any]:
    """What differs between two methods' defaults: the rest of a configuration stays as the file has it."""
    before, after = to_plain(Recipe.of(old)), to_plain(Recipe.of(new))
    return {key: value for key, value in after.items() if value != before[key]}


def parse_value(kind: Any, text: str, where: str) -> Any:
    """The value that a text stands for, by the field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if text.lower() == "none" else parse_value(_required(arguments), text, where)
    if origin is tuple:
        return [parse_value(arguments[0], item, where) for item in text.split(",") if item]
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{where} is {text!r}; it must be {what}") from error
    return convert_value(kind, text, where)


def describe_type(kind: Any) -> str:
    """A field's type in a word.

    >>> describe_type(int | None), describe_type(tuple[float, ...]), describe_type(typing.Literal["a", "b"])
    ('int', 'float,...', 'choice')
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return describe_type(_required(arguments))
    if origin is tuple:
        return f"{describe_type(arguments[0])},..."
    return "choice" if origin is typing.Literal else {str: "text", bool: "true|false"}.get(kind, kind.__name__)


def parameters(owner: type) -> list[Parameter]:
    """The plain fields of a dataclass."""
    hints = type_hints(owner)
    found = [Parameter(field.name, hints[field.name], field.default) for field in fields(owner)]
    return [parameter for parameter in found if not _nested(parameter.kind)]


def _nested(kind: Any) -> bool:
    """Whether a field holds a component, which has options of its own, or tuples of tuples, which need a file."""
    kinds = typing.get_args(kind) or (kind,)
    inner = typing.get_origin(kind) is tuple and any(typing.get_origin(each) is tuple for each in kinds)
    bases = tuple(family.base for family in list_families())
    return inner or any(isinstance(each, type) and issubclass(each, bases) for each in kinds)


def _required(arguments: tuple[Any, ...]) -> Any:
    return next(argument for argument in arguments if argument is not type(None))


def _plain(owner: type, place: tuple[str, ...], panel: str) -> list[Option]:
    elsewhere = {"method", "recipe", "preparation"}
    return [
        Option(_dashed(found.name), (*place, found.name), found.kind, panel, _help({"": found}, 1))
        for found in parameters(owner)
        if found.name not in elsewhere
    ]


def _component(family: Family) -> list[Option]:
    place, panel = PLACES[family.kind], family.kind.capitalize()
    owners: dict[str, dict[str, Parameter]] = {}
    for member, cls in family.members.items():
        for found in parameters(cls):
            owners.setdefault(found.name, {})[member] = found
    own = [
        Option(
            f"{family.kind}.{_dashed(name)}",
            (*place, name),
            next(iter(by.values())).kind,
            panel,
            _help(by, len(family.members)),
        )
        for name, by in owners.items()
    ]
    if family.kind == "algorithm":
        return own
    return [Option(family.kind, place, None, panel, "one of " + ", ".join(family.members)), *own]


def _help(owners: Mapping[str, Parameter], members: int) -> str:
    """The choices, then each default with the members it belongs to."""
    kind = next(iter(owners.values())).kind
    choices = "|".join(typing.get_args(kind)) + "; " if typing.get_origin(kind) is typing.Literal else ""
    by_default: dict[str, list[str]] = {}
    for member, found in owners.items():
        by_default.setdefault(shown(found.default), []).append(member)
    if len(by_default) == 1 and len(owners) == members:
        return choices + next(iter(by_default))
    return choices + "; ".join(f"{', '.join(mine)}: {default}" for default, mine in by_default.items())


def shown(default: Any) -> str:
    """A default, for help."""
    if default is MISSING:
        return "required"
    if default is None or default in ("", ()):
        return "optional"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _place(tree: dict[str, Any], option: Option, text: str) -> None:
    *path, last = option.place
    node = tree
    for step in path:
        node = node[step]
    family = next((found for found in list_families() if found.kind == option.name.split(".")[0]), None)
    if family is None:
        node[last] = parse_value(option.kind, text, option.name)
    elif option.kind is None:
        lookup(option.name, text, family.members)
        node[last] = {"name": text}
    else:
        node[last] = parse_value(_kind_of(family, node["name"], option.name, last), text, option.name)


def _kind_of(family: Family, member: str, option: str, parameter: str) -> Any:
    """The type of a member's parameter; two members may give one name different types."""
    known = {found.name: found.kind for found in parameters(lookup(family.kind, member, family.members))}
    if parameter not in known:
        has = ", ".join(known) or "none"
        raise InapplicableOption(
            option, f"{option} is not a parameter of the {family.kind} {member!r}, which has: {has}"
        )
    return known[parameter]
