"""Tables for a terminal, in as many parts as its width asks for, and the caveats below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable

from fedauc.data import find_datasets
from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.data.statistics import PAPER_COUNTS, count_classes
from fedauc.reports.caveats import caveat_sentence, has_caveat
from paper.builder import Table, TableBuilder
from paper.figures import collect_panels, draw_curves, write_figure
from paper.formatting import ROUNDS_LEGEND, SMOKE_CAVEAT, auc_frame, describe_aucs, number_frame, rounds_frame
from paper.scales import Scale
from paper.table_specs import CellSpec, TableSpec
from paper.tuning import TuningJob


def print_tables(specs: Sequence[TableSpec], builder: TableBuilder) -> None:
    """Print what the records say of some tables, with caveats and a legend."""
    console, tables = Console(), [builder.build(spec) for spec in specs]
    for table in tables:
        _print_line(console, table.spec.title)
        if table.spec.view == "traffic":
            print_frame(rounds_frame(table))
            print_frame(rounds_frame(table, nearly=True))
        else:
            print_frame(auc_frame(table))
        if table.spec.show_validation:
            _print_line(console, "Validation AUC")
            print_frame(number_frame(table, "validation"))
        if table.spec.show_precision:
            _print_line(console, "Average precision")
            print_frame(number_frame(table, "average_precision"))
        for line in (*list_data_caveats(table.spec, builder), *list_borrowed(table), *_list_tunings(table, builder)):
            _print_line(console, line)
        panels = collect_panels(table) if table.spec.is_figure else []
        if panels and is_writable(builder.store.path):
            path = builder.store.path / "figures" / f"{builder.scale.name}-{table.name}.png"
            write_figure(draw_curves(panels), path)
            console.print(f"Curves: {path}", soft_wrap=True)
    auc_tables = [table for table in tables if table.spec.view == "auc"]
    if len(auc_tables) < len(tables):
        _print_line(console, ROUNDS_LEGEND)
    if auc_tables:
        published = any(cell.published for table in tables for cell in table.cells.values())
        tested = not all(table.spec.is_figure for table in auc_tables)
        _print_line(console, describe_aucs(published, tested))
    if not builder.scale.published:
        _print_line(console, SMOKE_CAVEAT)


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
        Console(width=max(console.width, _measure_width(console, part))).print(_make_rich_table(part))
        start = stop


def _make_rich_table(frame: pd.DataFrame) -> RichTable:
    table = RichTable(box=None, padding=(0, 1), pad_edge=False)
    for column in ("", *frame.columns):
        table.add_column(column, overflow="fold")
    for label, values in zip(frame.index, frame.to_numpy(), strict=True):
        table.add_row(*(text.replace("[", "\\[") for text in (label, *values)))
    return table


def _measure_width(console: Console, frame: pd.DataFrame) -> int:
    """The width that a table takes with nothing folded, whatever the width of the terminal."""
    table = _make_rich_table(frame)
    return table.__rich_measure__(console, console.options.update(max_width=1 << 16)).maximum


def _print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)


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
    table = RichTable(box=None, padding=(0, 1), pad_edge=False)
    for header in ("dataset", "part", "here", "paper"):
        table.add_column(header, overflow="fold")
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
    console = Console()
    console.print(table)
    for line in [*caveats, *([] if scale.published else [SMOKE_CAVEAT])]:
        _print_line(console, line)
    for line in missing:
        # A long address must not be broken: it is to be copied.
        print(line)
