"""From the columns of a raw table to the inputs of a model, by numbers that were fitted on the training rows.

A number x becomes (x - shift) / scale, with the training mean for a missing value; a column that was missing in some
training row also gets an indicator. With bin edges b_0 < ... < b_T it also gets the piecewise-linear encoding of
Gorishniy et al. 2022 (On Embeddings for Numerical Features in Tabular Deep Learning): component t is
clip((z - b_{t-1}) / (b_t - b_{t-1}), 0, 1) for the standardised value z. (In that paper the first and the last
component are not clipped; here z itself stands beside them.) A category becomes one 1 among zeros. A date is a number
of days since 1970, and the sines and cosines of its position in the year, the week and, where times occur, the day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedauc.data.columns import as_days, as_numbers, code_texts, is_table, read_columns
from fedauc.data.io.memory import row_blocks

if TYPE_CHECKING:
    from torch import nn

BLOCK = 1 << 20
"""How many output values are computed at once: 8 MiB in float64."""

YEAR, WEEK, DAY = 365.2425, 7.0, 1.0
"""Periods in days."""


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers. `fill` replaces missing values; `edges` are those of the bins of (x - shift) / scale."""

    name: str
    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0
    has_indicator: bool = False
    edges: tuple[float, ...] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name per output."""
        bins = (f"{self.name} (bin {number})" for number in range(1, len(self.edges)))
        return (self.name, *bins, *([f"{self.name} (missing)"] if self.has_indicator else []))


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories; a value that is not listed is other, and all zeros if no training row was."""

    name: str
    values: tuple[str, ...]
    has_missing: bool = False
    has_other: bool = False

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name per output."""
        missing = (f"{self.name} (missing)",) if self.has_missing else ()
        other_values = (f"{self.name} (other)",) if self.has_other else ()
        return (*(f"{self.name}={value}" for value in self.values), *missing, *other_values)

    def look_up_codes(self, values: np.ndarray) -> np.ndarray:
        """The index of each row's output among those of the column; their number where all are zero."""
        codes, texts = code_texts(values)
        return np.asarray(self.make_code_table(texts)[codes])

    def make_code_table(self, texts: Sequence[str]) -> np.ndarray:
        """The same index for each of these texts, and as the last entry that of a missing value."""
        width = len(self.feature_names)
        other_code = width - 1 if self.has_other else width
        missing = len(self.values) if self.has_missing else other_code
        known = {value: number for number, value in enumerate(self.values)}
        return np.array([*(known.get(text, other_code) for text in texts), missing], dtype=np.int64)


@dataclass(frozen=True)
class DateColumn:
    """A column of dates, in days since 1970."""

    name: str
    fill: float = 0.0
    shift: float = 0.0
    scale: float = 1.0
    has_indicator: bool = False
    has_time: bool = False

    @property
    def periods(self) -> tuple[float, ...]:
        """The periods in days of the sines and cosines."""
        return (YEAR, WEEK, DAY) if self.has_time else (YEAR, WEEK)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name per output."""
        waves = [f"{self.name} ({wave} of {part})" for part in self._period_names for wave in ("sine", "cosine")]
        return (self.name, *waves, *([f"{self.name} (missing)"] if self.has_indicator else []))

    @property
    def _period_names(self) -> tuple[str, ...]:
        return ("year", "week", "day")[: len(self.periods)]


FeatureColumn = NumberColumn | CategoryColumn | DateColumn

KINDS: dict[str, type[FeatureColumn]] = {"number": NumberColumn, "category": CategoryColumn, "date": DateColumn}
"""The kinds of columns by their names in documents."""


def describe_kind(column: FeatureColumn) -> str:
    """The name of a column's kind: number, category or date."""
    return next(kind for kind, owner in KINDS.items() if isinstance(column, owner))


@dataclass(frozen=True)
class FeatureEncoder:
    """How raw columns become inputs: fitted, frozen, and written to JSON with the model.

    >>> encoder = FeatureEncoder((NumberColumn("age", 40, 40, 10), CategoryColumn("state", ("CA", "NY"))))
    >>> encoder.encode({"state": ["NY", "TX"], "age": [50, None]})
    array([[1., 0., 1.],
           [0., 0., 0.]], dtype=float32)
    >>> FeatureEncoder.from_document(encoder.to_document()) == encoder
    True
    """

    columns: tuple[FeatureColumn, ...]

    @staticmethod
    def of_numbers(names: Sequence[str], mean: np.ndarray, deviation: np.ndarray) -> FeatureEncoder:
        """The encoder that standardises columns of numbers."""
        moments = zip(names, mean.tolist(), deviation.tolist(), strict=True)
        return FeatureEncoder(tuple(NumberColumn(name, mean, mean, deviation) for name, mean, deviation in moments))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The columns of a raw table that are needed."""
        return tuple(column.name for column in self.columns)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name per output."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def encode(self, table: Any) -> np.ndarray:
        """Inputs `[n, width]` in float32 for the rows of a table, whose columns are found by name in any order.

        A 2-D array will do where all columns are numbers, in the order of `input_names`.
        """
        return self.encode_columns(*self.split_columns(table))

    def split_columns(self, table: Any) -> tuple[np.ndarray, np.ndarray]:
        """Numbers `[n, a]` in float64, dates as days and NaN where missing, and codes of categories `[n, b]`."""
        if not is_table(table):
            return self._read_array(table), np.zeros((len(table), 0), dtype=np.int64)
        measured = [column for column in self.columns if not isinstance(column, CategoryColumn)]
        arrays = read_columns(table, self.input_names)
        rows = len(next(iter(arrays.values()))) if arrays else 0
        for name, array in arrays.items():
            if len(array) != rows:
                raise ValueError(f"column {name!r} has {len(array)} rows and the first one {rows}; give all the same")
        numbers = np.empty((rows, len(measured)))
        for index, column in enumerate(measured):
            read = as_days if isinstance(column, DateColumn) else as_numbers
            numbers[:, index] = read(arrays[column.name], column.name)
        categories = [column for column in self.columns if isinstance(column, CategoryColumn)]
        codes = [category.look_up_codes(arrays[category.name]) for category in categories]
        return numbers, np.stack(codes, axis=1) if codes else np.zeros((rows, 0), dtype=np.int64)

    def encode_columns(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Inputs in float32 from what `split_columns` returns."""
        encoded = np.empty((len(numbers), len(self.feature_names)), dtype=np.float32)
        for block in row_blocks(encoded.shape, BLOCK):
            encoded[block] = self._encode_block(np.asarray(numbers[block], dtype=np.float64), codes[block])
        return encoded

    def build_module(self) -> nn.Module:
        """The same as a network: `forward(numbers, codes)` gives float32 `[n, width]`."""
        from fedauc.data._feature_module import FeatureModule

        return FeatureModule(self.layout)

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"columns": [{"kind": describe_kind(column), **asdict(column)} for column in self.columns]}

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> FeatureEncoder:
        """The encoder that a document describes."""
        columns = []
        for entry in document["columns"]:
            values: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
            }
            columns.append(KINDS[values.pop("kind")](**values))
        return FeatureEncoder(tuple(columns))

    @cached_property
    def layout(self) -> FeatureLayout:
        """Where every output comes from."""
        return _lay_out_features(self.columns)

    def _read_array(self, values: Any) -> np.ndarray:
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        others = [column.name for column in self.columns if not isinstance(column, NumberColumn)]
        if others:
            raise ValueError(
                f"rows are an array, but column {others[0]!r} is no number; give a table with the columns "
                f"{', '.join(self.input_names)}"
            )
        if array.ndim != 2 or array.shape[1] != len(self.columns) or array.dtype.kind not in "fiub":
            raise ValueError(
                f"rows have shape {array.shape} and type {array.dtype}; give numbers [n, {len(self.columns)}], in the "
                f"order {', '.join(self.input_names)}"
            )
        return array

    def _encode_block(self, numbers: np.ndarray, codes: np.ndarray) -> np.ndarray:
        layout, missing = self.layout, np.isnan(numbers)
        scaled = (np.where(missing, layout.fill, numbers) - layout.shift) / layout.scale
        if layout.only_numbers:
            return np.asarray(scaled)
        bins = np.clip((scaled[:, layout.bin_column] - layout.bin_left) / layout.bin_width, 0, 1)
        angles = 2 * np.pi / layout.wave_period * numbers[:, layout.wave_column]
        waves = np.nan_to_num(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))
        categories = codes[:, layout.category_column] == layout.category_code
        parts = [scaled, missing[:, layout.indicator_column], bins, waves, categories]
        return np.asarray(np.concatenate(parts, axis=1)[:, layout.order])


class FeatureLayout(NamedTuple):
    """Parameters of the outputs by kind, as arrays. `order` brings the kinds, one after the other, into column order.

    The kinds are the scaled numbers and dates, indicators, bins, sines, cosines and categories. `fill`, `shift` and
    `scale` have one entry per number or date.
    """

    fill: np.ndarray
    shift: np.ndarray
    scale: np.ndarray
    indicator_column: np.ndarray
    bin_column: np.ndarray
    bin_left: np.ndarray
    bin_width: np.ndarray
    wave_column: np.ndarray
    wave_period: np.ndarray
    category_column: np.ndarray
    category_code: np.ndarray
    order: np.ndarray

    @property
    def only_numbers(self) -> bool:
        """Whether the outputs are the scaled numbers and nothing else."""
        return len(self.order) == len(self.fill)


def _lay_out_features(columns: Sequence[FeatureColumn]) -> FeatureLayout:
    # Each list holds (position among the outputs, parameters...) of one kind of output.
    scaled: list[tuple[int, float, float, float]] = []
    indicators: list[tuple[int, int]] = []
    bins: list[tuple[int, int, float, float]] = []
    waves: list[tuple[int, int, float]] = []
    categories: list[tuple[int, int, int]] = []
    position, category_count = 0, 0
    for column in columns:
        width = len(column.feature_names)
        if isinstance(column, CategoryColumn):
            categories += [(position + code, category_count, code) for code in range(width)]
            category_count += 1
        else:
            number = len(scaled)
            scaled.append((position, column.fill, column.shift, column.scale))
            if isinstance(column, NumberColumn):
                pairs = zip(column.edges[:-1], column.edges[1:], strict=True)
                bins += [
                    (position + 1 + index, number, left, right - left) for index, (left, right) in enumerate(pairs)
                ]
            else:
                waves += [(position + 1 + 2 * index, number, period) for index, period in enumerate(column.periods)]
            if column.has_indicator:
                indicators.append((position + width - 1, number))
        position += width
    sines = [wave[0] for wave in waves]
    kinds = [[entry[0] for entry in kind] for kind in (scaled, indicators, bins)]
    positions = [*kinds[0], *kinds[1], *kinds[2], *sines, *(sine + 1 for sine in sines), *(c[0] for c in categories)]

    def select(entries: Sequence[tuple[Any, ...]], field: int, dtype: type = np.float64) -> np.ndarray:
        return np.array([entry[field] for entry in entries], dtype=dtype)

    return FeatureLayout(
        fill=select(scaled, 1),
        shift=select(scaled, 2),
        scale=select(scaled, 3),
        indicator_column=select(indicators, 1, np.int64),
        bin_column=select(bins, 1, np.int64),
        bin_left=select(bins, 2),
        bin_width=select(bins, 3),
        wave_column=select(waves, 1, np.int64),
        wave_period=select(waves, 2),
        category_column=select(categories, 1, np.int64),
        category_code=select(categories, 2, np.int64),
        order=np.argsort(np.array(positions, dtype=np.int64)),
    )
