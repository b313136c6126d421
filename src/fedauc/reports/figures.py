"""What a figure shows, described once. `plotly_figures.py` draws it on a page and `figure_files.py` into a file.

Colours are names (`series0`, `muted`, ...), because the page has a light and a dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SERIES = 8
"""How many series colours there are; more series repeat them with another dash."""

DASHES = ("solid", "dash", "dot", "dashdot")


def name_colour(number: int) -> str:
    """The colour of a series by its number.

    >>> name_colour(0), name_colour(8)
    ('series0', 'series0')
    """
    return f"series{number % SERIES}"


def name_dash(number: int) -> str:
    """The dash of a series, by which a reader can tell series apart without their colours."""
    return DASHES[number % len(DASHES)]


@dataclass(frozen=True)
class Line:
    """A line through points, with a band where `low` and `high` are given (at `band_x`, or else at `x`)."""

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str = "series0"
    dash: str = "solid"
    band_x: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    markers: bool = False
    in_legend: bool = True


@dataclass(frozen=True)
class Bars:
    """A histogram: `len(heights) + 1` edges."""

    name: str
    edges: np.ndarray
    heights: np.ndarray
    colour: str = "series0"


@dataclass(frozen=True)
class Intervals:
    """A dot with its interval per named row, the first row on top; NaN where a row has no interval."""

    name: str
    rows: Sequence[str]
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    colour: str = "series0"


@dataclass(frozen=True)
class Points:
    """Points with vertical intervals."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    colour: str = "series0"
    symbol: str = "circle"


@dataclass(frozen=True)
class Cells:
    """A grid of codes `[rows, columns]`: code c has the colour `colours[c]`, and its meaning is `meanings[c]`."""

    rows: Sequence[str]
    first_column: int
    codes: np.ndarray
    colours: Sequence[str]
    meanings: Sequence[str]


@dataclass(frozen=True)
class Shares:
    """A grid of numbers between 0 and 1, `[rows, columns]`, from pale to dark."""

    rows: Sequence[str]
    first_column: int
    values: np.ndarray
    meaning: str


Layer = Line | Bars | Intervals | Points | Cells | Shares


@dataclass(frozen=True)
class Axis:
    """An axis: its title, its range where it is fixed, and how its numbers are written."""

    title: str
    limits: tuple[float, float] | None = None
    logarithmic: bool = False
    as_share: bool = False


@dataclass(frozen=True)
class Figure:
    """A figure: `key` is its name in files and on the page, `summary` says in a sentence what it shows."""

    key: str
    title: str
    summary: str
    x: Axis
    y: Axis
    layers: Sequence[Layer]
    note: str = ""
    height: int = 340
    wide: bool = False
    legend: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Names and colours for a legend outside the drawing, which then has none inside."""


def round_numbers(values: Any) -> list[Any]:
    """Numbers with six digits, so that a page stays small; NaN, which JSON does not have, becomes None.

    >>> round_numbers([0.123456789, float("nan"), 3])
    [0.123457, None, 3.0]
    """
    array = np.asarray(values)
    if array.ndim == 2:
        return [round_numbers(row) for row in array]
    if array.dtype.kind in "iub":
        return list(array.tolist())
    return [None if not np.isfinite(value) else float(f"{value:.6g}") for value in array.tolist()]
