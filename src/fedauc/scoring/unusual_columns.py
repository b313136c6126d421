"""Columns of new rows that do not look like those of training: a broken feed is noticed before its scores are used."""

from __future__ import annotations

import numpy as np

from fedauc.data.features import CategoryColumn, FeatureEncoder

SHARE = 0.5
"""The share of rows from which a column is reported."""

DEVIATIONS = 100.0
"""Standard deviations from the training mean beyond which a number is taken to be in another unit."""


class UnusualColumns:
    """Counts, over blocks of rows, the values that are missing, unknown or far from those of the training rows."""

    def __init__(self, encoder: FeatureEncoder) -> None:
        self._encoder = encoder
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
                distance = np.abs(values - column.shift) > DEVIATIONS * column.scale
                self._count(column.name, "missing", np.isnan(values))
                self._count(
                    column.name, f"more than {DEVIATIONS:g} standard deviations from the training mean", distance
                )

    def describe(self) -> list[str]:
        """A line for each column that is unusual in at least half of the rows."""
        return [
            f"column {name!r} is {what} in {count:,} of {self._rows:,} rows; check where they come from"
            for (name, what), count in self._counts.items()
            if count >= max(1.0, SHARE * self._rows)
        ]

    def _count(self, name: str, what: str, rows: np.ndarray) -> None:
        self._counts[name, what] = self._counts.get((name, what), 0) + int(rows.sum())
