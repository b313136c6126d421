"""A figure's learning curves from records: a panel per dataset and row, a line per column."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.paper.records import Record, Store
from fedauc.experiments.paper.sheets import Cell, Sheet
from fedauc.reports.curves import COLOURS, STYLES
from fedauc.reports.paper.filling import Filler


def draw(sheet: Sheet, store: Store, filler: Filler, path: Path) -> None:
    """Test AUC against rounds, the mean over the runs that are done."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(column.dataset for column in sheet.columns))
    figure = Figure(figsize=(4 * len(sheet.rows), 3 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), len(sheet.rows), squeeze=False, sharex="row", sharey="row")
    for down, dataset in enumerate(names):
        for across, entry in enumerate(sheet.rows):
            panel = panels[down][across]
            panel.set(title=f"{entry.name}, {dataset}", xlabel="rounds", ylabel="test AUC")
            panel.grid(alpha=0.3)
            columns = [column for column in sheet.columns if column.dataset == dataset]
            for place, column in enumerate(columns):
                configs = [config for case in filler.configs(Cell(entry, column)) for config in case]
                found = [record for record in map(store.get, configs) if record and record.final]
                look = {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place % len(STYLES)]}
                if found:
                    panel.plot(*mean_curve(found), label=column.name.removeprefix(f"{dataset}-"), **look)
                    panel.legend(frameon=False, loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def mean_curve(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Rounds and mean AUC of runs that were evaluated in the same rounds."""
    rounds = [point.rounds for point in records[0].curve]
    aucs = np.mean([[point.auc for point in record.curve] for record in records], axis=0)
    return rounds, aucs.tolist()
