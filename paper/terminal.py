"""What only a terminal needs: tables in pieces that fit it, and lines that say which columns are on other data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from fedauc.data import find_datasets
from fedauc.reports.caveats import caveat_sentence, has_caveat
from paper.filling import Filled, Filler, Key
from paper.records import RecordStore
from paper.scales import Scale
from paper.table_specs import CellSpec, TableSpec
from paper.tables import Text, terminal
from paper.tuning import ChoiceStore, TuningJob


def show(sheet: TableSpec, filled: Mapping[Key, Filled], text: Text | None = None) -> None:
    """Print a sheet, in as many tables as it takes to break no name and no number."""
    console = Console()
    for place, part in enumerate(_parts(sheet, filled, text, console)):
        table = terminal(part, filled, text)
        # A terminal too narrow for one column breaks the lines itself.
        wide = Console(width=max(console.width, _width(console, table)))
        if place:
            console.print()
        wide.print(table)


def _parts(sheet: TableSpec, filled: Mapping[Key, Filled], text: Text | None, console: Console) -> Iterator[TableSpec]:
    """As many columns at once as fit, and one at least."""
    start, end = 0, len(sheet.rows if sheet.is_figure else sheet.columns)
    while start < end:
        stop = start + 1
        while stop < end and _fits(_cut(sheet, start, stop + 1), filled, text, console):
            stop += 1
        yield _cut(sheet, start, stop)
        start = stop


def _cut(sheet: TableSpec, start: int, stop: int) -> TableSpec:
    """The columns of the printed table from one place to another: a figure's rows, as its columns go down."""
    if sheet.is_figure:
        return replace(sheet, rows=sheet.rows[start:stop])
    return replace(sheet, columns=sheet.columns[start:stop])


def _fits(sheet: TableSpec, filled: Mapping[Key, Filled], text: Text | None, console: Console) -> bool:
    return _width(console, terminal(sheet, filled, text)) <= console.width


def _width(console: Console, table: Table) -> int:
    """The columns that a table takes with nothing folded, however many the terminal has."""
    return table.__rich_measure__(console, console.options.update(max_width=1 << 16)).maximum


def warnings(sheet: TableSpec, filler: Filler, store: RecordStore) -> Iterator[str]:
    """One for each column whose runs were on rows that only stand in."""
    for column in sheet.columns:
        cases = [case for entry in sheet.rows for case in filler.records(CellSpec(entry, column))]
        done = [record for case in cases for record in case if record and has_caveat(record.data)]
        if done:
            ranks = next((found for record in done if (found := store.load_ranks(record.config))), None)
            yield caveat_sentence(column.name, done[0].data, int(ranks.labels.sum()) if ranks else None)


def uneven(sheet: TableSpec, choices: ChoiceStore) -> Iterator[str]:
    """One for each column whose rows were not tuned alike."""
    for column in sheet.columns:
        found = {
            entry.name: choices.find_or_inherit(TuningJob.for_cell(CellSpec(entry, column))) for entry in sheet.rows
        }
        ways = dict[str, list[str]]()
        for name, choice in found.items():
            if choice:
                way = "nothing" if choice.grid == "none" else f"{choice.grid}:{choice.budget}"
                ways.setdefault(way, []).append(name)
        if len(ways) > 1:
            told = "; ".join(f"over {way} {', '.join(names)}" for way, names in ways.items())
            yield f"{column.name}: tuned {told}."


def counted(scale: Scale, columns: list[str]) -> Iterator[str]:
    """One for each column of Table 7 that counts rows that only stand in."""
    for column in columns:
        if note := find_datasets()[scale.datasets[column]["data"]].caveat:
            yield caveat_sentence(column, note)
