"""Whole runs with settings that were not chosen: what another tuning would have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedauc.reports.summary import Spread
from paper.halving import grid_candidates
from paper.records import RecordStore
from paper.scales import Options, Scale
from paper.table_specs import CellSpec, TableSpec, cell_configs, list_cells
from paper.tables import grid, spread_text
from paper.tuning import ChoiceStore, TuningJob

GRID = "fine"
"""The grid that has every candidate of the others but the paper's stages and the largest steps of `wider`."""


def others(sheet: TableSpec, scale: Scale, store: RecordStore, seeds: Sequence[int]) -> Iterator[str]:
    """A line for each row, dataset and setting that has run in full without being what the table shows."""
    choices, lines = ChoiceStore(store, scale), list[list[str]]()
    for cell in list_cells(sheet):
        chosen = choices.chosen_settings(TuningJob.for_cell(cell))
        if store.has_runs(scale.datasets[cell.column.dataset]["data"], cell.row.method):
            for settings in grid_candidates(cell.row, GRID):
                if settings != chosen and (found := _aucs(cell, settings, scale, store, seeds)):
                    values = ", ".join(f"{name} {value}" for name, value in settings.items())
                    lines.append([cell.column.name, cell.row.name, values, spread_text(Spread.of(found))])
    if lines:
        yield "Runs of full length with settings that were not chosen, test AUC after the last cycle:\n"
        yield grid([["dataset", "row", "settings", "AUC"], *lines])


def _aucs(cell: CellSpec, settings: Options, scale: Scale, store: RecordStore, seeds: Sequence[int]) -> list[float]:
    """The last test AUCs, if every seed has one."""
    configs = [config for case in cell_configs(scale, cell, settings, seeds) for config in case]
    found = []
    for config in configs:
        record = store.find_record(config)
        if record is None or record.final_point is None:
            return []
        found.append(record.final_point.auc)
    return found
