"""Bounds on parameters, each broken with one line that names the parameter, its value and the bound."""

from __future__ import annotations

import math


def whole(name: str, value: int, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`.

    >>> whole("clients", 0)
    Traceback (most recent call last):
    ...
    ValueError: clients is 0; it must be an integer of at least 1
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")


def share(name: str, value: float) -> None:
    """Refuse anything outside [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1")


def fraction(name: str, value: float) -> None:
    """Refuse anything outside (0, 1)."""
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}; it must be above 0 and below 1")


def positive(name: str, value: float) -> None:
    """Refuse anything but a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def nonnegative(name: str, value: float) -> None:
    """Refuse anything but a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number of at least 0")
