"""Everything that records say, as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedauc.discovery import lookup
from fedauc.experiments.paper.records import Record, Store
from fedauc.experiments.paper.scales import Scale
from fedauc.experiments.paper.sheets import SHEETS, Sheet, cells
from fedauc.experiments.paper.tuning import Choices, Job
from fedauc.reports.paper.filling import Filler, wanted
from fedauc.reports.paper.tables import LEGEND, SMOKE, markdown


def page(store: Store, scale: Scale, seeds: Sequence[int], names: Sequence[str] = tuple(SHEETS)) -> str:
    """Every table named that has a finished run, what was tuned at what cost, and what it ran on."""
    filler = Filler(store, scale, seeds)
    parts = ["# The paper's experiments\n", f"{LEGEND}\n"] + ([f"{SMOKE}\n"] if not scale.published else [])
    shown, used = [], dict[str, Record]()
    for make in [lookup("table", name, SHEETS) for name in names]:
        if sheet := _begun(make(scale), filler):
            shown.append(sheet)
            parts.append(markdown(sheet, filler.fill(sheet)))
            used |= {config.to_json(): found for config in wanted([sheet], filler) if (found := store.get(config))}
    if not shown:
        return "".join(parts) + "\nNo run has finished yet.\n"
    return "\n".join([*parts, _tuned(shown, Choices(store, scale)), _origin(list(used.values()))])


def _begun(sheet: Sheet, filler: Filler) -> Sheet | None:
    """The rows and columns that have a result; nothing where fewer than two rows have."""
    whole = [key for key, cell in filler.fill(sheet).items() if cell.auc]
    rows = tuple(entry for entry in sheet.rows if entry.name in {row for row, _ in whole})
    columns = tuple(column for column in sheet.columns if column.name in {name for _, name in whole})
    return replace(sheet, rows=rows, columns=columns) if len(rows) > 1 else None


def _tuned(sheets: Sequence[Sheet], choices: Choices) -> str:
    lines = ["## Tuning\n", "Successive halving on validation AUC, on the labels as they are with dir = 0.5.\n"]
    lines += ["| dataset | row | chosen | grid | runs | cycles | seconds |", "|---|---|---|---|---|---|---|"]
    jobs = dict.fromkeys(Job(cell.column.dataset, cell.entry) for sheet in sheets for cell in cells(sheet))
    for job in jobs:
        if found := choices.get(job):
            chosen = ", ".join(f"{name} {value}" for name, value in found.settings.items()) or "defaults"
            cost = f"{found.runs} | {found.cycles} | {found.seconds:.0f}"
            lines.append(f"| {job.dataset} | {job.entry.name} | {chosen} | {found.grid} | {cost} |")
    return "\n".join(lines) + "\n"


def _origin(records: Sequence[Record]) -> str:
    """The runs' time, versions and commits."""
    seconds = sum(record.seconds for record in records)
    lines = ["## Runs\n", f"{len(records)} runs, {seconds:.0f} seconds of training and evaluation, on:\n"]
    return "\n".join(lines + [f"- {line}" for line in sorted(set(map(_versions, records)))]) + "\n"


def _versions(record: Record) -> str:
    known = ", ".join(f"{name} {value}" for name, value in record.versions.items() if value)
    return f"{known}; commit {record.commit or 'unknown'}"


def overview(scale: Scale) -> Iterator[tuple[str, str, str]]:
    """Every sheet: its name, title and columns."""
    for name, make in SHEETS.items():
        sheet = make(scale)
        yield name, sheet.title, ", ".join(column.name for column in sheet.columns)
