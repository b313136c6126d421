"""What the suites have in common: a condition with a sentence, exact and rounded comparison, and configurations."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedauc import plugins
from fedauc.experiments.config import from_plain, to_plain
from fedauc.trees import Tree, tree_leaves


def expect(condition: object, sentence: str) -> None:
    """Raise an AssertionError with the sentence unless the condition holds."""
    if not condition:
        raise AssertionError(sentence)


def expect_close(actual: Any, expected: Any, sentence: str, relative: float = 1e-12, absolute: float = 1e-12) -> None:
    """Expect two trees of one structure with numbers that agree up to rounding."""
    expect_same_shapes(actual, expected, sentence)
    for left, right in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        try:
            torch.testing.assert_close(left, right, rtol=relative, atol=absolute)
        except AssertionError as error:
            raise AssertionError(f"{sentence}: {' '.join(str(error).split())}") from error


def expect_same_shapes(actual: Tree, expected: Tree, sentence: str) -> None:
    """Expect two trees whose leaves have the same shapes."""
    shapes, expected_shapes = ([tuple(leaf.shape) for leaf in tree_leaves(tree)] for tree in (actual, expected))
    expect(shapes == expected_shapes, f"{sentence}: the shapes are {shapes} instead of {expected_shapes}")


def expect_refused(call: Callable[[], object], start: str) -> None:
    """Expect a ValueError of one line that begins with `start`."""
    try:
        call()
    except ValueError as error:
        text = str(error)
        expect(text.startswith(start), f"the error is {text!r}; it must begin with {start!r}")
        expect("\n" not in text, f"the error must be one line, not {text!r}")
    else:
        raise AssertionError(f"nothing was refused; the error must begin with {start!r}")


def same_bits(left: Tree, right: Tree) -> bool:
    """Whether two trees have the same structure and, leaf by leaf, the same type, shape and bits."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and len(left) == len(right) and all(map(same_bits, left, right))


def all_finite(tree: Tree) -> bool:
    """Whether every number of a tree is finite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(tree))


@contextmanager
def untouched_generators(what: str) -> Iterator[None]:
    """Expect that the `with` block leaves every global random generator as it is."""
    old_states = _generator_states()
    yield
    for name, (old, new) in zip(
        ("random", "numpy", "torch"), zip(old_states, _generator_states(), strict=True), strict=True
    ):
        expect(old == new, f"{what} uses the global generator of {name}; draw with fedauc.keys instead")


def _generator_states() -> tuple[object, ...]:
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


def check_configuration(member: Any, base: type = object) -> None:
    """A member is a frozen, hashable dataclass of its base class that survives JSON, as config.json stores it."""
    if isinstance(member, type):
        raise AssertionError(f"{member.__name__} is a class; check an instance: {member.__name__}()")
    kind, owner = type(member), plugins.describe_owner(type(member))
    expect(isinstance(member, base), f"{owner} is no {base.__name__}, which this suite is for")
    expect(dataclasses.is_dataclass(member), f"{owner} must be a dataclass: put @dataclass(frozen=True) above it")
    twin = dataclasses.replace(copy.deepcopy(member))
    expect(twin == member, f"{owner} is not equal to a copy with the same parameters")
    expect(hash(twin) == hash(member), f"{owner} has another hash than a copy with the same parameters")
    for name in [field.name for field in dataclasses.fields(member)] or ["anything"]:
        try:
            setattr(twin, name, None)
        except dataclasses.FrozenInstanceError:
            continue
        raise AssertionError(f"{owner} is not frozen, since {name} can be set: put @dataclass(frozen=True) above it")
    with plugins.restore_registrations():
        for outsider in find_outsiders(member):
            plugins.add_class(outsider)
        again = from_plain(kind, json.loads(json.dumps(to_plain(member))), kind.__name__)
    expect(again == member, f"{owner} is {member!r}, but {again!r} after it was written to JSON and read back")
    expect(hash(again) == hash(member), f"{owner} has another hash after it was written to JSON and read back")


def find_outsiders(value: Any) -> Iterator[type]:
    """The classes of a member, and of the members inside it, that are neither in the library nor registered."""
    if isinstance(value, tuple):
        for item in value:
            yield from find_outsiders(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(getattr(type(value), "name", None), str) and plugins.plugin_of_class(type(value)) is None:
            yield type(value)
        for field in dataclasses.fields(value):
            yield from find_outsiders(getattr(value, field.name))
