"""Which method is above which, as the records have it: the paper's own methods against each baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fedauc.reports.tables import format_share
from paper.filling import SIGNIFICANT, Filled, Key
from paper.table_specs import ALL_METHODS, OURS, PUBLISHED, Column, TableSpec

Verdict = Literal["above", "no difference found", "below", "not tested"]

VERDICTS: tuple[Verdict, ...] = ("above", "no difference found", "below", "not tested")


class Ordering(NamedTuple):
    """One of the paper's methods against a baseline: difference of mean AUC, its p-value, the paper's difference."""

    column: Column
    method: str
    baseline: str
    difference: float
    p_value: float | None
    paper: float | None

    @property
    def published(self) -> bool:
        """Whether it is on the paper's data."""
        return self.column.dataset in PUBLISHED

    @property
    def verdict(self) -> Verdict:
        """What the test says."""
        if self.p_value is None:
            return "not tested"
        if self.p_value >= SIGNIFICANT:
            return "no difference found"
        return "above" if self.difference > 0 else "below"


class Shown(NamedTuple):
    """A sheet and what fills it."""

    sheet: TableSpec
    filled: Mapping[Key, Filled]


def orderings(shown: Shown, own: bool = False) -> Iterator[Ordering]:
    """Every pair of a column whose runs are all done; on demand the paper's second method against its first too."""
    rows = [entry.name for entry in shown.sheet.rows]
    for column in shown.sheet.columns:
        for method in [row for row in OURS if row in rows]:
            others = [row for row in rows if row in ALL_METHODS and row not in OURS]
            for baseline in [*others, *([OURS[0]] if own and method != OURS[0] and OURS[0] in rows else [])]:
                mine, other = (shown.filled[row, column.name] for row in (method, baseline))
                if mine.whole and other.whole and mine.auc and other.auc:
                    paper = mine.paper.mean - other.paper.mean if mine.paper and other.paper else None
                    gap = mine.auc.mean - other.auc.mean
                    yield Ordering(column, method, baseline, gap, other.versus[method], paper)


def overview(sheets: Sequence[Shown]) -> Iterator[list[str]]:
    """How many comparisons came out which way: a line per table and method, other data than the paper's apart."""
    yield ["table", "method", *VERDICTS]
    for shown in sheets:
        counted: dict[tuple[str, str], Counter[Verdict]] = {}
        for each in orderings(shown):
            apart = not each.published and each.column.name != shown.sheet.name
            where = shown.sheet.name + (f", {each.column.name}" if apart else "")
            counted.setdefault((where, each.method), Counter())[each.verdict] += 1
        for (where, method), found in counted.items():
            yield [where, method, *(str(found[verdict]) for verdict in VERDICTS)]


def compared(sheets: Sequence[Shown]) -> Iterator[str]:
    """How the comparisons came out that the paper prints too, by which way it has them; those told apart are named."""
    found = [(shown.sheet.name, each) for shown in sheets for each in orderings(shown)]
    for head, higher in (("higher", True), ("not higher", False)):
        mine = [(name, each) for name, each in found if each.paper is not None and (each.paper > 0) == higher]
        if mine:
            counted = Counter(each.verdict for _, each in mine)
            told = ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS if counted[verdict])
            named = [
                f"{name} {each.column.name}: {each.method} {each.verdict} {each.baseline}"
                for name, each in mine
                if each.verdict in ("above", "below")
            ]
            told += f" ({'; '.join(named)})" if named else ""
            yield f"Where the paper has the CyCp method {head}, {len(mine)} tests at p < .05, uncorrected: {told}."


class Gain(NamedTuple):
    """A row of a table less the paper's number for it."""

    sheet: str
    row: str
    column: str
    gap: float


def gains(sheets: Sequence[Shown]) -> list[Gain]:
    """Of every row whose runs are all done: baselines may be stronger than they are in the paper."""
    return [
        Gain(shown.sheet.name, row, column, cell.auc.mean - cell.paper.mean)
        for shown in sheets
        for (row, column), cell in shown.filled.items()
        if cell.whole and cell.auc and cell.paper
    ]


def gained(found: Sequence[Gain]) -> list[list[str]]:
    """As a table, a line per row."""
    known = {(each.row, f"{each.sheet} {each.column}"): signed(each.gap) for each in found}
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*known, strict=True))
    lines = [[row, *(known.get((row, column), "-") for column in columns)] for row in rows]
    return [["AUC less the paper's", *columns], *lines]


def matrix(found: Sequence[Ordering]) -> list[list[str]]:
    """Differences with their verdicts: columns and methods one way, baselines the other, the longer one down."""
    baselines = list(dict.fromkeys(each.baseline for each in found))
    known = {(each.column.name, each.method, each.baseline): _cell(each) for each in found}
    lines = [["against", *baselines]]
    for column, method in dict.fromkeys((each.column.name, each.method) for each in found):
        lines.append([f"{column}: {method}", *(known.get((column, method, other), "-") for other in baselines)])
    return lines if len(lines) >= len(lines[0]) else [list(line) for line in zip(*lines, strict=True)]


def _cell(found: Ordering) -> str:
    paper = "" if found.paper is None else f" [{signed(found.paper)}]"
    p_value = "" if found.p_value is None else f", p {p_text(found.p_value)}"
    return f"{signed(found.difference)} {found.verdict}{p_value}{paper}"


def signed(value: float) -> str:
    """A difference of AUCs.

    >>> signed(0.01234), signed(-0.2), signed(-0.00001)
    ('+.0123', '-.2000', '+.0000')
    """
    rounded = round(value, 4)
    return ("-" if rounded < 0 else "+") + format_share(abs(rounded), 4)


def p_text(value: float) -> str:
    """A p-value to three digits.

    >>> p_text(0.0004), p_text(0.0312)
    ('<.001', '.031')
    """
    return "<.001" if value < 0.001 else format_share(value, 3)
