"""Print tables in a terminal, with caveats and a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable

from fedauc.data import find_datasets
from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.data.statistics import PAPER_COUNTS, count_classes
from fedauc.reports.caveats import caveat_sentence
from paper import tables
from paper.figures import collect_panels, draw_curves, write_figure
from paper.scales import Scale
from paper.table_specs import CellSpec, TableSpec
from paper.tables import NEARLY, Table, TableBuilder
from paper.tuning import TuningJob

NUMBER_TITLES = {"validation": "Validation AUC", "average_precision": "Average precision"}


def print_tables(specs: Sequence[TableSpec], builder: TableBuilder) -> None:
    """Print what the records say of some tables, with caveats and a legend."""
    built = [builder.build(spec) for spec in specs]
    for table in built:
        _print_line(table.spec.title)
        if table.spec.kind == "traffic":
            print_frame(tables.make_rounds_frame(table))
            print_frame(tables.make_rounds_frame(table, NEARLY))
        else:
            print_frame(tables.make_frame(table))
        for number in table.spec.more_numbers:
            _print_line(NUMBER_TITLES[number])
            print_frame(tables.make_number_frame(table, number))
        caveats = tables.list_data_caveats(table, builder.store), tables.list_borrowed(table)
        for line in (line for lines in (*caveats, _list_tunings(table, builder)) for line in lines):
            _print_line(line)
        panels = collect_panels(table) if table.spec.kind == "figure" else []
        if panels and is_writable(builder.store.path):
            path = builder.store.path / "figures" / f"{builder.scale.name}-{table.name}.png"
            write_figure(draw_curves(panels), path)
            Console().print(f"Curves: {path}", soft_wrap=True)
    kinds = {table.spec.kind for table in built}
    if "traffic" in kinds:
        _print_line(tables.ROUNDS_LEGEND)
    if kinds != {"traffic"}:
        published = any(cell.published for table in built for cell in table.cells.values())
        _print_line(tables.describe_aucs(published, tested="table" in kinds))
    if not builder.scale.published:
        _print_line(tables.SMOKE_CAVEAT)


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
    for line in [*caveats, *([] if scale.published else [tables.SMOKE_CAVEAT])]:
        _print_line(line)
    # A long address must not be broken: it is to be copied.
    print("\n".join(missing), end="\n" * bool(missing))
