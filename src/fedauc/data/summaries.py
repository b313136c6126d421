"""What sites report about a column, so that a server can prepare features without seeing a row.

Numbers: how many there are, how many are missing, their mean, their sum of squared deviations, the smallest and the
largest. Summaries merge by the formula of Chan, Golub and LeVeque 1983: with n = sum n_s and m = sum n_s m_s / n, the
squared deviations are sum M_s + sum n_s (m_s - m)^2. Quantiles come from DDSketch (Masson, Rim and Lee 2019): counts of
values between powers of gamma = (1 + a) / (1 - a), which give every quantile with a relative error of at most a, and
merge by addition. Categories: the number of rows of each value; of a column of which nearly every value is different,
such as a name, a site reports no value at all.

Every function takes the rows of all sites at once, with one site number per row, or the rows of one site without
numbers. Summaries of several sites are those of the single sites, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedauc.data.io.memory import row_blocks

BLOCK = 1 << 18
"""How many rows are summarised at once, or as many as there are sites if these are more."""

RELATIVE_ERROR = 0.01
"""The relative error of a quantile from a sketch."""

GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)

SMALLEST = 1e-6
"""A standardised value closer to zero than this counts as zero in a sketch."""

MAX_KEY = 4096
"""Keys of a sketch are between -MAX_KEY and MAX_KEY; GAMMA**2000 is 2e17."""

IDENTIFIER_SHARE = 0.9
"""A text column is taken for an identifier if more than this share of its values occurs once."""

IDENTIFIER_ROWS = 20
"""A site with fewer rows cannot tell."""


class NumberSummary(NamedTuple):
    """What S sites report of a column of numbers: arrays `[S]`."""

    counts: np.ndarray
    missing: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        """The standard deviation, 1 where all values are the same: rounding can make `squares` positive there."""
        return np.where(self.high > self.low, np.sqrt(self.squares / np.maximum(self.counts, 1)), 1.0)


def summarize_numbers(values: np.ndarray, site: np.ndarray | None = None, sites: int = 1) -> NumberSummary:
    """Summaries of a column `[n]` in float64 with NaN where a value is missing."""
    count, missing = np.zeros(sites, dtype=np.int64), np.zeros(sites, dtype=np.int64)
    total, squares = np.zeros(sites), np.zeros(sites)
    low, high = np.full(sites, np.inf), np.full(sites, -np.inf)
    for block, numbers in _iterate_sites(len(values), site, sites):
        part = np.asarray(values[block], dtype=np.float64)
        known = ~np.isnan(part)
        missing += np.bincount(numbers[~known], minlength=sites)
        part, numbers = part[known], numbers[known]
        count += np.bincount(numbers, minlength=sites)
        total += np.bincount(numbers, part, minlength=sites)
        np.minimum.at(low, numbers, part)
        np.maximum.at(high, numbers, part)
    mean = total / np.maximum(count, 1)
    for block, numbers in _iterate_sites(len(values), site, sites):
        part = np.asarray(values[block], dtype=np.float64)
        known = ~np.isnan(part)
        # Infinite values have no distance from their mean; they are refused where columns are encoded.
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.square(part - mean[numbers])
        squares += np.bincount(numbers[known], distance[known], minlength=sites)
    return NumberSummary(count, missing, mean, squares, low, high)


def stack_numbers(summaries: Sequence[NumberSummary]) -> NumberSummary:
    """The summaries of several sites as one."""
    return NumberSummary(*(np.concatenate(fields) for fields in zip(*summaries, strict=True)))


def merge_numbers(summary: NumberSummary) -> NumberSummary:
    """One summary of all rows, from those of the sites."""
    count = summary.counts.sum()
    mean = (summary.counts * summary.mean).sum() / max(count, 1)
    between = summary.counts * np.square(summary.mean - mean)
    squares = summary.squares.sum() + between.sum()
    merged = (count, summary.missing.sum(), mean, squares, summary.low.min(), summary.high.max())
    return NumberSummary(*(np.array([value]) for value in merged))


class Sketch(NamedTuple):
    """Counts of values by the logarithm of their size: `counts[i]` values of site `site[i]` with key `key[i]`."""

    site: np.ndarray
    key: np.ndarray
    counts: np.ndarray


def sketch_numbers(
    values: np.ndarray, shift: float, scale: float, site: np.ndarray | None = None, sites: int = 1
) -> Sketch:
    """The sketches of the known values of (x - shift) / scale."""
    width = 2 * MAX_KEY + 1
    pairs = _PairCounts()
    for block, numbers in _iterate_sites(len(values), site, sites):
        scaled = (np.asarray(values[block], dtype=np.float64) - shift) / scale
        known = ~np.isnan(scaled)
        keys = _find_keys(scaled[known])
        pairs.add(numbers[known] * np.int64(width) + keys + MAX_KEY)
    codes, counts = pairs.result()
    return Sketch(codes // width, codes % width - MAX_KEY, counts)


def estimate_quantiles(sketch: Sketch, shares: np.ndarray) -> np.ndarray:
    """The quantiles of all values at the given shares between 0 and 1, from the sketches of all sites."""
    keys, inverse = np.unique(sketch.key, return_inverse=True)
    cumulated = np.cumsum(np.bincount(inverse, sketch.counts))
    ranks = shares * (cumulated[-1] - 1)
    return _key_values(keys[np.searchsorted(cumulated, ranks, side="right")])


def _find_keys(values: np.ndarray) -> np.ndarray:
    """The key of a value: 0 near zero, k > 0 for SMALLEST * (GAMMA^(k-1), GAMMA^k], and the same below zero."""
    size = np.abs(values)
    with np.errstate(divide="ignore"):
        keys = np.ceil(np.log(size / SMALLEST) / np.log(GAMMA))
    keys = np.clip(keys, 1, MAX_KEY).astype(np.int64)
    return np.asarray(np.where(size <= SMALLEST, 0, np.sign(values).astype(np.int64) * keys))


def _key_values(keys: np.ndarray) -> np.ndarray:
    """The value in the middle of a key's interval, in the sense of the relative error."""
    size = SMALLEST * 2 * GAMMA ** np.abs(keys).astype(np.float64) / (GAMMA + 1)
    return np.asarray(np.where(keys == 0, 0.0, np.sign(keys) * size))


class CategorySummary(NamedTuple):
    """What S sites report of a column of categories.

    Of site `site[i]`, `counts[i]` rows have the value `values[code[i]]`. `rows`, `missing` and `is_identifier` are
    arrays `[S]`; a site that takes the column for an identifier reports no values.
    """

    values: Sequence[str]
    site: np.ndarray
    code: np.ndarray
    counts: np.ndarray
    rows: np.ndarray
    missing: np.ndarray
    is_identifier: np.ndarray


class CategoryTotals(NamedTuple):
    """The rows of each reported value, most frequent first, and of all sites together."""

    counts: dict[str, int]
    rows: int
    missing: int
    identifier_rows: int

    @property
    def is_identifier(self) -> bool:
        """Whether most known rows are in sites that take the column for an identifier, or nearly all values differ."""
        known = self.rows - self.missing
        differ = len(self.counts) > IDENTIFIER_SHARE * known and known >= IDENTIFIER_ROWS
        return differ or 2 * self.identifier_rows > known > 0


def summarize_categories(
    codes: np.ndarray, values: Sequence[str], site: np.ndarray | None = None, sites: int = 1
) -> CategorySummary:
    """Summaries of a column `[n]` of codes into `values`, -1 where a value is missing."""
    width, pairs = np.int64(max(1, len(values))), _PairCounts()
    rows, missing = np.zeros(sites, dtype=np.int64), np.zeros(sites, dtype=np.int64)
    for block, numbers in _iterate_sites(len(codes), site, sites):
        part = np.asarray(codes[block])
        known = part >= 0
        rows += np.bincount(numbers, minlength=sites)
        missing += np.bincount(numbers[~known], minlength=sites)
        pairs.add(numbers[known] * width + part[known])
    pair, count = pairs.result()
    owner, code = pair // width, pair % width
    distinct, known_rows = np.bincount(owner, minlength=sites), rows - missing
    is_identifier = (distinct > IDENTIFIER_SHARE * known_rows) & (known_rows >= IDENTIFIER_ROWS)
    reported = ~is_identifier[owner]
    return CategorySummary(values, owner[reported], code[reported], count[reported], rows, missing, is_identifier)


def merge_categories(summaries: Sequence[CategorySummary]) -> CategoryTotals:
    """The totals over all sites."""
    counts: dict[str, int] = {}
    for summary in summaries:
        by_code = np.bincount(summary.code, summary.counts, minlength=len(summary.values)).astype(np.int64)
        for code in np.flatnonzero(by_code).tolist():
            counts[summary.values[code]] = counts.get(summary.values[code], 0) + int(by_code[code])
    ordered = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    rows, missing = (int(sum(getattr(part, name).sum() for part in summaries)) for name in ("rows", "missing"))
    hidden = sum(int((part.rows - part.missing)[part.is_identifier].sum()) for part in summaries)
    return CategoryTotals(ordered, rows, missing, hidden)


class SummaryTraffic(NamedTuple):
    """What the preparation of features sends: numbers and bytes, to the server and back, over all sites."""

    sites: int = 0
    floats_up: int = 0
    floats_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def scale_to(self, sites: int) -> SummaryTraffic:
        """The same for another number of sites, each with what one of these sends on average."""
        if sites == self.sites or not self.sites:
            return self
        return SummaryTraffic(sites, *(round(total * sites / self.sites) for total in self[1:]))

    def add(self, floats_up: int, floats_down: int, text_up: int = 0, text_down: int = 0) -> SummaryTraffic:
        """With so many more numbers of eight bytes, and bytes of text; what goes down is counted for one site."""
        return SummaryTraffic(
            self.sites,
            self.floats_up + floats_up,
            self.floats_down + self.sites * floats_down,
            self.bytes_up + 8 * floats_up + text_up,
            self.bytes_down + self.sites * (8 * floats_down + text_down),
        )


def count_text_bytes(summary: CategorySummary) -> int:
    """The bytes of the values that the sites report, as UTF-8."""
    lengths = np.array([len(value.encode()) for value in summary.values] or [0])
    return int(lengths[summary.code].sum())


def _iterate_sites(rows: int, site: np.ndarray | None, sites: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks of rows, with the site of each row in int64."""
    for block in row_blocks((rows,), max(BLOCK, sites)):
        length = block.stop - block.start
        yield block, np.zeros(length, dtype=np.int64) if site is None else site[block].astype(np.int64)


class _PairCounts:
    """Counts of integers that come in blocks."""

    def __init__(self) -> None:
        self._values = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count the values of a block."""
        distinct, counts = np.unique(values, return_counts=True)
        joined, inverse = np.unique(np.concatenate([self._values, distinct]), return_inverse=True)
        weights = np.concatenate([self._counts, counts])
        self._counts = np.bincount(inverse, weights, minlength=len(joined)).astype(np.int64)
        self._values = joined

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct values in ascending order, and how often each came."""
        return self._values, self._counts
