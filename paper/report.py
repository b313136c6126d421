"""Everything that records say, as one Markdown page with figures; no result in it is written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper import sections
from paper.filling import Filled, Filler, Key
from paper.orderings import Shown
from paper.others import others
from paper.pictures import Panel, panels
from paper.records import Record, RecordStore
from paper.scales import Scale
from paper.short import short
from paper.table_specs import TABLES, CellSpec, TableSpec, list_cells
from paper.tables import CURVES, DRAWN, SMOKE, legend
from paper.tuning import ChoiceStore

Runs = Mapping[Config, Record]
"""Finished and stopped runs by configuration."""


class Page(NamedTuple):
    """The text, its pictures by file name, and whether any run has finished."""

    text: str
    pictures: Mapping[str, Sequence[Panel]]
    begun: bool = True


def page(store: RecordStore, scale: Scale, seeds: Sequence[int], names: Sequence[str] = tuple(TABLES)) -> Page:
    """Every table named that has a finished run, which method is above which, what was tuned, what it ran on."""
    filler = Filler(store, scale, seeds)
    sheets = [lookup("table", name, TABLES)(scale) for name in names]
    every = [Shown(sheet, filler.fill(sheet)) for sheet in sheets]
    shown, runs = _begun(every, filler)
    head = [
        "# Results\n",
        sections.prose(
            "Written by `python -m paper report` from the records in `paper/records/`. `python -m paper NAME` runs a "
            "table or figure; what has not run is listed at the end. The theorems' rates are in `docs/theory.md`."
        ),
    ]
    head += map(sections.prose, [legend(scale.published), DRAWN, CURVES, *([] if scale.published else [SMOKE])])
    if not shown:
        return Page("\n".join([*head, "No run has finished yet.\n"]), {}, begun=False)
    facts = _facts(shown, filler, store)
    drawn = {each.sheet.name: found for each in shown if sections.drawn(each.sheet) and (found := panels(*each))}
    pictured = {name: f"{scale.name}-{name}.png" for name in drawn}
    parts = [*head, *sections.brief(short(shown))]
    tables = [each for each in shown if each.sheet.name.startswith("table")]
    for each in tables:
        parts += sections.section(each, facts, pictured.get(each.sheet.name), scale.published)
    parts += sections.ordered(shown)
    for each in [each for each in shown if each not in tables]:
        parts += sections.section(each, facts, pictured.get(each.sheet.name), scale.published)
    parts += [*sections.data(facts), *sections.tuned(shown, ChoiceStore(store, scale), scale)]
    parts += [part for each in shown if each.sheet.name == "table1" for part in others(each.sheet, scale, store, seeds)]
    parts += sections.lacking(every)
    parts += sections.origin(runs.values())
    return Page("\n".join(parts), {pictured[name]: found for name, found in drawn.items()})


def _begun(every: Sequence[Shown], filler: Filler) -> tuple[list[Shown], Runs]:
    """The sheets that have something to show, and their runs.

    A table whose few runs are all another's has not begun; a view of another table's runs has.
    """
    shown, runs = list[Shown](), dict[Config, Record]()
    for each in every:
        mine = {found.config: found for cell in list_cells(each.sheet) for found in _flat(filler, cell)}
        if (each.sheet.view == "traffic" or mine.keys() - runs.keys()) and (begun := _narrowed(*each)):
            shown.append(begun)
            runs |= mine
    return shown, runs


def _flat(filler: Filler, cell: CellSpec) -> list[Record]:
    return [record for case in filler.records(cell) for record in case if record]


def _narrowed(sheet: TableSpec, filled: Mapping[Key, Filled]) -> Shown | None:
    """The rows and columns that have a result, if any has."""
    whole = [key for key, cell in filled.items() if cell.auc]
    rows = tuple(entry for entry in sheet.rows if entry.name in {row for row, _ in whole})
    columns = tuple(column for column in sheet.columns if column.name in {name for _, name in whole})
    return Shown(replace(sheet, rows=rows, columns=columns), filled) if rows else None


def _facts(shown: Sequence[Shown], filler: Filler, store: RecordStore) -> dict[str, sections.Facts]:
    """What each dataset's first finished run was trained and tested on."""
    found: dict[str, sections.Facts] = {}
    for cell in [cell for each in shown for cell in list_cells(each.sheet) if cell.column.dataset not in found]:
        done = next((record for record in _flat(filler, cell) if record.data), None)
        ranks = store.load_ranks(done.config) if done else None
        if done and ranks and cell.column.dataset not in found:
            found[cell.column.dataset] = sections.Facts(done.data, int(ranks.labels.sum()))
    return found


def overview(scale: Scale) -> Iterator[tuple[str, str, str]]:
    """Every sheet: its name, title and columns."""
    for name, make in TABLES.items():
        sheet = make(scale)
        yield name, sheet.title, ", ".join(column.name for column in sheet.columns)
