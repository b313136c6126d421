"""Checks that objectives share, each with a one-line error."""

from __future__ import annotations

import math


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Refuse a parameter that is not a number strictly between two bounds (`high` may be infinite).

    >>> check_between("margin", -1.0, 0, math.inf)
    Traceback (most recent call last):
    ...
    ValueError: margin is -1.0; it must be a finite number above 0: raise margin
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low < value < high:
        return
    span = f"a finite number above {low:g}" if high == math.inf else f"a number above {low:g} and below {high:g}"
    remedy = _remedy(name, value if number else math.nan, low, high)
    raise ValueError(f"{name} is {value!r}; it must be {span}: {remedy}")


def check_positive(name: str, value: float) -> None:
    """Refuse a parameter that is not a finite number above 0."""
    check_between(name, value, 0, math.inf)


def check_raw(name: str, score: str) -> None:
    """Refuse a squashed score where the objective is only defined on raw outputs."""
    if score != "identity":
        raise ValueError(f"score is {score!r}; the {name} objective needs raw outputs: use score='identity'")


def _remedy(name: str, value: float, low: float, high: float) -> str:
    if value <= low:
        return f"raise {name}"
    return f"lower {name}" if value >= high else f"give {name} as a plain number"
