"""What a site reports of its columns before the first round, so that the server can prepare features: sums alone.

Of a column of numbers or dates: how many rows have a value and how many have none, the mean, and the sum of squared
deviations (`data/summaries.py`). Of a category without an agreed vocabulary: how many rows have each value. No smallest
and no largest value is reported, and nothing that fewer rows than the site's policy asks for have in common: values of
a column, a category, a missing value, one of two values, a time of day. The server knows a site's number of rows, so
that such rows are counted among others instead of being left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.data.feature_fitting import RawColumn
from fedauc.data.summaries import CategorySummary, NumberSummary, summarize_categories, summarize_numbers
from fedauc.federation.schema import DataSchema, SchemaColumn
from fedauc.federation.serialization import Payload, unpack_tensors

SUM_FIELDS = 4
"""Numbers per column: rows with a value, rows without, mean, and sum of squared deviations."""

MAX_ANSWER_BYTES = 1 << 24

MAX_ROWS = 10**12
"""More rows than this are taken for an attempt to count more than all other sites."""

RANGE_TOLERANCE = 1e-6
"""What rounding may add, relative to the mean and the range."""

CATEGORY_FIELDS = 3
"""Numbers per category column beside its counts: rows, missing rows, and whether it is an identifier."""


class ColumnSums(NamedTuple):
    """The sums of one site, by the column's name; `with_times` lists the dates that have times of day."""

    numbers: Mapping[str, NumberSummary]
    categories: Mapping[str, CategorySummary]
    with_times: tuple[str, ...] = ()

    def list_row_counts(self) -> set[int]:
        """The numbers of rows that the columns have; a column without any was held back."""
        counts = {int(summary.counts[0] + summary.missing[0]) for summary in self.numbers.values()}
        counts |= {int(table.rows[0]) for table in self.categories.values()}
        return counts - {0}


def sum_columns(columns: Sequence[RawColumn], schema: DataSchema, minimum: int) -> ColumnSums:
    """The sums of a site's columns; what fewer than `minimum` rows share is left out."""
    numbers, categories, with_times = dict[str, NumberSummary](), dict[str, CategorySummary](), list[str]()
    agreed = {column.name: column for column in schema.columns}
    for raw in columns:
        if raw.kind == "category":
            if agreed[raw.name].needs_sums:
                categories[raw.name] = _hide_rare_values(summarize_categories(raw.values, raw.texts), minimum)
            continue
        numbers[raw.name] = _summarize_shown_numbers(raw.values, minimum)
        # Missing values are no numbers, whose remainder differs from itself and from 0.
        if raw.kind == "date" and np.count_nonzero(np.nan_to_num(raw.values) % 1) >= max(1, minimum):
            with_times.append(raw.name)
    return ColumnSums(numbers, categories, tuple(with_times))


def pack_sums(sums: ColumnSums) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header fields and the tensors of a message with these sums."""
    rows = [[float(summary[field][0]) for field in range(SUM_FIELDS)] for summary in sums.numbers.values()]
    tables = list(sums.categories.values())
    described = [
        {
            "name": name,
            "values": [table.values[code] for code in table.code.tolist()],
            "rows": [int(table.rows[0]), int(table.missing[0]), bool(table.is_identifier[0])],
        }
        for name, table in sums.categories.items()
    ]
    header = {"numbers": list(sums.numbers), "categories": described, "with_times": list(sums.with_times)}
    counts = tuple(torch.from_numpy(table.counts.astype(np.int64)) for table in tables)
    return header, {"sums": torch.tensor(rows, dtype=torch.float64).reshape(-1, SUM_FIELDS), "counts": counts}


def read_sums(payload: Payload, schema: DataSchema) -> ColumnSums:
    """The sums in a site's answer; a ValueError where they are not those of the schema's columns."""
    header, tensors = payload.read_header(), unpack_tensors(payload, MAX_ANSWER_BYTES)
    (rows,), counts = tensors["sums"], tensors["counts"]
    expected = [column.name for column in schema.columns if column.kind != "category"]
    if header.get("numbers") != expected or rows.dtype != torch.float64 or tuple(rows.shape) != (len(expected), 4):
        raise ValueError("its sums are not those of the schema's columns")
    if not torch.isfinite(rows).all() or (rows[:, [0, 1, 3]] < 0).any():
        raise ValueError("its sums are not finite, or a count is negative")
    if (rows[:, :2] > MAX_ROWS).any() or (rows[:, :2] != rows[:, :2].floor()).any():
        raise ValueError(f"its sums are not of whole numbers of rows up to {MAX_ROWS:.0e}")
    agreed = {column.name: column for column in schema.columns}
    for name, (count, _, mean, squares) in zip(expected, rows.tolist(), strict=True):
        _check_range(agreed[name], count, mean, squares)
    numbers = {name: _make_summary(*row) for name, row in zip(expected, rows.tolist(), strict=True)}
    open_names = [column.name for column in schema.columns if column.kind == "category" and column.needs_sums]
    described = header.get("categories", [])
    if [entry.get("name") for entry in described] != open_names or len(counts) != len(open_names):
        raise ValueError("its counts of categories are not those of the schema's open columns")
    categories = {entry["name"]: _read_category(entry, column) for entry, column in zip(described, counts, strict=True)}
    dates = [column.name for column in schema.columns if column.kind == "date"]
    sums = ColumnSums(numbers, categories, tuple(name for name in dates if name in header.get("with_times", [])))
    if len(sums.list_row_counts()) > 1:
        raise ValueError(f"its columns have different numbers of rows: {sorted(sums.list_row_counts())[:3]}")
    return sums


def _check_range(column: SchemaColumn, count: float, mean: float, squares: float) -> None:
    """Refuse a mean outside the agreed range, and deviations that no values within it have."""
    low = -math.inf if column.minimum is None else column.minimum
    high = math.inf if column.maximum is None else column.maximum
    if column.kind == "boolean":
        low, high = 0.0, 1.0
    tolerance = RANGE_TOLERANCE * max(1.0, abs(mean))
    if count and not low - tolerance <= mean <= high + tolerance:
        raise ValueError(f"its mean of column {column.name!r} is outside the agreed range")
    width = high - low
    # The deviations are largest where all values are at the two ends.
    if math.isfinite(width) and squares > count * ((high - mean) * (mean - low) + tolerance * max(1.0, width)):
        raise ValueError(f"its deviations of column {column.name!r} are too large for the agreed range")


def count_sum_traffic(sums: ColumnSums) -> tuple[int, int]:
    """The numbers that a site sends, and the bytes of text: names of categories, and a byte per date."""
    floats = SUM_FIELDS * len(sums.numbers)
    floats += sum(CATEGORY_FIELDS + len(table.counts) for table in sums.categories.values())
    texts = sum(len(value.encode()) for table in sums.categories.values() for value in table.values)
    return floats, texts + len(sums.with_times)


def _make_summary(count: float, missing: float, mean: float, squares: float) -> NumberSummary:
    """A summary without its extremes: they are known where all values are equal, and infinite otherwise."""
    low, high = (np.inf, -np.inf) if not count else (mean, mean) if not squares else (-np.inf, np.inf)
    counts = (np.array([int(count)]), np.array([int(missing)]))
    return NumberSummary(*counts, *(np.array([float(value)]) for value in (mean, squares, low, high)))


def _summarize_shown_numbers(values: np.ndarray, minimum: int) -> NumberSummary:
    """The sums of a column, of which nothing is left where few rows have a value, or one of two values."""
    summary = summarize_numbers(values)
    count, missing = int(summary.counts[0]), int(summary.missing[0])
    ones, zeros = np.count_nonzero(values == 1), np.count_nonzero(values == 0)
    is_rare = ones + zeros == count and 0 < min(ones, zeros) < minimum
    if count < minimum or is_rare:
        return _make_summary(0, 0, 0, 0)
    shown = _drop_extremes(summary)
    if not 0 < missing < minimum:
        return shown
    return shown._replace(counts=np.array([count + missing]), missing=np.array([0]))


def _drop_extremes(summary: NumberSummary) -> NumberSummary:
    count, missing, mean, squares, low, high = (float(value[0]) for value in summary)
    # Rounding gives equal values a mean beside them and squares above zero, which would look like a tiny deviation.
    return _make_summary(count, missing, low, 0.0) if low == high else _make_summary(count, missing, mean, squares)


def _hide_rare_values(table: CategorySummary, minimum: int) -> CategorySummary:
    """The same without the values of fewer rows, and without as many others as it takes to hide those rows among them.

    What is left out stays rows of unnamed values, and so do missing values of few rows.
    """
    missing = np.where(table.missing < minimum, 0, table.missing)
    shown = table.counts >= minimum
    known = int(table.rows[0] - missing[0])
    if not table.is_identifier[0]:
        for position in np.argsort(table.counts, kind="stable"):
            if not 0 < known - int(table.counts[shown].sum()) < minimum:
                break
            shown[position] = False
    return table._replace(site=table.site[shown], code=table.code[shown], counts=table.counts[shown], missing=missing)


def _read_category(entry: Mapping[str, Any], counts: Tensor) -> CategorySummary:
    values, (rows, missing, is_identifier) = entry["values"], entry["rows"]
    if counts.dtype != torch.int64 or tuple(counts.shape) != (len(values),) or len(set(values)) != len(values):
        raise ValueError(f"its counts of column {entry['name']!r} do not fit its values")
    if not all(isinstance(value, str) for value in values) or (len(values) and int(counts.min()) < 0):
        raise ValueError(f"its categories of column {entry['name']!r} are not texts with counts")
    known_rows = [rows, missing, *counts.tolist()]
    if not all(type(number) is int and 0 <= number <= MAX_ROWS for number in known_rows):
        raise ValueError(f"its rows of column {entry['name']!r} are not counts up to {MAX_ROWS:.0e}")
    if sum(counts.tolist()) + missing > rows:
        raise ValueError(f"its counts of column {entry['name']!r} are more than its {rows} rows")
    codes, site = np.arange(len(values)), np.zeros(len(values), dtype=np.int64)
    known = (np.array([int(rows)]), np.array([int(missing)]), np.array([bool(is_identifier)]))
    return CategorySummary(values, site, codes, counts.numpy(), *known)
