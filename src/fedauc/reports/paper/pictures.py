"""Learning curves from filled sheets: test AUC against rounds, the mean over the runs done."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.paper.records import Point
from fedauc.experiments.paper.sheets import Sheet
from fedauc.reports.curves import COLOURS, STYLES
from fedauc.reports.paper.filling import Filled, Key

ACROSS = 2
"""Panels side by side."""


class Panel(NamedTuple):
    """A title, and curves by label."""

    title: str
    curves: Mapping[str, Sequence[Point]]


def panels(sheet: Sheet, filled: Mapping[Key, Filled]) -> list[Panel]:
    """Of a figure, a panel per dataset and row with a line per column; of a table, per column with a line per row."""
    if sheet.name.startswith("figure"):
        made = [
            Panel(f"{entry.name}, {dataset}", _varied(sheet, filled, dataset, entry.name))
            for dataset in dict.fromkeys(column.dataset for column in sheet.columns)
            for entry in sheet.rows
        ]
    else:
        rows = [entry.name for entry in sheet.rows]
        made = [Panel(each.name, {row: filled[row, each.name].curve for row in rows}) for each in sheet.columns]
    return [panel for panel in made if any(panel.curves.values())]


def _varied(sheet: Sheet, filled: Mapping[Key, Filled], dataset: str, row: str) -> dict[str, Sequence[Point]]:
    columns = [column.name for column in sheet.columns if column.dataset == dataset]
    return {name.removeprefix(f"{dataset}-"): filled[row, name].curve for name in columns}


def draw(made: Sequence[Panel], path: Path) -> None:
    """Panels two by two."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = math.ceil(len(made) / ACROSS)
    figure = Figure(figsize=(11, 3.4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    shown: dict[str, tuple[int, Any]] = {}
    axes = figure.subplots(down, ACROSS, squeeze=False).flat
    for panel, axis in zip(made, axes, strict=False):
        axis.set(title=panel.title, xlabel="rounds", ylabel="test AUC")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        for place, (label, curve) in enumerate(panel.curves.items()):
            if curve:
                rounds, aucs = [point.rounds for point in curve], [point.auc for point in curve]
                (line,) = axis.plot(rounds, aucs, **_look(place))
                shown.setdefault(label, (place, line))
        axis.set_ylim(bottom=_bottom(panel))
    for axis in list(figure.axes)[len(made) :]:
        axis.set_visible(False)
    # In the panels' own order, though the first panel may lack some lines.
    ordered = sorted(shown, key=lambda label: shown[label][0])
    figure.legend([shown[label][1] for label in ordered], ordered, loc="outside right upper", frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def _bottom(panel: Panel) -> float:
    """The lowest AUC after a tenth of the rounds: what comes before would leave no room for the rest."""
    lowest = min(point.auc for curve in panel.curves.values() for point in curve[len(curve) // 10 :])
    return lowest - 0.01


def _look(place: int) -> dict[str, Any]:
    """Colours first, then another line style, so that every line of a panel differs."""
    colours = COLOURS[:-1]
    return {"color": colours[place % len(colours)], "linestyle": STYLES[place // len(colours)], "linewidth": 1.4}
