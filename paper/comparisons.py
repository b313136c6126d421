"""The paper's methods against each baseline, and every row against the number that the paper prints for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from paper.builder import Table
from paper.formatting import format_difference, format_p_value
from paper.significance import SIGNIFICANCE_LEVEL, Difference
from paper.table_specs import ALL_METHODS, OURS, PUBLISHED, Column

Outcome = Literal["significantly higher", "not significantly different", "significantly lower", "not tested"]

OUTCOMES: tuple[Outcome, ...] = (
    "significantly higher",
    "not significantly different",
    "significantly lower",
    "not tested",
)


class Comparison(NamedTuple):
    """One of the paper's methods against a baseline: difference of mean AUC, its test, and the paper's difference."""

    table: str
    column: Column
    method: str
    baseline: str
    value: float
    test: Difference | None
    published: float | None

    @property
    def outcome(self) -> Outcome:
        """What the test says."""
        if self.test is None:
            return "not tested"
        if self.test.p_value >= SIGNIFICANCE_LEVEL:
            return "not significantly different"
        return "significantly higher" if self.value > 0 else "significantly lower"

    def __str__(self) -> str:
        """Such as `**+.0107 ± .0085, p = .020** [+.0487]`, in bold where it is significant."""
        text = format_difference(self.value)
        if self.test is None:
            text += ", not tested"
        else:
            interval = format_difference(self.test.half_width).removeprefix("+")
            text += f" ± {interval}, {format_p_value(self.test.p_value)}"
            text = f"**{text}**" if self.test.p_value < SIGNIFICANCE_LEVEL else text
        return text if self.published is None else f"{text} [{format_difference(self.published)}]"


def list_comparisons(table: Table, between_own: bool = False) -> Iterator[Comparison]:
    """Every pair whose runs have all finished; on request the paper's second method against its first as well."""
    rows = [row.name for row in table.spec.rows]
    baselines = [row for row in rows if row in ALL_METHODS and row not in OURS]
    for column in table.spec.columns:
        for method in [row for row in OURS if row in rows]:
            first_method = [OURS[0]] if between_own and method != OURS[0] and OURS[0] in rows else []
            for baseline in [*baselines, *first_method]:
                first, second = (table.cells[row, column.name] for row in (method, baseline))
                if first.complete and second.complete and first.auc and second.auc:
                    difference = first.auc.mean - second.auc.mean
                    test = table.differences.get((column.name, method, baseline))
                    published = None
                    if first.published and second.published:
                        published = first.published.mean - second.published.mean
                    yield Comparison(table.name, column, method, baseline, difference, test, published)


def comparison_frame(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A cell for each comparison: columns and methods in one direction, baselines in the other, the longer one down."""
    texts = {
        (f"{comparison.column.name}: {comparison.method}", comparison.baseline): str(comparison)
        for comparison in comparisons
    }
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*texts, strict=True))
    frame = pd.Series(texts).unstack().reindex(index=rows, columns=columns).fillna("-")
    return frame if len(rows) >= len(columns) else frame.T


def count_outcomes(comparisons: Sequence[Comparison]) -> Counter[Outcome]:
    """How many comparisons had each outcome."""
    return Counter(comparison.outcome for comparison in comparisons)


def outcome_frame(tables: Sequence[Table]) -> pd.DataFrame:
    """How many comparisons had which outcome, by table and method; data that the paper does not have is separate."""
    counts: dict[tuple[str, str], Counter[Outcome]] = {}
    for table in tables:
        for comparison in list_comparisons(table):
            separate = comparison.column.dataset not in PUBLISHED and comparison.column.name != table.name
            label = table.name + (f", {comparison.column.name}" if separate else "")
            counts.setdefault((label, comparison.method), Counter())[comparison.outcome] += 1
    rows = [[method, *(str(count[outcome]) for outcome in OUTCOMES)] for (_, method), count in counts.items()]
    return pd.DataFrame(rows, index=[label for label, _ in counts], columns=["method", *OUTCOMES])


class PublishedGap(NamedTuple):
    """How much higher a row's mean AUC is than the paper's number for it."""

    table: str
    row: str
    column: str
    value: float


def list_published_gaps(tables: Sequence[Table]) -> list[PublishedGap]:
    """The gap of every row whose runs have all finished: baselines may be stronger here than in the paper."""
    return [
        PublishedGap(table.name, row, column, cell.auc.mean - cell.published.mean)
        for table in tables
        for (row, column), cell in table.cells.items()
        if cell.complete and cell.auc and cell.published
    ]


def gap_frame(gaps: Sequence[PublishedGap]) -> pd.DataFrame:
    """A line for each row."""
    texts = {(gap.row, f"{gap.table} {gap.column}"): format_difference(gap.value) for gap in gaps}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*texts, strict=True))
    return pd.Series(texts).unstack().reindex(index=rows, columns=columns).fillna("-")
