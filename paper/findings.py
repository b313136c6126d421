"""What the records say: the paper's methods against each baseline and against the paper's numbers, and the effects of
the communication interval I, the cohort size M and the number of groups K in the figures.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Literal, NamedTuple, get_args

import pandas as pd

from fedauc.reports.tables import format_share
from paper.builder import NEARLY, Cell, Table, find_reach
from paper.formatting import format_difference, format_p_value
from paper.significance import SIGNIFICANCE_LEVEL, Difference
from paper.table_specs import ALL_METHODS, OURS, PUBLISHED, Column

Outcome = Literal["significantly higher", "not significantly different", "significantly lower", "not tested"]


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
    frame = _spread_texts(texts)
    return frame if frame.shape[0] >= frame.shape[1] else frame.T


def _spread_texts(texts: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """Texts by row and column, in the order of their first occurrence."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*texts, strict=True))
    return pd.Series(texts).unstack().reindex(index=rows, columns=columns).fillna("-")


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
    outcomes = get_args(Outcome)
    rows = [[method, *(str(count[outcome]) for outcome in outcomes)] for (_, method), count in counts.items()]
    return pd.DataFrame(rows, index=[label for label, _ in counts], columns=["method", *outcomes])


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
    return _spread_texts({(gap.row, f"{gap.table} {gap.column}"): format_difference(gap.value) for gap in gaps})


# ---------------------------------------------------------------------------------------------------------- I, M and K

ALLOWED_LOSS = 0.01
"""What a longer interval may cost in AUC."""

STANDARD_ERRORS = 2
"""How many standard errors over runs a loss must be away from the allowed one to be called larger or smaller."""

Series = Mapping[int, Cell]
"""A row's cells on one dataset by the value that is varied, smallest first."""


class Finding(NamedTuple):
    """What one dataset and method say, in lines of a table, and whether the paper says so; None if undecided."""

    dataset: str
    method: str
    lines: Sequence[Mapping[str, str]]
    holds: bool | None

    @property
    def label(self) -> str:
        """Its dataset and method."""
        return f"{self.dataset}, {self.method}"


def list_findings(table: Table) -> list[Finding]:
    """By dataset and row, where at least two values have all of their runs, with settings of their own."""
    judge, findings = JUDGES[table.name], list[Finding]()
    for dataset in dict.fromkeys(column.dataset for column in table.spec.columns):
        for row in table.spec.rows:
            series = {}
            for column in table.spec.columns:
                cell = table.cells[row.name, column.name]
                if column.dataset == dataset and cell.complete and cell.curve and not cell.borrowed_settings:
                    series[int(column.name.removeprefix(f"{dataset}-")[1:])] = cell
            if len(series) > 1:
                lines, holds = judge(dict(sorted(series.items())))
                findings.append(Finding(dataset, row.name, lines, holds))
    return findings


def finding_frame(findings: Sequence[Finding]) -> pd.DataFrame:
    """The lines of all findings, with a column for each value; what a line does not have is a dash."""
    lines = [line for finding in findings for line in finding.lines]
    labels = [finding.label for finding in findings for _ in finding.lines]
    names = dict.fromkeys(name for line in lines for name in line)
    # Values of M and K in their order, between the target and the verdict.
    ordered = sorted(names, key=lambda name: int(name.split(" = ")[1]) if " = " in name else -1)
    columns = [*(name for name in ordered if name != "rounds"), *(["rounds"] if "rounds" in names else [])]
    return pd.DataFrame(lines, index=labels, columns=columns).fillna("-")


def judge_interval(series: Series) -> tuple[list[dict[str, str]], bool | None]:
    """Whether a longer interval loses more than it may against any shorter one."""
    aucs = {steps: cell.auc for steps, cell in series.items() if cell.auc}
    short, long = max(combinations(aucs, 2), key=lambda pair: aucs[pair[0]].mean - aucs[pair[1]].mean)
    higher, lower = aucs[short], aucs[long]
    # Rounded as it is printed, so that a loss printed as .0100 is within .01.
    loss = round(higher.mean - lower.mean, 4)
    if loss <= 0:
        return [{"largest loss": f"none up to I = {max(series)}", "verdict": "no loss"}], True
    error = math.sqrt(higher.deviation**2 / higher.values + lower.deviation**2 / lower.values)
    holds = None if abs(loss - ALLOWED_LOSS) < STANDARD_ERRORS * error else loss <= ALLOWED_LOSS
    allowed = format_share(ALLOWED_LOSS, 2)
    undecided = f"within {STANDARD_ERRORS} standard errors of {allowed}"
    verdict = undecided if holds is None else f"at most {allowed}" if holds else f"more than {allowed}"
    line = {"largest loss": format_share(loss, 4), "standard error": format_share(error, 4)}
    line |= {
        "from": f"{format_share(higher.mean, 4)} (I = {short})",
        "to": f"{format_share(lower.mean, 4)} (I = {long})",
    }
    return [line | {"verdict": verdict}], holds


def judge_rounds(series: Series, symbol: str) -> tuple[list[dict[str, str]], bool | None]:
    """Whether the rounds to a common AUC fall with the value, as the paper says of M and of K with random groups.

    The target is the lowest of the final AUCs, which every value's mean curve reaches; a second one is a little lower.
    The final model may be a mean over rounds, whose AUC lies above all earlier ones. The second target says nothing
    where every curve starts above it, and is left out there.
    """
    target = min(cell.curve[-1].auc for cell in series.values())
    lines = [_count_rounds(series, symbol, target)]
    if any(cell.curve[0].auc < target - NEARLY for cell in series.values()):
        lines.append(_count_rounds(series, symbol, target - NEARLY))
    return [line for line, _ in lines], all(falls for _, falls in lines)


def _count_rounds(series: Series, symbol: str, target: float) -> tuple[dict[str, str], bool]:
    reaches = [find_reach(cell.curve, target) for cell in series.values()]
    rounds = [reach.rounds for reach in reaches if reach]
    # Curves are known only where they were evaluated: a smaller difference in rounds cannot be seen.
    gaps = [later.rounds - earlier.rounds for cell in series.values() for earlier, later in pairwise(cell.curve)]
    at_every_step = all(later < earlier for earlier, later in pairwise(rounds))
    falls = rounds[0] - rounds[-1] >= max(gaps, default=1)
    verdict = ("fall at every step" if at_every_step else "fall, but not at every step") if falls else "do not fall"
    counts = {f"{symbol} = {value}": f"{count:.0f}" for value, count in zip(series, rounds, strict=True)}
    return {"AUC to reach": format_share(target, 4), **counts, "rounds": verdict}, falls


JUDGES: Mapping[str, Callable[[Series], tuple[list[dict[str, str]], bool | None]]] = {
    "figure1": judge_interval,
    "intervals": judge_interval,
    "figure2": functools.partial(judge_rounds, symbol="M"),
    "figure3": functools.partial(judge_rounds, symbol="K"),
}
"""What each figure is asked."""
