"""What only a terminal needs: tables in pieces that fit it, and lines that say which columns are on other data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from fedauc.data import find_datasets
from fedauc.reports.caveats import caveat_sentence, has_caveat
from paper.filling import Filled, Filler, Key
from paper.layout import Cell, Sheet
from paper.records import Store
from paper.scales import Scale
from paper.tables import Text, terminal
from paper.tuning import Choices, Job


def show(sheet: Sheet, filled: Mapping[Key, Filled], text: Text | None = None) -> None:
    """Print a sheet, in as many tables as it takes to break no name and no number."""
    console = Console()
    for place, part in enumerate(_parts(sheet, filled, text, console)):
        table = terminal(part, filled, text)
        # A terminal too narrow for one column breaks the lines itself.
        wide = Console(width=max(console.width, _width(console, table)))
        if place:
            console.print()
        wide.print(table)


def _parts(sheet: Sheet, filled: Mapping[Key, Filled], text: Text | None, console: Console) -> Iterator[Sheet]:
    """As many columns at once as fit, and one at least."""
    start, end = 0, len(sheet.rows if sheet.varied else sheet.columns)
    while start < end:
        stop = start + 1
        while stop < end and _fits(_cut(sheet, start, stop + 1), filled, text, console):
            stop += 1
        yield _cut(sheet, start, stop)
        start = stop


def _cut(sheet: Sheet, start: int, stop: int) -> Sheet:
    """The columns of the printed table from one place to another: a figure's rows, as its columns go down."""
    if sheet.varied:
        return replace(sheet, rows=sheet.rows[start:stop])
    return replace(sheet, columns=sheet.columns[start:stop])


def _fits(sheet: Sheet, filled: Mapping[Key, Filled], text: Text | None, console: Console) -> bool:
    return _width(console, terminal(sheet, filled, text)) <= console.width


def _width(console: Console, table: Table) -> int:
    """The columns that a table takes with nothing folded, however many the terminal has."""
    return table.__rich_measure__(console, console.options.update(max_width=1 << 16)).maximum


def warnings(sheet: Sheet, filler: Filler, store: Store) -> Iterator[str]:
    """One for each column whose runs were on rows that only stand in."""
    for column in sheet.columns:
        cases = [case for entry in sheet.rows for case in filler.records(Cell(entry, column))]
        done = [record for case in cases for record in case if record and has_caveat(record.data)]
        if done:
            ranks = next((found for record in done if (found := store.ranks(record.config))), None)
            yield caveat_sentence(column.name, done[0].data, int(ranks.labels.sum()) if ranks else None)


def uneven(sheet: Sheet, choices: Choices) -> Iterator[str]:
    """One for each column whose rows were not tuned alike."""
    for column in sheet.columns:
        found = {entry.name: choices.find(Job.of(Cell(entry, column))) for entry in sheet.rows}
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
