"""Fields that carry their help text and bounds: what is refused, in which words, and what the command line reads."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from fedauc.fields import check_fields, describe, list_choices, list_fields, option


@dataclass(frozen=True, kw_only=True)
class Sample:
    path: str = field(metadata=describe("The file to read."))
    count: int = option(3, "How many.", at_least=1, at_most=9)
    rate: float = option(0.1, "How fast.", above=0)
    share: float | None = option(None, "Which part.", above=0, below=1)
    limit: float = option(2.0, "The largest norm.", above=1, at_most=math.inf)
    widths: tuple[int, ...] = option((4, 4), "The layers.", at_least=1)
    kind: Literal["a", "b", "c"] = "a"
    weighting: str = option("clients", "Who counts.", choices=("clients", "pooled"))
    plain: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0; it must be a whole number of at least 1 and at most 9: raise count"),
        ({"count": 10}, "count is 10; it must be a whole number of at least 1 and at most 9: lower count"),
        ({"count": 2.0}, "count is 2.0; it must be a whole number of at least 1 and at most 9: give count as a plain"),
        ({"count": True}, "count is True; it must be a whole number"),
        ({"rate": 0}, "rate is 0; it must be a finite number above 0: raise rate"),
        ({"rate": math.inf}, "rate is inf; it must be a finite number above 0: lower rate"),
        ({"rate": math.nan}, "rate is nan; it must be a finite number above 0: give rate as a plain number"),
        ({"rate": "0.1"}, "rate is '0.1'; it must be a finite number above 0: give rate as a plain number"),
        ({"share": 1.0}, "share is 1.0; it must be a number above 0 and below 1: lower share"),
        ({"limit": 1.0}, "limit is 1.0; it must be a number above 1: raise limit"),
        ({"widths": (4, 0)}, "widths is 0; it must be a whole number of at least 1: raise widths"),
        ({"kind": "d"}, "kind is 'd'; use 'a', 'b' or 'c'"),
        ({"weighting": "client"}, "weighting is 'client'; use 'clients' or 'pooled'"),
        ({"plain": 1.5}, "plain is 1.5; it must be a whole number: give plain as a plain number"),
    ],
)
def test_a_bad_value_is_refused_with_name_value_bound_and_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sample(path="x", **values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_values_on_the_right_side_of_a_bound_stay_as_they_are() -> None:
    sample = Sample(path="x", count=9, rate=1, share=None, limit=math.inf)
    assert (sample.count, sample.share, sample.limit) == (9, None, math.inf)
    # An integer is a number too; it is written to a configuration as it was given.
    assert type(sample.rate) is int


def test_numpy_numbers_become_python_numbers() -> None:
    integers: Any = (np.int64(3), np.int32(5))
    sample = Sample(path="x", count=integers[0], rate=float(np.float32(0.5)), widths=integers)
    assert [type(value) for value in (sample.count, *sample.widths)] == [int, int, int]
    single: Any = np.float32(0.5)
    assert type(Sample(path="x", rate=single).rate) is float


def test_fields_say_what_they_are() -> None:
    known = {info.name: info for info in list_fields(Sample)}
    assert known["path"].default is MISSING
    assert known["path"].description.help == "The file to read."
    assert (known["count"].type, known["count"].default) == (int, 3)
    assert known["plain"].description.help == ""
    assert list_choices(known["kind"]) == ("a", "b", "c")
    assert list_choices(known["weighting"]) == ("clients", "pooled")
    assert list_choices(known["rate"]) == ()


def test_a_class_inside_a_function_is_checked_as_far_as_its_types_are_known() -> None:
    class Local:
        pass

    @dataclass(frozen=True)
    class Inner(Sample):
        thing: Local | None = None

    with pytest.raises(ValueError, match="count is 0"):
        Inner(path="x", count=0)
