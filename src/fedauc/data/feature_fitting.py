"""Fit a feature encoder on training rows, from summaries of the sites alone (`summaries.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from fedauc.data.features import CategoryColumn, DateColumn, FeatureColumn, FeatureEncoder, NumberColumn
from fedauc.data.io.memory import row_blocks
from fedauc.data.summaries import (
    BLOCK,
    CategoryTotals,
    NumberSummary,
    SummaryTraffic,
    count_text_bytes,
    estimate_quantiles,
    merge_categories,
    merge_numbers,
    sketch_numbers,
    summarize_categories,
    summarize_numbers,
)

Kind = Literal["number", "boolean", "category", "date"]

SUMMARY_FIELDS = len(NumberSummary._fields)


class RawColumn(NamedTuple):
    """A column before it is encoded: numbers, booleans and days in float64 with NaN, or codes of `texts` with -1."""

    name: str
    kind: Kind
    values: np.ndarray
    texts: Sequence[str] = ()


class FeatureSettings(NamedTuple):
    """How columns are encoded; the columns in `kept` are never left out."""

    standardize: bool = True
    bins: int = 0
    min_category_rows: int = 10
    max_categories: int = 50
    kept: tuple[str, ...] = ()


class FittedFeatures(NamedTuple):
    """An encoder, the columns that it leaves out with the reasons, and what the sites and the server sent."""

    encoder: FeatureEncoder
    ignored: Mapping[str, str]
    traffic: SummaryTraffic


class ColumnFit(NamedTuple):
    """What became of a column: its encoding, or the reason why it is left out."""

    column: FeatureColumn | None
    reason: str
    traffic: SummaryTraffic


def fit_features(
    columns: Sequence[RawColumn], settings: FeatureSettings, site: np.ndarray | None = None, sites: int = 1
) -> FittedFeatures:
    """Fit on training rows, of which `site` says whose they are; the result does not depend on how they are divided."""
    traffic = SummaryTraffic(sites)
    fitted, ignored = list[FeatureColumn](), dict[str, str]()
    for raw in columns:
        fit = _fit_category if raw.kind == "category" else _fit_number
        column, reason, traffic = fit(raw, settings, site, traffic)
        if column is None:
            ignored[raw.name] = reason
        else:
            fitted.append(column)
    return FittedFeatures(FeatureEncoder(tuple(fitted)), ignored, traffic)


def _fit_number(
    raw: RawColumn, settings: FeatureSettings, site: np.ndarray | None, traffic: SummaryTraffic
) -> ColumnFit:
    sites = traffic.sites
    merged = merge_numbers(summarize_numbers(raw.values, site, sites))
    traffic = traffic.add(SUMMARY_FIELDS * sites, 2)
    is_date = raw.kind == "date"
    column, reason = choose_number_encoding(raw.name, raw.kind, merged, settings, is_date and has_times(raw.values))
    if column is None:
        return ColumnFit(None, reason, traffic)
    if isinstance(column, DateColumn):
        # Each site says whether it has times of day.
        return ColumnFit(column, "", traffic.add(0, 0, text_up=sites))
    if settings.standardize and settings.bins and raw.kind == "number" and merged.low[0] < merged.high[0]:
        sketch = sketch_numbers(raw.values, column.shift, column.scale, site, sites)
        edges = _choose_edges(estimate_quantiles(sketch, np.linspace(0, 1, settings.bins + 1)), merged)
        # A bucket is a key and a count.
        traffic = traffic.add(2 * len(sketch.counts), len(edges))
        column = replace(column, edges=edges)
    return ColumnFit(column, "", traffic)


def choose_number_encoding(
    name: str, kind: Kind, merged: NumberSummary, settings: FeatureSettings, has_time: bool = False
) -> tuple[NumberColumn | DateColumn | None, str]:
    """The encoding of a column of numbers or dates from the summary of all rows, or None and why it is left out."""
    count, missing, mean, _, low, high = (float(value[0]) for value in merged)
    if count == 0:
        return None, "no training row has a value"
    # Unscaled numbers are passed on as they are, and so are constant ones.
    if low == high and not missing and name not in settings.kept and (settings.standardize or kind == "date"):
        return None, f"all training rows have the same value, {low:.12g}"
    deviation, indicator = float(merged.deviation[0]), missing > 0
    if kind == "date":
        return DateColumn(name, mean, mean, deviation, indicator, has_time), ""
    if not settings.standardize:
        return NumberColumn(name, mean, 0.0, 1.0, indicator), ""
    return NumberColumn(name, mean, mean, deviation, indicator), ""


def has_times(days: np.ndarray) -> bool:
    """Whether some of these days have a time of day."""
    return any((np.nan_to_num(days[block]) % 1 != 0).any() for block in row_blocks(days.shape, BLOCK))


def _choose_edges(quantiles: np.ndarray, merged: NumberSummary) -> tuple[float, ...]:
    """Increasing bin edges from the smallest to the largest value; none where a single bin would be left."""
    low, high = ((bound - merged.mean[0]) / merged.deviation[0] for bound in (merged.low[0], merged.high[0]))
    inner = np.unique(quantiles[1:-1])
    # An edge that differs from another by rounding would make a bin of no width.
    gap = 1e-6 * (high - low)
    edges = [low, *(edge for edge in inner.tolist() if low + gap < edge < high - gap), high]
    return tuple(float(edge) for edge in edges) if len(edges) > 2 else ()


def _fit_category(
    raw: RawColumn, settings: FeatureSettings, site: np.ndarray | None, traffic: SummaryTraffic
) -> ColumnFit:
    summary = summarize_categories(raw.values, raw.texts, site, traffic.sites)
    totals = merge_categories([summary])
    column, reason = choose_category_encoding(raw.name, totals, settings)
    # Rows, missing rows and whether values are reported; then a count for every value that is.
    floats = 3 * traffic.sites + len(summary.counts)
    vocabulary = sum(len(value.encode()) + 1 for value in _choose_vocabulary(totals, settings))
    traffic = traffic.add(floats, 1, count_text_bytes(summary), vocabulary)
    return ColumnFit(column, reason, traffic)


def choose_category_encoding(
    name: str, totals: CategoryTotals, settings: FeatureSettings
) -> tuple[CategoryColumn | None, str]:
    """The encoding of a column of categories from the counts of all sites, or None and why it is left out."""
    values = _choose_vocabulary(totals, settings)
    listed = sum(totals.counts[value] for value in values)
    known, is_kept = totals.rows - totals.missing, name in settings.kept
    if known == 0:
        return None, "no training row has a value"
    if totals.is_identifier and not is_kept:
        return None, "nearly every value is different, like a name or an identifier"
    if len(totals.counts) == 1 and not totals.missing and not is_kept:
        return None, f"all training rows have the same value, {next(iter(totals.counts))!r}"
    if not values and not totals.missing and not is_kept:
        return None, f"no value has the {settings.min_category_rows} training rows that a category needs"
    return CategoryColumn(name, values, has_missing=totals.missing > 0, has_other=listed < known), ""


def _choose_vocabulary(totals: CategoryTotals, settings: FeatureSettings) -> tuple[str, ...]:
    """The values that are frequent enough for a feature of their own, in alphabetical order."""
    frequent = [value for value, count in totals.counts.items() if count >= settings.min_category_rows]
    return tuple(sorted(frequent[: settings.max_categories]))


class RawEncoder:
    """Encodes rows of raw columns, a block at a time."""

    def __init__(self, encoder: FeatureEncoder, columns: Mapping[str, RawColumn]) -> None:
        self._encoder, self._columns = encoder, columns
        self._code_tables = {
            column.name: column.make_code_table(columns[column.name].texts)
            for column in encoder.columns
            if isinstance(column, CategoryColumn)
        }

    def encode_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        """The inputs `[n, width]` in float32 of some rows."""
        numbers, codes = list[np.ndarray](), list[np.ndarray]()
        for column in self._encoder.columns:
            values = np.asarray(self._columns[column.name].values[rows])
            if column.name in self._code_tables:
                codes.append(self._code_tables[column.name][values])
            else:
                numbers.append(values.astype(np.float64, copy=False))
        length = len((numbers or codes)[0])
        return self._encoder.encode_columns(
            np.stack(numbers, axis=1) if numbers else np.zeros((length, 0)),
            np.stack(codes, axis=1) if codes else np.zeros((length, 0), dtype=np.int64),
        )
