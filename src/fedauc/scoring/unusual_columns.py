"""Columns of new rows that do not look like those of training: a broken feed is noticed before its scores are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedauc.data.features import CategoryColumn, FeatureEncoder

SHARE = 0.5
"""The share of rows from which a column is reported."""

DEVIATIONS = 100.0
"""Standard deviations from the training mean beyond which a number is taken to be in another unit."""


@dataclass(frozen=True)
class ColumnRange:
    """The values that a column of numbers may have, as the sites of a federation have agreed."""

    name: str
    minimum: float | None = None
    maximum: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        """The range in words.

        >>> str(ColumnRange("age", 0.0, 120.0, "years")), str(ColumnRange("dose", minimum=0.0))
        ('0 to 120 years', 'at least 0')
        """
        low, high = (None if bound is None else f"{bound:.12g}" for bound in (self.minimum, self.maximum))
        words = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
        return f"{words} {self.unit}".strip()

    def find_outside(self, values: np.ndarray) -> np.ndarray:
        """Which values are outside; missing ones are not."""
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return (values < low) | (values > high)


class UnusualColumns:
    """Counts, over blocks of rows, the values that are missing, unknown or far from those of the training rows.

    Of columns with an agreed range it counts the values outside, too.
    """

    def __init__(self, encoder: FeatureEncoder, ranges: Sequence[ColumnRange] = ()) -> None:
        self._encoder = encoder
        self._ranges = {column.name: column for column in ranges}
        self._outside = dict.fromkeys(self._ranges, 0)
        self._rows = 0
        self._counts: dict[tuple[str, str], int] = {}

    def add_block(self, table: object) -> None:
        """Count a block of rows."""
        numbers, codes = self._encoder.split_columns(table)
        self._rows += len(numbers)
        number_columns, code_columns = iter(numbers.T), iter(codes.T)
        for column in self._encoder.columns:
            if isinstance(column, CategoryColumn):
                missing = np.full(len(numbers), False)
                code = next(code_columns)
                if column.has_missing:
                    missing = code == len(column.values)
                self._count(column.name, "missing", missing)
                self._count(
                    column.name, "a category that training did not know", (code >= len(column.values)) & ~missing
                )
            else:
                values = next(number_columns)
                if column.name in self._ranges:
                    self._outside[column.name] += int(self._ranges[column.name].find_outside(values).sum())
                with np.errstate(invalid="ignore", over="ignore"):
                    distance = np.abs(values - column.shift) > DEVIATIONS * column.scale
                self._count(column.name, "missing", np.isnan(values))
                self._count(
                    column.name, f"more than {DEVIATIONS:g} standard deviations from the training mean", distance
                )

    def describe(self) -> list[str]:
        """A line for each column that is unusual in at least half of the rows, or outside its agreed range in any."""
        lines = [
            f"column {name!r} is {what} in {count:,} of {self._rows:,} rows; check where they come from"
            for (name, what), count in self._counts.items()
            if count >= max(1.0, SHARE * self._rows)
        ]
        return lines + [
            f"column {name!r} is outside its agreed range, {self._ranges[name]}, in {count:,} of {self._rows:,} rows; "
            "check its unit"
            for name, count in self._outside.items()
            if count
        ]

    def _count(self, name: str, what: str, rows: np.ndarray) -> None:
        self._counts[name, what] = self._counts.get((name, what), 0) + int(rows.sum())
