"""Configuration fields that carry their own help text and bounds, and one check for all of them.

A configuration class is a frozen dataclass. Its fields are declared with `option`, and `__post_init__` calls
`check_fields`. The command line reads the same declarations for its options and their help.

>>> @dataclass(frozen=True)
... class Momentum:
...     beta: float = option(0.9, "Share of the old velocity that is kept.", at_least=0, below=1)
...     warmup: int = option(0, "Rounds without momentum.", at_least=0)
...
...     def __post_init__(self) -> None:
...         check_fields(self)
>>> Momentum(beta=1.5)
Traceback (most recent call last):
...
ValueError: beta is 1.5; it must be a number of at least 0 and below 1: lower beta
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import operator
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")

MAX_NUMBER = 1e30
"""The largest number of a field that declares no upper bound."""

KEY = "fedauc"
"""Where a field's metadata holds its `Description`."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A help text, and what a value must be.

    A field without an upper bound takes numbers up to 1e30 only, whose squares are still far from the largest number
    that a computer knows; `at_most=math.inf` allows infinity as well.
    `choices` lists the words that a `str` field accepts; a `Literal` type lists them itself.
    """

    help: str = ""
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()


class FieldInfo(NamedTuple):
    """A field of a dataclass: its name, type, default (`MISSING` where a value must be given) and description."""

    name: str
    type: Any
    default: Any
    description: Description


def option(default: T, help: str, **bounds: Any) -> T:
    """A dataclass field with a default, a help text, and any of the bounds of `Description`."""
    declared: T = field(default=default, metadata=describe(help, **bounds))
    return declared


def describe(help: str, *, choices: Iterable[str] = (), **bounds: float) -> dict[str, Description]:
    """The metadata of a field without a default: `path: str = field(metadata=describe("The file to read."))`."""
    return {KEY: Description(help=help, choices=tuple(choices), **bounds)}


@functools.cache
def list_fields(owner: type) -> tuple[FieldInfo, ...]:
    """Every field of a dataclass, in order; cached, because evaluating the types takes time."""
    hints: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        # Types that name something local to a function cannot be resolved.
        with contextlib.suppress(NameError):
            hints |= inspect.get_annotations(base, eval_str=True)
    return tuple(
        FieldInfo(known.name, hints.get(known.name, Any), known.default, known.metadata.get(KEY, Description()))
        for known in fields(owner)
    )


def check_fields(instance: Any) -> None:
    """Check every number and word of a dataclass against its type and bounds; numpy's integers become Python's."""
    owner: type = type(instance)
    for known in list_fields(owner):
        value = getattr(instance, known.name)
        checked = _check_value(known.name, known.type, value, known.description)
        if checked is not value:
            object.__setattr__(instance, known.name, checked)


def unwrap_optional(kind: Any) -> Any:
    """The type beside None: `int` for `int | None`, any other type as it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(inner for inner in typing.get_args(kind) if inner is not type(None))
    return kind


def list_choices(known: FieldInfo) -> tuple[str, ...]:
    """The words that a field accepts; none where any text or number will do."""
    kind = unwrap_optional(known.type)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else known.description.choices


def _check_value(name: str, kind: Any, value: Any, description: Description) -> Any:
    """The value, if it may stand; plain Python numbers in place of numpy's."""
    if value is None and kind is not unwrap_optional(kind):
        return None
    kind = unwrap_optional(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, tuple):
        inner = typing.get_args(kind)[0]
        checked = tuple(_check_value(name, inner, item, description) for item in value)
        return value if all(map(operator.is_, checked, value)) else checked
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else description.choices
    if choices and value not in choices:
        *first, last = map(repr, choices)
        words = f"{', '.join(first)} or {last}" if first else last
        raise ValueError(f"{name} is {value!r}; use {words}")
    if kind in (int, float):
        return _check_number(name, kind, value, description)
    return value


def _check_number(name: str, kind: type, value: Any, description: Description) -> Any:
    number = _plain_number(kind, value)
    above, at_least = description.above, description.at_least
    below, at_most = description.below, description.at_most
    open_ended = below is None and at_most is None
    if number is None or math.isnan(number):
        remedy = f"give {name} as a plain number"
    elif (
        number < -MAX_NUMBER or (above is not None and number <= above) or (at_least is not None and number < at_least)
    ):
        remedy = f"raise {name}"
    elif (
        (open_ended and number > MAX_NUMBER)
        or (below is not None and number >= below)
        or (at_most is not None and number > at_most)
    ):
        remedy = f"lower {name}"
    else:
        return number
    if open_ended and number is not None and MAX_NUMBER < abs(number) < math.inf:
        at_most = MAX_NUMBER
    noun = "whole number" if kind is int else "finite number" if open_ended else "number"
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    text = " and ".join(f"{word} {bound:.12g}" for word, bound in bounds.items() if bound not in (None, math.inf))
    link = "" if not text else " of " if text.startswith("at") else " "
    raise ValueError(f"{name} is {value!r}; it must be a {noun}{link}{text}: {remedy}")


def _plain_number(kind: type, value: Any) -> Any:
    """A Python number from a number of Python or numpy; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and (kind is float or isinstance(value, int)):
        # A whole number beyond the largest float cannot be compared with a bound; it is as good as infinite.
        if abs(value) <= sys.float_info.max or value != value:
            return value
        return math.inf if value > 0 else -math.inf
    try:
        return operator.index(value) if kind is int else float(value) if isinstance(value, numbers.Real) else None
    except TypeError:
        return None
