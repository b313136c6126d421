"""A configuration from flat options: every field has one, named by its path, such as `participation.groups`.

A component's option (`objective`) picks a member by name; its parameters follow the dot (`objective.scale`). Where a
configuration holds several members, the option lists them (`wrappers`), and a parameter names its member as well
(`wrappers.fedprox.mu`). Tuples of tuples (explicit groups) have no option; they come from a configuration file.

>>> config = build_config("cycp-pairwise", None, {"cycles": "5", "objective": "squared-hinge", "objective.margin": "2"})
>>> config.recipe.cycles, config.recipe.algorithm.objective
(5, SquaredHinge(score='identity', margin=2.0))
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass, replace
from typing import Any, NamedTuple

from fedauc.data.preparation import Preparation
from fedauc.discovery import lookup
from fedauc.experiments.config import Config, Family, convert_value, find_family, list_families
from fedauc.experiments.presets import PRESETS
from fedauc.experiments.recipe import Recipe, list_decided
from fedauc.fields import FieldInfo, list_choices, list_fields, unwrap_optional
from fedauc.plugins import cache_until_registration

DEFAULT_METHOD = "cycp-pairwise"
"""The method of a configuration that names none."""


class InapplicableOption(ValueError):
    """An option that the chosen member has no parameter for."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class MemberName(str):
    """The name of a member of a family."""


class Option(NamedTuple):
    """An option: its name, where its value goes in a configuration, its type, and help.

    The type of an option that takes the name of a member is `MemberName`, and a tuple of these where it takes several.
    `choices` are the words that it accepts, if not any text or number will do.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    panel: str
    help: str
    choices: tuple[str, ...] = ()


@cache_until_registration
def list_options() -> tuple[Option, ...]:
    """Every option, in the order help shows them. The algorithm has none of its own: `method` chooses it."""
    sections: list[tuple[type, tuple[str, ...], str]] = [
        (Recipe, ("recipe",), "Training"),
        (Config, (), "Evaluation and seeds"),
        (Preparation, ("preparation",), "Data"),
    ]
    # A preset is no field of its own: the configuration holds what it sets.
    help_text = "A named set of settings from `fedauc list presets`; options win over it. None unless given."
    options = [Option("preset", ("recipe", "preset"), str, "Training", help_text, ("none", *PRESETS))]
    options += [
        Option(
            _option_name(known.name),
            (*path, known.name),
            known.type,
            panel,
            _describe_option({"": known}, 1),
            list_choices(known),
        )
        for owner, path, panel in sections
        for known in list_parameters(owner)
        if known.name != "method"
    ]
    for family in list_families():
        panel = _name_panel(family)
        if family.kind != "algorithm":
            choices = f"{'Any' if family.several else 'One'} of {', '.join(family.members)}."
            kind: Any = tuple[MemberName, ...] if family.several else MemberName
            help_text = f"{family.help} {choices}"
            options.append(Option(family.kind, family.path, kind, panel, help_text, tuple(family.members)))
        if family.several:
            options += [option for name in family.members for option in _list_member_options(family, name)]
            continue
        owners: dict[str, dict[str, FieldInfo]] = {}
        for member_name, member in family.members.items():
            for known in list_parameters(member):
                owners.setdefault(known.name, {})[member_name] = known
        for name, by_member in owners.items():
            first, help_text = next(iter(by_member.values())), _describe_option(by_member, len(family.members))
            option_name, path = f"{family.kind}.{_option_name(name)}", (*family.path, name)
            options.append(Option(option_name, path, first.type, panel, help_text, list_choices(first)))
    return tuple(options)


def _list_member_options(family: Family, member: str) -> list[Option]:
    """The options of one member of a family of which a configuration holds several."""
    prefix, path = f"{family.kind}.{member}", (*family.path, member)
    return [
        Option(
            f"{prefix}.{_option_name(known.name)}",
            (*path, known.name),
            known.type,
            _name_panel(family),
            _describe_option({member: known}, 1),
            list_choices(known),
        )
        for known in list_parameters(family.members[member])
    ]


def list_parameters(owner: type) -> list[FieldInfo]:
    """The fields of a dataclass that an option can set, without components and tuples of tuples."""
    parameters = []
    for known in list_fields(owner):
        kind = unwrap_optional(known.type)
        nested_tuple = any(typing.get_origin(inner) is tuple or find_family(inner) for inner in typing.get_args(kind))
        # A field may hold any member of a family, or one member alone.
        if not (nested_tuple or is_dataclass(kind) or find_family(kind)):
            parameters.append(known)
    return parameters


def build_config(method: str | None, base: Config | None, texts: Mapping[str, str]) -> Config:
    """The configuration that options describe, on top of `base` or of the method's defaults.

    Without `base`, the settings of the `preset` replace the method's defaults.
    """
    texts = dict(texts)
    preset = None if (named := texts.pop("preset", "none")) == "none" else named
    if preset is not None and base is not None:
        raise ValueError(
            f"preset is {preset!r}, but a configuration to start from has all settings already; leave one of them out"
        )
    config = base or Config(recipe=Recipe.of(method or DEFAULT_METHOD, preset=preset))
    if base is not None and method is not None:
        # Only what differs between the two methods' defaults changes; the rest stays as the file has it.
        old, new = Recipe.of(base.recipe.method), Recipe.of(method)
        names = [known.name for known in list_fields(Recipe)]
        changes = {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}
        config = replace(config, recipe=replace(config.recipe, **changes))
    options = {option.name: option for option in list_options()}
    plain: dict[tuple[str, ...], dict[str, Any]] = {}
    components: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        *path, field_name = lookup("option", name, options, source="`fedauc run --help`").path
        kind = name.split(".")[0]
        if any(family.kind == kind for family in list_families()):
            components.setdefault(kind, {})[name] = text
        else:
            plain.setdefault(tuple(path), {})[field_name] = parse_value(options[name].type, text, name)
    for family in list_families():
        if family.kind in components:
            current = functools.reduce(getattr, family.path, config)
            if family.several:
                # Together with the plain fields beside them: a recipe refuses client-dp without a budget.
                *owner_names, field_name = family.path
                members = _build_members(family, current, components[family.kind])
                plain.setdefault(tuple(owner_names), {})[field_name] = members
            else:
                config = _replace_at(config, family.path, _build_member(family, current, components[family.kind]))
    for owner_path, values in plain.items():
        owner: Any = functools.reduce(getattr, owner_path, config)
        config = _replace_at(config, owner_path, replace(owner, **values))
    if base is None and not {*texts, *list_decided(config.recipe.method, preset)} & {"weighting"}:
        config = replace(config, recipe=config.recipe.with_default_weighting())
    return config


def parse_value(kind: Any, text: str, where: str) -> Any:
    """The value that a text stands for, by the field's type."""
    if unwrap_optional(kind) is not kind:
        return None if text.lower() == "none" else parse_value(unwrap_optional(kind), text, where)
    if typing.get_origin(kind) is tuple:
        return tuple(parse_value(typing.get_args(kind)[0], item, where) for item in text.split(",") if item)
    if kind is bool:
        return lookup(where, text.lower(), {"true": True, "false": False})
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            expected = "a whole number" if kind is int else "a number"
            raise ValueError(f"{where} is {text!r}; it must be {expected}") from error
    return convert_value(kind, text, where)


def describe_type(kind: Any) -> str:
    """A field's type in a word.

    >>> describe_type(int | None), describe_type(tuple[float, ...]), describe_type(typing.Literal["a", "b"])
    ('int', 'float,...', 'choice')
    """
    kind = unwrap_optional(kind)
    if typing.get_origin(kind) is tuple:
        return f"{describe_type(typing.get_args(kind)[0])},..."
    if typing.get_origin(kind) is typing.Literal:
        return "choice"
    if kind is MemberName:
        return "name"
    return "text" if kind is str else "true|false" if kind is bool else str(kind.__name__)


def format_default(default: Any) -> str:
    """A default, for help."""
    if default is MISSING:
        return "required"
    if default is None or default in ("", ()):
        return "optional"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _build_members(family: Family, current: Any, texts: Mapping[str, str]) -> tuple[Any, ...]:
    """The members that options list, or the current ones, with the parameters that options give."""
    kind = family.kind
    members: dict[str, Any] = {member.name: member for member in current}
    if kind in texts:
        names = [name for name in texts[kind].split(",") if name not in ("", "none")]
        for name in names:
            lookup(kind.removesuffix("s"), name, family.members)
            if names.count(name) > 1:
                raise ValueError(f"{kind} lists {name!r} {names.count(name)} times; list it once")
        members = dict.fromkeys(names)
    for option in texts:
        member = option.removeprefix(kind).removeprefix(".").split(".")[0]
        if member and member not in members:
            remedy = f"use --{kind} {','.join([*members, member])}"
            raise InapplicableOption(
                option, f"{option} is given, but {kind} is {','.join(members) or 'none'}; {remedy}"
            )
    built = []
    for name, member in members.items():
        single = family._replace(kind=f"{kind}.{name}", several=False)
        parameters = {option: text for option, text in texts.items() if option.startswith(f"{single.kind}.")}
        built.append(_build_member(single, member, parameters if member else {single.kind: name, **parameters}))
    return tuple(built)


def _build_member(family: Family, current: Any, texts: Mapping[str, str]) -> Any:
    """The member that options choose, or the current one with other parameters."""
    chosen = texts.get(family.kind)
    member: Any = type(current) if chosen is None else lookup(family.kind, chosen, family.members)
    # Two members may give one name different types, so the type is the chosen member's.
    known = {_option_name(info.name): info for info in list_parameters(member)}
    values = {}
    for option, text in texts.items():
        parameter = option.removeprefix(family.kind).removeprefix(".")
        if parameter and parameter not in known:
            has = ", ".join(f"--{family.kind}.{name}" for name in known) or "none"
            raise InapplicableOption(
                option, f"{option} is not a parameter of the {family.kind} {member.name!r}, which has: {has}"
            )
        if parameter:
            values[known[parameter].name] = parse_value(known[parameter].type, text, option)
    if chosen is None:
        return replace(current, **values)
    missing = [info.name for info in list_fields(member) if info.default is MISSING and info.name not in values]
    if missing:
        needed = ", ".join(f"--{family.kind}.{_option_name(name)}" for name in missing)
        raise ValueError(f"{family.kind} lacks {', '.join(missing)}; give {needed}")
    return member(**values)


def _replace_at(owner: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of nested dataclasses with another value at the end of a path of fields."""
    if not path:
        return value
    inner = getattr(owner, path[0])
    return replace(owner, **{path[0]: _replace_at(inner, path[1:], value)})


def _describe_option(by_member: Mapping[str, FieldInfo], members: int) -> str:
    """Help text, choices, and each default with the members it belongs to."""
    first = next(iter(by_member.values()))
    by_help: dict[str, list[str]] = {}
    for name, info in by_member.items():
        if info.description.help:
            by_help.setdefault(info.description.help, []).append(name)
    sentences = list(by_help)
    if len(by_help) > 1:
        # Members that share an option may mean different things by it.
        sentences = [f"{text.rstrip('.')} ({', '.join(names)})." for text, names in by_help.items()]
    if choices := list_choices(first):
        sentences.append(f"One of {', '.join(choices)}.")
    by_default: dict[str, list[str]] = {}
    for name, info in by_member.items():
        by_default.setdefault(format_default(info.default), []).append(name)
    applies_to_all = len(by_default) == 1 and len(by_member) == members
    defaults = []
    for default, names in by_default.items():
        owners = "" if applies_to_all else f" ({', '.join(names)})"
        if default == "required":
            sentences.append(f"Required{owners}.")
        elif default != "optional":
            defaults.append(f"{default}{owners}")
        elif not any("default" in sentence for sentence in sentences):
            sentences.append(f"Not set by default{owners}.")
        elif owners and len(by_help) == 1:
            sentences.append(f"For {', '.join(names)}.")
    return " ".join([*sentences, *([f"Default: {'; '.join(defaults)}."] if defaults else [])])


def _name_panel(family: Family) -> str:
    return family.kind.replace("-", " ").capitalize()


def _option_name(name: str) -> str:
    return name.replace("_", "-")
