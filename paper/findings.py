"""What the records say: the paper's methods against each baseline and against the paper's numbers, and the effects of
the communication interval I, the cohort size M and the number of groups K in the figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from fedauc.reports.tables import format_share
from paper.significance import SIGNIFICANCE_LEVEL, Difference, correct_p_values
from paper.table_specs import ALL_METHODS, OURS, PUBLISHED, TEXTS, Column
from paper.tables import NEARLY, Cell, Table

OUTCOMES = ("significantly higher", "not significantly different", "significantly lower", "not tested")


class Comparison(NamedTuple):
    """One of the paper's methods against a baseline: difference of mean AUC, its test, and the paper's difference.

    `corrected` is the p-value after Holm's correction for so many `tests` of one table. Two rows may have chosen the
    same settings, and then have the same runs: there is nothing to test.
    """

    table: str
    column: Column
    method: str
    baseline: str
    value: float
    test: Difference | None
    published: float | None
    corrected: float | None = None
    tests: int = 0
    same_runs: bool = False

    @property
    def outcome(self) -> str:
        """What the test says: one of OUTCOMES."""
        if self.test is None:
            return "not tested"
        if self.test.p_value >= SIGNIFICANCE_LEVEL:
            return "not significantly different"
        return "significantly higher" if self.value > 0 else "significantly lower"

    @property
    def corrected_outcome(self) -> str:
        """What the corrected test says: one of OUTCOMES."""
        is_lost = self.corrected is not None and self.corrected >= SIGNIFICANCE_LEVEL
        return "not significantly different" if is_lost else self.outcome

    @property
    def excludes_published(self) -> bool:
        """Whether the confidence interval leaves the paper's difference out."""
        if self.test is None or self.published is None:
            return False
        return abs(self.value - self.published) > self.test.half_width

    def __str__(self) -> str:
        """Such as `**+.0107 ± .0087** [+.0487], p = .020, corrected .378`, in bold where p < .05 before correction."""
        if self.same_runs:
            return "same runs"
        text = format_difference(self.value)
        published = "" if self.published is None else f" [{format_difference(self.published)}]"
        if self.test is None:
            return f"{text}{published}, not tested"
        text += f" ± {format_share(self.test.half_width, 4)}"
        text = f"**{text}**" if self.test.p_value < SIGNIFICANCE_LEVEL else text
        corrected = "" if self.corrected is None else f", corrected {format_p_value(self.corrected).removeprefix('= ')}"
        return f"{text}{published}, p {format_p_value(self.test.p_value)}{corrected}"


def format_p_value(p_value: float) -> str:
    """A p-value after its sign.

    >>> format_p_value(0.0204), format_p_value(0.0002)
    ('= .020', '< .001')
    """
    return "< .001" if p_value < 0.001 else f"= {format_share(p_value, 3)}"


def correct_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with p-values that are corrected for all of them together."""
    tested = [position for position, pair in enumerate(comparisons) if pair.test is not None]
    p_values = [pair.test.p_value for pair in comparisons if pair.test is not None]
    corrected = dict(zip(tested, correct_p_values(p_values), strict=True))
    return [
        pair._replace(corrected=corrected.get(position), tests=len(tested)) for position, pair in enumerate(comparisons)
    ]


def describe_correction(comparisons: Sequence[Comparison]) -> str:
    """How many comparisons stay significant, and the tests that their p-values are corrected for; nothing if none is.

    A comparison is corrected for all tests of its table, so that it has one corrected p-value wherever it is counted.
    """
    tests = {pair.table: pair.tests for pair in comparisons if pair.corrected is not None}
    if not tests:
        return ""
    named = [f"{count} tests of {_name_table(table)}" for table, count in tests.items()]
    family = f"all {named[0]}" if len(named) == 1 else f"all tests of the same table ({', '.join(named)})"
    counts = Counter(pair.corrected_outcome for pair in comparisons)
    return (
        f"With Holm's correction for {family}, it is significantly better in {counts['significantly higher']} and "
        f"significantly worse in {counts['significantly lower']}."
    )


def _name_table(name: str) -> str:
    """A table in words: those of the paper by their number."""
    number = name.removeprefix("table")
    return f"Table {number}" if number.isdecimal() else f"the table `{name}`"


def format_difference(value: float) -> str:
    """A difference of AUCs with its sign.

    >>> format_difference(0.01234), format_difference(-0.2), format_difference(-0.00001)
    ('+.0123', '-.2000', '+.0000')
    """
    rounded = round(value, 4)
    return ("-" if rounded < 0 else "+") + format_share(abs(rounded), 4)


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


def list_contrasts(table: Table) -> Iterator[Comparison]:
    """The pairs of rows that a table tests against each other, where all runs of both have finished."""
    for column in table.spec.columns:
        for row, other in table.spec.contrasts:
            first, second = (table.cells.get((name, column.name)) for name in (row, other))
            if first and second and first.complete and second.complete and first.auc and second.auc:
                same_runs = first.runs.keys() == second.runs.keys()
                test = None if same_runs else table.differences.get((column.name, row, other))
                difference = first.auc.mean - second.auc.mean
                yield Comparison(table.name, column, row, other, difference, test, None, same_runs=same_runs)


def make_contrast_frame(contrasts: Sequence[Comparison]) -> pd.DataFrame:
    """A line for each contrast."""
    texts = {
        f"{pair.column.name}: {pair.method} minus {pair.baseline}": str(pair) for pair in correct_comparisons(contrasts)
    }
    return pd.DataFrame({"difference": texts})


def make_class_frame(table: Table) -> pd.DataFrame:
    """A line for each contrast: the mean difference over the classes of `classes`, over the later ones, and over all.

    The intervals and p-values are those of a t-test over classes alone, without the uncertainty of a class's test part.
    """
    known = TEXTS["classes"]["classes"]
    rows = {}
    for pair in list_contrasts(table):
        first, second = (table.cells[row, pair.column.name].case_aucs for row in (pair.method, pair.baseline))
        gains = [one.mean - other.mean for one, other in zip(first, second, strict=True) if one and other]
        parts = {f"classes 0-{known - 1}": gains[:known], f"classes {known}-{len(gains) - 1}": gains[known:]}
        parts |= {f"all {len(gains)}": gains}
        rows[f"{pair.column.name}: {pair.method} minus {pair.baseline}"] = {
            name: _test_over_classes(values) for name, values in parts.items()
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _test_over_classes(gains: Sequence[float]) -> str:
    """The mean, its 95 % interval and p-value over at least two classes."""
    test = stats.ttest_1samp(gains, 0)
    interval = test.confidence_interval(0.95)
    half = format_share(float(interval.high - interval.low) / 2, 4)
    return f"{format_difference(float(np.mean(gains)))} ± {half}, p {format_p_value(float(test.pvalue))}"


def make_comparison_frame(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """A cell for each comparison: columns and methods in one direction, baselines in the other, the longer one down."""
    corrected = correct_comparisons(comparisons)
    frame = _spread_texts({(f"{pair.column.name}: {pair.method}", pair.baseline): str(pair) for pair in corrected})
    return frame if frame.shape[0] >= frame.shape[1] else frame.T


def _spread_texts(texts: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """Texts by row and column, in the order of their first occurrence."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*texts, strict=True))
    return pd.Series(texts).unstack().reindex(index=rows, columns=columns).fillna("-")


def make_outcome_frame(tables: Sequence[Table]) -> pd.DataFrame:
    """How many comparisons had which outcome, by table and method; data that the paper does not have is separate."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for pair in [pair for table in tables for pair in list_comparisons(table)]:
        separate = pair.column.dataset not in PUBLISHED and pair.column.name != pair.table
        label = f"{pair.table}, {pair.column.name}" if separate else pair.table
        counts.setdefault((label, pair.method), Counter())[pair.outcome] += 1
    rows = [[method, *(str(count[outcome]) for outcome in OUTCOMES)] for (_, method), count in counts.items()]
    return pd.DataFrame(rows, index=[label for label, _ in counts], columns=["method", *OUTCOMES])


def list_published_gaps(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """How much higher the mean AUC is than the paper's: the `value` of every row whose runs have all finished."""
    return [
        {"table": table.name, "row": row, "column": column, "value": cell.auc.mean - cell.published.mean}
        for table in tables
        for (row, column), cell in table.cells.items()
        if cell.complete and cell.auc and cell.published
    ]


def make_gap_frame(gaps: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A line for each row."""
    return _spread_texts(
        {(gap["row"], f"{gap['table']} {gap['column']}"): format_difference(gap["value"]) for gap in gaps}
    )


# ------------------------------------------------------------------------------------------------------- rounds saved

BALANCED = "cycp-fedavg-balanced"
"""FedAvg on batches with as many positives as negatives."""

RANDOM_CLIENTS = ("rs-minimax", "rs-pairwise")
"""AUC training with other participation."""


def make_saving_frame(table: Table, learning_rates: Mapping[str, str]) -> pd.DataFrame:
    """How many of the rounds that AUC training saves balanced batches save alone, by dataset and target AUC.

    `all` means that FedAvg on balanced batches is no later than the faster CyCp method. Other baselines that are as
    fast tell whether it takes balanced batches. `learning_rates` are those of FedAvg on balanced batches by column.
    """
    first, lines = table.spec.rows[0].name, dict[str, dict[str, str]]()
    balanced, ours = table.find_row(BALANCED), [table.find_row(method) for method in OURS]
    for column in [column.name for column in table.spec.columns]:
        cells, target = table.column_cells(column), table.find_target(column)
        if target is None or balanced not in cells or not cells[balanced].complete:
            continue
        for goal in (target - NEARLY, target):
            reaches = {row: reach for row, cell in cells.items() if (reach := cell.find_reach(goal))}
            rounds = {row: reach.rounds for row, reach in reaches.items()}
            texts = {row: f"{'≤ ' * (reaches[row] is cells[row].curve[0])}{count}" for row, count in rounds.items()}
            fastest, own = min(rounds[row] for row in ours), rounds.get(balanced, math.inf)
            saved = "all" if own <= fastest else "part" if own < rounds[first] else "none"
            others = [row for row in rounds if row not in (first, balanced, *ours, *RANDOM_CLIENTS)]
            lines[f"{column}, {format_share(goal, 4)}"] = {
                **{row: texts.get(row, "not reached") for row in (first, *ours, balanced)},
                "its learning rate": learning_rates.get(column, "-"),
                "it saves": saved if fastest < rounds[first] else "there is nothing to save",
                "other baselines as fast as the faster CyCp method": ", ".join(
                    row for row in others if rounds[row] <= fastest
                )
                or "-",
            }
    return pd.DataFrame.from_dict(lines, orient="index")


# ---------------------------------------------------------------------------------------------------------- I, M and K

ALLOWED_LOSS = 0.01
"""What a longer interval may cost in AUC."""

STANDARD_ERRORS = 2
"""How many standard errors over runs a loss must be away from the allowed one to be called larger or smaller."""

UNSTABLE_DEVIATION = 0.05
"""A point whose AUC has a larger standard deviation over runs did not train, and its rounds say nothing."""

Series = Mapping[int, Cell]
"""A row's cells on one dataset by the value that is varied, smallest first."""

Verdict = tuple[list[dict[str, str]], bool | None]
"""The lines and the answer of a finding."""


class Finding(NamedTuple):
    """What one dataset and method say, in lines of a table, and whether it agrees with the paper; None if undecided."""

    label: str
    lines: Sequence[Mapping[str, str]]
    holds: bool | None


def list_findings(table: Table) -> list[Finding]:
    """By dataset and row, where at least two values have all of their runs, with settings of their own."""
    findings = []
    for dataset in dict.fromkeys(column.dataset for column in table.spec.columns):
        for row in table.spec.rows:
            series = {}
            for column in table.spec.columns:
                cell = table.cells[row.name, column.name]
                if column.dataset == dataset and cell.complete and cell.curve and not cell.borrowed_settings:
                    series[int(column.name.removeprefix(f"{dataset}-")[1:])] = cell
            if len(series) > 1:
                findings.append(Finding(f"{dataset}, {row.name}", *JUDGES[table.name](dict(sorted(series.items())))))
    return findings


def make_finding_frame(findings: Sequence[Finding]) -> pd.DataFrame:
    """The lines of all findings, with a column for each value; what a line does not have is a dash."""
    lines = [line for finding in findings for line in finding.lines]
    labels = [finding.label for finding in findings for _ in finding.lines]
    names = dict.fromkeys(name for line in lines for name in line)
    # Values of M and K in their order, between the target and the verdict.
    places = {name: int(name.split(" = ")[1]) for name in names if " = " in name} | {"rounds": math.inf}
    columns = sorted(names, key=lambda name: places.get(name, -1))
    return pd.DataFrame(lines, index=labels, columns=columns).fillna("-")


def judge_interval(series: Series) -> Verdict:
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
    bounds = {None: f"within {STANDARD_ERRORS} standard errors of", True: "at most", False: "more than"}
    line = {"largest loss": format_share(loss, 4), "standard error": format_share(error, 4)}
    line["from"] = f"{format_share(higher.mean, 4)} (I = {short})"
    line["to"] = f"{format_share(lower.mean, 4)} (I = {long})"
    return [line | {"verdict": f"{bounds[holds]} {format_share(ALLOWED_LOSS, 2)}"}], holds


def judge_rounds(series: Series, symbol: str) -> Verdict:
    """Whether the rounds to a common AUC fall with the value, as the paper says of M and of K with random groups.

    The target is the lowest of the final AUCs, which every value's mean curve reaches; a second one is a little lower.
    The final model may be a mean over rounds, whose AUC lies above all earlier ones. The second target says nothing
    where every curve starts above it, and is left out there. A value that did not train sets a target that says
    nothing, so that the answer is withdrawn.
    """
    target = min(cell.curve[-1].auc for cell in series.values())
    is_early = all(cell.curve[0].auc >= target - NEARLY for cell in series.values())
    # Curves are known only where they were evaluated: a smaller difference in rounds cannot be seen.
    gaps = [later.rounds - earlier.rounds for cell in series.values() for earlier, later in pairwise(cell.curve)]
    lines, holds = [], True
    for goal in [target] if is_early else [target, target - NEARLY]:
        rounds = {value: reach.rounds for value, cell in series.items() if (reach := cell.find_reach(goal))}
        counts = list(rounds.values())
        falls = counts[0] - counts[-1] >= max(gaps, default=1)
        at_every_step = all(later < earlier for earlier, later in pairwise(counts))
        falling = "fall at every step" if at_every_step else "fall, but not at every step"
        texts = {f"{symbol} = {value}": str(count) for value, count in rounds.items()}
        lines.append({"AUC to reach": format_share(goal, 4), **texts, "rounds": falling if falls else "do not fall"})
        holds = holds and falls
    if unstable := [value for value, cell in series.items() if is_unstable(cell)]:
        names = " and ".join(f"{symbol} = {value}" for value in unstable)
        return [line | {"rounds": f"withdrawn: {names} did not train"} for line in lines], None
    return lines, holds


def is_unstable(cell: Cell) -> bool:
    """Whether the runs of a cell differ so much that their mean says nothing."""
    return cell.auc is not None and cell.auc.deviation > UNSTABLE_DEVIATION


JUDGES: Mapping[str, Callable[[Series], Verdict]] = {
    "figure1": judge_interval,
    "intervals": judge_interval,
    "figure2": partial(judge_rounds, symbol="M"),
    "figure3": partial(judge_rounds, symbol="K"),
}
"""What each figure is asked."""
