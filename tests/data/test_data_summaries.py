"""Summaries of sites: merging them gives what pooled rows would, and a site alone reports the same as among others."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.data import summaries
from fedauc.data.columns import code_texts
from fedauc.data.feature_fitting import FeatureSettings, RawColumn, fit_features
from fedauc.data.features import CategoryColumn, NumberColumn
from fedauc.data.summaries import (
    CategorySummary,
    estimate_quantiles,
    merge_categories,
    merge_numbers,
    sketch_numbers,
    stack_numbers,
    summarize_categories,
    summarize_numbers,
)

ROWS, SITES = 5000, 40
DRAW = np.random.default_rng(0)
# A large mean beside a small deviation: the naive E[x^2] - E[x]^2 would lose all digits here.
VALUES = np.where(DRAW.random(ROWS) < 0.1, np.nan, DRAW.normal(1e6, 0.5, ROWS))
SITE = DRAW.integers(0, SITES - 1, ROWS)
"""The last site has no row."""

TEXTS = [["gold", "silver", "bronze", "tin"][number] for number in DRAW.integers(0, 4, ROWS)]
CODES, TEXT_VALUES = code_texts(
    np.array([text if draw < 0.9 else None for text, draw in zip(TEXTS, DRAW.random(ROWS), strict=True)], object)
)


@pytest.mark.parametrize("block", [7, 1 << 18])
def test_merged_moments_are_those_of_the_pooled_rows(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(summaries, "BLOCK", block)
    merged = merge_numbers(summarize_numbers(VALUES, SITE, SITES))
    known = VALUES[~np.isnan(VALUES)]
    assert merged.counts[0] == len(known)
    assert merged.missing[0] == ROWS - len(known)
    assert merged.mean[0] == pytest.approx(known.mean(), rel=1e-12)
    assert merged.deviation[0] == pytest.approx(known.std(), rel=1e-9)
    assert (merged.low[0], merged.high[0]) == (known.min(), known.max())


def test_a_site_alone_reports_what_it_reports_among_others() -> None:
    together = summarize_numbers(VALUES, SITE, SITES)
    alone = stack_numbers([summarize_numbers(VALUES[site == SITE]) for site in range(SITES)])
    for field, expected in zip(alone, together, strict=True):
        np.testing.assert_array_equal(field, expected)
    categories = [summarize_categories(CODES[site == SITE], TEXT_VALUES) for site in range(SITES)]
    assert merge_categories(categories) == merge_categories([summarize_categories(CODES, TEXT_VALUES, SITE, SITES)])


def test_constant_values_have_deviation_one_in_spite_of_rounding() -> None:
    merged = merge_numbers(summarize_numbers(np.full(30, 0.1), np.arange(30) % 3, 3))
    assert merged.deviation[0] == 1.0


@pytest.mark.parametrize("shape", ["normal", "lognormal", "discrete"])
def test_quantiles_of_merged_sketches_are_within_the_relative_error(shape: str) -> None:
    draw = np.random.default_rng(1)
    values = {
        "normal": draw.normal(size=ROWS),
        "lognormal": np.exp(2 * draw.normal(size=ROWS)),
        "discrete": draw.integers(-3, 4, ROWS).astype(float),
    }[shape]
    shares = np.linspace(0, 1, 33)
    estimated = estimate_quantiles(sketch_numbers(values, 0.0, 1.0, SITE, SITES), shares)
    exact = np.quantile(values, shares, method="lower")
    # Near zero, values below 1e-6 count as zero.
    np.testing.assert_allclose(estimated, exact, rtol=summaries.RELATIVE_ERROR * 1.001, atol=1e-6)


def test_a_column_of_names_is_never_reported() -> None:
    names = [f"person {number}" for number in range(ROWS)]
    summary = summarize_categories(np.arange(ROWS), names, SITE, SITES)
    assert len(summary.counts) == 0
    assert merge_categories([summary]).is_identifier


def test_single_row_sites_can_still_have_categories() -> None:
    """Every site has one value in one row, which says nothing about identifiers."""
    codes = np.arange(200) % 3
    totals = merge_categories([summarize_categories(codes, ["a", "b", "c"], np.arange(200), 200)])
    assert totals.counts == {"a": 67, "b": 67, "c": 66}
    assert not totals.is_identifier


def test_categories_are_frequent_ones_and_others() -> None:
    codes = np.repeat(np.arange(5), [50, 40, 30, 9, 1])
    raw = RawColumn("plan", "category", codes, ["e", "d", "c", "b", "a"])
    (column,) = fit_features([raw], FeatureSettings(max_categories=2)).encoder.columns
    assert column == CategoryColumn("plan", ("d", "e"), has_missing=False, has_other=True)
    (column,) = fit_features([raw], FeatureSettings()).encoder.columns
    assert column == CategoryColumn("plan", ("c", "d", "e"), has_missing=False, has_other=True)


def test_a_million_sites_are_summarised_at_once() -> None:
    sites = 1_000_000
    values = np.arange(sites) % 1000.0
    fitted = fit_features([RawColumn("x", "number", values)], FeatureSettings(), np.arange(sites), sites)
    (column,) = fitted.encoder.columns
    assert isinstance(column, NumberColumn)
    assert column.shift == pytest.approx(values.mean(), rel=1e-12)
    # Six numbers of eight bytes up and two down, for each site.
    assert fitted.traffic.bytes_up == 48 * sites
    assert fitted.traffic.bytes_down == 16 * sites


def test_traffic_counts_numbers_and_texts() -> None:
    summary = summarize_categories(np.array([0, 0, 1, 1]), ["ab", "xyz"], np.array([0, 0, 0, 1]), 2)
    assert isinstance(summary, CategorySummary)
    fitted = fit_features(
        [RawColumn("c", "category", np.array([0, 0, 1, 1]), ["ab", "xyz"])],
        FeatureSettings(min_category_rows=1),
        np.array([0, 0, 0, 1]),
        2,
    )
    # Site 0 reports ab and xyz, site 1 xyz: 3 counts and 8 letters, and 3 numbers of each site.
    assert fitted.traffic.bytes_up == 8 * (3 + 2 * 3) + 8
    # Each site gets the two values with a separator each, and one number.
    assert fitted.traffic.bytes_down == 2 * (8 + 2 + 1 + 3 + 1)
