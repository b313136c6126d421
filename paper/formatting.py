"""Tables as text: cells, data frames of strings, Markdown, and printing to a terminal with caveats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable

from fedauc.data import find_datasets
from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.data.statistics import PAPER_COUNTS, count_classes
from fedauc.reports.caveats import caveat_sentence, has_caveat
from fedauc.reports.summary import Spread
from fedauc.reports.tables import format_bytes, format_share
from paper.builder import NEARLY, Key, Table, TableBuilder
from paper.figures import collect_panels, draw_curves, write_figure
from paper.records import MOST_ROWS
from paper.scales import Scale
from paper.significance import SIGNIFICANCE_LEVEL
from paper.table_specs import CellSpec, TableSpec
from paper.tuning import TuningJob

SMOKE_CAVEAT = "Smoke scale: synthetic data and a linear model. These numbers say nothing about the paper's."

ROUNDS_LEGEND = (
    "Rounds until the mean test AUC first reaches a common target, in brackets as a multiple of the first row's, and "
    "the bytes sent in both directions. The target is the lowest AUC that the first row and the CyCp rows end with; "
    f"the second table is for {format_share(NEARLY, 2)} less. Rounds in which the pairwise methods only score are "
    "counted. ≤ marks a target that was reached at the first evaluation."
)


def describe_aucs(published: bool = True, tested: bool = True) -> str:
    """What a table of AUCs shows: the paper's numbers only at its scale, marks only where something is tested."""
    text = "Test AUC after the last cycle: mean ± standard deviation over runs"
    text += "; the paper's number is in brackets." if published else "."
    if not tested:
        return text
    return text + (
        " * is the highest mean of a column, among rows whose runs have all finished. ~ means not significantly "
        f"different from it (p ≥ {format_share(SIGNIFICANCE_LEVEL, 2)}), ? means not tested. Single runs and points of "
        "figures are not tested and have no marks. The test is DeLong's paired test with the variance over training "
        "seeds added; over several splits or classes, a t-test over them must be significant too. On test sets of more "
        f"than {MOST_ROWS:,} examples it uses every positive and a sample of the negatives. Runs that diverged or "
        "crashed are counted as stopped."
    )


def format_spread(spread: Spread | None) -> str:
    """A mean and its standard deviation, such as `.9012 ± .0020`."""
    if spread is None:
        return "-"
    return format_share(spread.mean, 4) + (f" ± {format_share(spread.deviation, 4)}" if spread.values > 1 else "")


def format_difference(value: float) -> str:
    """A difference of AUCs with its sign.

    >>> format_difference(0.01234), format_difference(-0.2), format_difference(-0.00001)
    ('+.0123', '-.2000', '+.0000')
    """
    rounded = round(value, 4)
    return ("-" if rounded < 0 else "+") + format_share(abs(rounded), 4)


def format_p_value(value: float) -> str:
    """A p-value to three digits.

    >>> format_p_value(0.0004), format_p_value(0.0312)
    ('p < .001', 'p = .031')
    """
    return "p < .001" if value < 0.001 else f"p = {format_share(value, 3)}"


def significance_mark(table: Table, key: Key) -> str:
    """`*` for a column's best row, `~` for rows not significantly different from it, `?` for rows not tested.

    A column in which nothing was tested has no marks.
    """
    cell = table.cells[key]
    column_tested = any(tested.p_value is not None for tested in table.column_cells(key[1]).values())
    if not cell.complete or not column_tested:
        return ""
    if cell.best:
        return "*"
    if cell.p_value is None:
        return "?"
    return "~" if cell.p_value >= SIGNIFICANCE_LEVEL else ""


def format_auc(table: Table, key: Key) -> str:
    """A cell of AUCs, such as `.9110 ± .0012* [.8480]`."""
    cell = table.cells[key]
    published = f" [{format_share(cell.published.mean, 4)}]" if cell.published else ""
    if cell.auc is None:
        return (f"stopped {cell.stopped} of {cell.expected}" if cell.stopped else "-") + published
    stopped = f", {cell.stopped} stopped" if cell.stopped else ""
    missing = "" if cell.finished == cell.expected else f" ({cell.finished} of {cell.expected}{stopped})"
    return f"{format_spread(cell.auc)}{significance_mark(table, key)}{missing}{published}"


def format_rounds(table: Table, key: Key, nearly: bool = False) -> str:
    """Rounds, their ratio to the first row's, and bytes to the target, such as `120 (0.31), 3.2 GB`."""
    cell, first = table.cells[key], next(iter(table.column_cells(key[1]).values()))
    reach, first_reach = ((c.nearly_reached if nearly else c.reached) for c in (cell, first))
    if cell.target is None and cell.complete:
        return "-"
    if reach is None or first_reach is None:
        both_complete = cell.complete and first.complete
        return "not reached" if both_complete else f"{cell.finished} of {cell.expected} runs"
    bound = "≤ " if reach.at_first_evaluation else ""
    return f"{bound}{reach.rounds:.0f} ({reach.rounds / first_reach.rounds:.2f}), {format_bytes(round(reach.bytes))}"


def auc_frame(table: Table) -> pd.DataFrame:
    """Test AUCs; the columns of a figure, which are many, become rows."""
    return _make_frame(table, lambda key: format_auc(table, key))


def mean_frame(table: Table) -> pd.DataFrame:
    """Mean test AUCs with the paper's below them, a column for each method."""
    rows = {}
    for column in table.spec.columns:
        cells = {row.name: table.cells[row.name, column.name] for row in table.spec.rows}
        rows[f"{column.name}, here"] = [
            format_share(cell.auc.mean, 4) + significance_mark(table, (row, column.name)) if cell.auc else "-"
            for row, cell in cells.items()
        ]
        if any(cell.published for cell in cells.values()):
            published = [cell.published and format_share(cell.published.mean, 4) for cell in cells.values()]
            rows[f"{column.name}, paper"] = [text or "-" for text in published]
    return pd.DataFrame.from_dict(rows, orient="index", columns=[row.name for row in table.spec.rows])


def number_frame(table: Table, number: str) -> pd.DataFrame:
    """One of NUMBERS for each cell, with its spread."""
    return _make_frame(table, lambda key: format_spread(getattr(table.cells[key], number)))


def rounds_frame(table: Table, nearly: bool = False) -> pd.DataFrame:
    """Rounds and bytes to the target, or until it is nearly reached, below the targets themselves."""
    frame = _make_frame(table, lambda key: format_rounds(table, key, nearly))
    targets = [table.cells[table.spec.rows[0].name, column.name].target for column in table.spec.columns]
    texts = ["-" if target is None else format_share(target - (NEARLY if nearly else 0.0), 4) for target in targets]
    head = pd.DataFrame([texts], index=["AUC to reach"], columns=frame.columns)
    return pd.concat([head, frame])


def case_frame(table: Table) -> pd.DataFrame:
    """The means behind columns that are averaged over cases, a row for each case."""
    rows = {}
    for column in [column for column in table.spec.columns if column.average_cases]:
        for number, case in enumerate(column.cases):
            means = [table.cells[row.name, column.name].case_means[number] for row in table.spec.rows]
            label = ", ".join([column.name, *(f"{name} {value}" for name, value in case.items())])
            rows[label] = ["-" if mean is None else format_share(mean, 4) for mean in means]
    return pd.DataFrame.from_dict(rows, orient="index", columns=[row.name for row in table.spec.rows])


def _make_frame(table: Table, text: Callable[[Key], str]) -> pd.DataFrame:
    columns = [column.name for column in table.spec.columns]
    rows = {row.name: [text((row.name, column)) for column in columns] for row in table.spec.rows}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return frame.T if table.spec.kind == "figure" else frame


def to_markdown(frame: pd.DataFrame, corner: str = "") -> str:
    """A Markdown table, with `corner` above the row names.

    >>> print(to_markdown(pd.DataFrame({"cifar10": [".9*"]}, index=["a"]), "method"), end="")
    | method | cifar10 |
    | --- | --- |
    | a | .9\\* |
    """
    lines = [[corner, *frame.columns], ["---"] * (1 + frame.shape[1]), *frame.itertuples(name=None)]
    text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    # A single asterisk is a mark, two of them are bold.
    return re.sub(r"~|(?<!\*)\*(?!\*)", r"\\\g<0>", text)


# ----------------------------------------------------------------------------------------------------------- terminal


def print_tables(specs: Sequence[TableSpec], builder: TableBuilder) -> None:
    """Print what the records say of some tables, with caveats and a legend."""
    tables = [builder.build(spec) for spec in specs]
    for table in tables:
        _print_line(table.spec.title)
        traffic = table.spec.kind == "traffic"
        for frame in [rounds_frame(table), rounds_frame(table, nearly=True)] if traffic else [auc_frame(table)]:
            print_frame(frame)
        if "validation" in table.spec.more_numbers:
            _print_line("Validation AUC")
            print_frame(number_frame(table, "validation"))
        if "average_precision" in table.spec.more_numbers:
            _print_line("Average precision")
            print_frame(number_frame(table, "average_precision"))
        for line in (*list_data_caveats(table.spec, builder), *list_borrowed(table), *_list_tunings(table, builder)):
            _print_line(line)
        panels = collect_panels(table) if table.spec.kind == "figure" else []
        if panels and is_writable(builder.store.path):
            path = builder.store.path / "figures" / f"{builder.scale.name}-{table.name}.png"
            write_figure(draw_curves(panels), path)
            Console().print(f"Curves: {path}", soft_wrap=True)
    auc_tables = [table for table in tables if table.spec.kind != "traffic"]
    if len(auc_tables) < len(tables):
        _print_line(ROUNDS_LEGEND)
    if auc_tables:
        published = any(cell.published for table in tables for cell in table.cells.values())
        tested = not all(table.spec.kind == "figure" for table in auc_tables)
        _print_line(describe_aucs(published, tested))
    if not builder.scale.published:
        _print_line(SMOKE_CAVEAT)


def print_frame(frame: pd.DataFrame) -> None:
    """Print a frame in as many parts as it takes to break no name and no number."""
    console, start = Console(), 0
    while start < frame.shape[1]:
        stop = start + 1
        while stop < frame.shape[1] and _measure_width(console, frame.iloc[:, start : stop + 1]) <= console.width:
            stop += 1
        part = frame.iloc[:, start:stop]
        if start:
            console.print()
        # A single column that is wider than the terminal is left to the terminal to wrap.
        Console(width=max(console.width, _measure_width(console, part))).print(_fill_rich_table(part))
        start = stop


def make_rich_table(*headers: str) -> RichTable:
    """An empty table without lines."""
    table = RichTable(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _fill_rich_table(frame: pd.DataFrame) -> RichTable:
    table = make_rich_table("", *frame.columns)
    for row in frame.itertuples(name=None):
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table


def _measure_width(console: Console, frame: pd.DataFrame) -> int:
    """The width that a table takes with nothing folded, whatever the width of the terminal."""
    table = _fill_rich_table(frame)
    return table.__rich_measure__(console, console.options.update(max_width=1 << 16)).maximum


def _print_line(line: str) -> None:
    Console().print(line, highlight=False, markup=False)


def list_data_caveats(spec: TableSpec, builder: TableBuilder) -> Iterator[str]:
    """A caveat for each column whose runs used synthetic or substitute data."""
    for column in spec.columns:
        cases = [case for row in spec.rows for case in builder.find_records(CellSpec(row, column))]
        records = [record for case in cases for record in case if record and has_caveat(record.data)]
        if records:
            ranks = next(filter(None, (builder.store.load_ranks(record.config) for record in records)), None)
            yield caveat_sentence(column.name, records[0].data, int(ranks.labels.sum()) if ranks else None)


def list_borrowed(table: Table) -> Iterator[str]:
    """A caveat on points of figures that ran with the settings of another column, if there are any."""
    columns: dict[str, list[str]] = {}
    for (row, column), cell in table.cells.items():
        if cell.borrowed_settings and cell.finished:
            columns.setdefault(column, []).append(row)
    if columns:
        listed = ", ".join(f"{column} ({', '.join(rows)})" for column, rows in columns.items())
        yield f"Not tuned separately yet, so these have a table's settings for the same data: {listed}."


def _list_tunings(table: Table, builder: TableBuilder) -> Iterator[str]:
    """A caveat for each column whose rows were not tuned in the same way."""
    for column in table.spec.columns:
        rows_by_tuning = dict[str, list[str]]()
        for row in table.spec.rows:
            choice = builder.choices.find_or_inherit(TuningJob.for_cell(CellSpec(row, column)))
            if choice:
                tuning = "not tuned" if choice.grid == "none" else f"tuned with {choice.grid}:{choice.budget}"
                rows_by_tuning.setdefault(tuning, []).append(row.name)
        if len(rows_by_tuning) > 1:
            listed = "; ".join(f"{', '.join(rows)} {tuning}" for tuning, rows in rows_by_tuning.items())
            yield f"Rows of {column.name} were tuned differently: {listed}."


def print_counts(scale: Scale, columns: Sequence[str]) -> None:
    """Print Table 7, positives / negatives of each dataset, with caveats; data that is missing is named below."""
    table = make_rich_table("dataset", "part", "here", "paper")
    caveats, missing = list[str](), list[str]()
    for column in columns:
        dataset = find_datasets()[scale.datasets[column]["data"]]
        if dataset.caveat:
            caveats.append(caveat_sentence(column, dataset.caveat))
        try:
            counts = count_classes(dataset(), 0)
        except MissingFiles as absent:
            table.add_row(column, "-", "missing", "")
            missing.append(str(absent))
            continue
        for part, count in counts.items():
            paper = getattr(PAPER_COUNTS[dataset.name], part) if dataset.name in PAPER_COUNTS else None
            published = f"{paper.positives:,} / {paper.negatives:,}" if paper else "-"
            table.add_row(column, part, f"{count.positives:,} / {count.negatives:,}", published)
    Console().print(table)
    for line in [*caveats, *([] if scale.published else [SMOKE_CAVEAT])]:
        _print_line(line)
    # A long address must not be broken: it is to be copied.
    print("\n".join(missing), end="\n" * bool(missing))
