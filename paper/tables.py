"""Filled sheets as text: for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.table import Table

from fedauc.data import find_datasets
from fedauc.data.io.stored import MissingFiles
from fedauc.data.statistics import PAPER_COUNTS, count_classes
from fedauc.reports.summary import Spread
from fedauc.reports.tables import format_bytes, format_share
from paper.filling import EARLY, Filled, Key, Reach, marks
from paper.records import MOST_ROWS
from paper.scales import Scale
from paper.table_specs import TableSpec

TESTED = (
    "* is a column's highest mean, of rows whose runs are all done; ~ marks means that the test does not tell from it "
    "(p ≥ .05), ? those that were not tested, and where nothing was there are no marks: single runs and the points of "
    "figures are not. The test is DeLong's, paired, with the variance of training over seeds added; over several "
    "splits or classes a t-test over them must agree. Of test parts with more than "
    f"{MOST_ROWS:,} rows it sees every positive and a draw of the negatives. Runs that diverged or died are told as "
    "stopped."
)
DRAWN = (
    "Where nothing else is said, a row's runs are three training seeds on one draw of the data (which rows are kept, "
    "flipped and dealt to whom): ± and the test know nothing of other draws, which `table9` has. `dir` is the "
    "concentration of the Dirichlet draws by which each class is dealt to clients; a cycle visits every group of "
    "clients once, in rounds."
)
CURVES = (
    "Curves are means over runs; first rounds and single collapses may lie below the picture. Image models are "
    "evaluated as they are between rounds, and only at the end as the mean over the last stage's rounds."
)
REACHED = (
    "Rounds, in brackets their ratio to the first row's, and bytes both ways, until the mean test AUC over runs "
    "first is the lowest of what the first row and the CyCp rows end with; below, until it is .02 less. Scoring "
    "rounds of the pairwise methods count; ≤ is a first evaluation. Image models are evaluated as they are between "
    "rounds; only what their last stage ends with is a mean over rounds, which is often higher: a target may then be "
    "met in the last round."
)
SMOKE = "Smoke scale: drawn rows and a linear scorer. These numbers say nothing about the paper's."


def legend(published: bool = True, marked: bool = True) -> str:
    """What a table of AUCs shows: the paper's numbers only at its scale, marks only where something is tested."""
    brackets = "; in brackets what the paper prints" if published else ""
    what = f"Test AUC after the last cycle, mean ± standard deviation over runs{brackets}."
    return f"{what} {TESTED}" if marked else what


Text = Callable[[Mapping[Key, Filled], Key], str]
"""How a cell is shown."""


def rows(sheet: TableSpec, filled: Mapping[Key, Filled], show: Text | None = None) -> list[list[str]]:
    """A header, then a line per row; a figure's columns, which are many, go down."""
    lines = list(_rows(sheet, filled, show or (auc_text if sheet.view == "auc" else traffic_text)))
    return [list(line) for line in zip(*lines, strict=True)] if sheet.is_figure else lines


def _rows(sheet: TableSpec, filled: Mapping[Key, Filled], show: Text) -> Iterator[list[str]]:
    yield ["", *(column.name for column in sheet.columns)]
    if show in BELOW:
        targets = [filled[sheet.rows[0].name, column.name].target for column in sheet.columns]
        yield [
            "AUC to reach",
            *("-" if target is None else format_share(target - BELOW[show], 4) for target in targets),
        ]
    for entry in sheet.rows:
        keys = [(entry.name, column.name) for column in sheet.columns]
        yield [entry.name, *(show(filled, key) for key in keys)]


def auc_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """A cell of AUCs, such as `.9110 ± .0012* [.8480]`."""
    cell = filled[key]
    paper = f" [{format_share(cell.paper.mean, 4)}]" if cell.paper else ""
    if cell.auc is None:
        return (f"stopped {cell.stopped} of {cell.asked}" if cell.stopped else "-") + paper
    stopped = f", {cell.stopped} stopped" if cell.stopped else ""
    missing = "" if cell.done == cell.asked else f" ({cell.done} of {cell.asked}{stopped})"
    return f"{spread_text(cell.auc)}{marks(filled, key)}{missing}{paper}"


def precision_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """A cell of average precisions, such as `.8812 ± .0120`."""
    return spread_text(filled[key].precision)


def selected_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """A cell of AUCs at the selected cycles, such as `.9012 ± .0020`."""
    return spread_text(filled[key].selected)


def validation_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """A cell of validation AUCs, such as `.9012 ± .0020`."""
    return spread_text(filled[key].validation)


def spread_text(spread: Spread | None) -> str:
    """A mean and its deviation, such as `.9012 ± .0020`."""
    if spread is None:
        return "-"
    return format_share(spread.mean, 4) + (f" ± {format_share(spread.deviation, 4)}" if spread.values > 1 else "")


def traffic_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """Rounds, their ratio to the first row's, and bytes to the target, such as `120 (0.31), 3.2 GB`.

    With `≤` where the first evaluation has it.
    """
    return _reached(filled, key, lambda cell: cell.reach)


def early_text(filled: Mapping[Key, Filled], key: Key) -> str:
    """The same until a little below the target."""
    return _reached(filled, key, lambda cell: cell.early)


def _reached(filled: Mapping[Key, Filled], key: Key, read: Callable[[Filled], Reach | None]) -> str:
    cell, first = filled[key], next(each for (_, column), each in filled.items() if column == key[1])
    mine, other = read(cell), read(first)
    if cell.target is None and cell.whole:
        return "-"
    if mine is None or other is None:
        return "not reached" if cell.whole and first.whole else f"{cell.done} of {cell.asked} runs"
    return f"{'≤ ' if mine.first else ''}{mine.rounds:.0f} ({mine.rounds / other.rounds:.2f}), {format_bytes(round(mine.bytes))}"


BELOW: Mapping[Text, float] = {traffic_text: 0.0, early_text: EARLY}
"""How far below the column's target cells of traffic are told."""


def terminal(sheet: TableSpec, filled: Mapping[Key, Filled], show: Text | None = None) -> Table:
    """The sheet for a terminal."""
    head, *lines = rows(sheet, filled, show)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in head:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(cell.replace("[", "\\[") for cell in line))
    return table


def markdown(sheet: TableSpec, filled: Mapping[Key, Filled]) -> str:
    """The sheet for a document; traffic twice, as cells may be nearly there long before they are."""
    shown = [None, early_text] if sheet.view == "traffic" else [None]
    return "\n".join(grid(rows(sheet, filled, show)) for show in shown)


def by_case(sheet: TableSpec, filled: Mapping[Key, Filled]) -> list[list[str]]:
    """The means behind columns that are averaged over cases, a line per case."""
    lines = [["", *(entry.name for entry in sheet.rows)]]
    for column in [column for column in sheet.columns if column.average_cases]:
        for place, case in enumerate(column.cases):
            known = [filled[entry.name, column.name].cases[place] for entry in sheet.rows]
            what = ", ".join(f"{name} {value}" for name, value in case.items())
            lines.append(
                [f"{column.name}, {what}", *("-" if mean is None else format_share(mean, 4) for mean in known)]
            )
    return lines


def borrowed(filled: Mapping[Key, Filled]) -> Iterator[str]:
    """A line on the points that have run with another column's settings, if any has."""
    found: dict[str, list[str]] = {}
    for (row, column), cell in filled.items():
        if cell.borrowed and cell.done:
            found.setdefault(column, []).append(row)
    if found:
        listed = ", ".join(f"{column} ({', '.join(names)})" for column, names in found.items())
        yield f"Not tuned by themselves yet, with a table's settings on the same data: {listed}."


def grid(lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table of a header and lines."""
    head, *body = [[cell.replace("~", "\\~").replace("*", "\\*") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def counts(scale: Scale, columns: list[str]) -> tuple[Table, list[str]]:
    """Table 7, the data statistics as positives / negatives, and a line on data that are not there."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in ("dataset", "part", "here", "paper"):
        table.add_column(header, overflow="fold")
    lines = list[str]()
    for column in columns:
        data = scale.datasets[column]["data"]
        try:
            found = count_classes(find_datasets()[data](), 0)
        except MissingFiles as absent:
            table.add_row(column, "-", "not there", "")
            lines.append(str(absent))
            continue
        for part, count in found.items():
            paper = getattr(PAPER_COUNTS[data], part) if data in PAPER_COUNTS else None
            beside = f"{paper.positives:,} / {paper.negatives:,}" if paper else "-"
            table.add_row(column, part, f"{count.positives:,} / {count.negatives:,}", beside)
    return table, lines
