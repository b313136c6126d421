"""Whole runs with settings that were not chosen: what another tuning would have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedauc.reports.summary import Spread
from paper.halving import candidates
from paper.layout import Cell, Sheet, cells, runs
from paper.records import Store
from paper.scales import Scale, Texts
from paper.tables import grid, spread_text
from paper.tuning import Choices, Job

GRID = "fine"
"""The grid that has every candidate of the others but the paper's stages and the largest steps of `wider`."""


def others(sheet: Sheet, scale: Scale, store: Store, seeds: Sequence[int]) -> Iterator[str]:
    """A line for each row, dataset and setting that has run in full without being what the table shows."""
    choices, lines = Choices(store, scale), list[list[str]]()
    for cell in cells(sheet):
        chosen = choices.settings(Job.of(cell))
        if store.begun(scale.datasets[cell.column.dataset]["data"], cell.entry.method):
            for settings in candidates(cell.entry, GRID):
                if settings != chosen and (found := _aucs(cell, settings, scale, store, seeds)):
                    values = ", ".join(f"{name} {value}" for name, value in settings.items())
                    lines.append([cell.column.name, cell.entry.name, values, spread_text(Spread.of(found))])
    if lines:
        yield "Runs of full length with settings that were not chosen, test AUC after the last cycle:\n"
        yield grid([["dataset", "row", "settings", "AUC"], *lines])


def _aucs(cell: Cell, settings: Texts, scale: Scale, store: Store, seeds: Sequence[int]) -> list[float]:
    """The last test AUCs, if every seed has one."""
    configs = [config for case in runs(scale, cell, settings, seeds) for config in case]
    found = []
    for config in configs:
        record = store.get(config)
        if record is None or record.final is None:
            return []
        found.append(record.final.auc)
    return found
