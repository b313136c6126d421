"""Learning curves from filled sheets: test AUC against rounds, the mean over the runs done."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedauc.experiments.checkpoint import write_atomically
from fedauc.reports.curves import COLOURS, STYLES
from paper.filling import Filled, Key
from paper.records import Point
from paper.table_specs import TableSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 2
"""Panels side by side."""

APART = 4
"""Runs so many times as long as others would leave these no room, but for a logarithmic axis."""


COLLAPSED = 3
"""Times the distance of a curve's quartiles: a point so far below the lower one stands alone."""


class Panel(NamedTuple):
    """A title, and curves by label."""

    title: str
    curves: Mapping[str, Sequence[Point]]


def panels(sheet: TableSpec, filled: Mapping[Key, Filled]) -> list[Panel]:
    """Of a figure a panel per dataset and row with a line per column; of a table one per column with a line per row."""
    if sheet.is_figure:
        made = [
            Panel(f"{entry.name}, {dataset}", _varied(sheet, filled, dataset, entry.name))
            for dataset in dict.fromkeys(column.dataset for column in sheet.columns)
            for entry in sheet.rows
        ]
        # One line alone says nothing of what is varied.
        return [panel for panel in made if sum(map(bool, panel.curves.values())) > 1]
    rows = [entry.name for entry in sheet.rows]
    made = [Panel(each.name, {row: filled[row, each.name].curve for row in rows}) for each in sheet.columns]
    return [panel for panel in made if any(panel.curves.values())]


def _varied(sheet: TableSpec, filled: Mapping[Key, Filled], dataset: str, row: str) -> dict[str, Sequence[Point]]:
    columns = [column.name for column in sheet.columns if column.dataset == dataset]
    return {name.removeprefix(f"{dataset}-"): filled[row, name].curve for name in columns}


def draw(made: Sequence[Panel], path: Path) -> None:
    """A picture of some panels, as a file."""
    buffer = io.BytesIO()
    picture(made).savefig(buffer, format="png", dpi=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def picture(made: Sequence[Panel]) -> Figure:
    """Panels two by two; a line of panels has a legend of its own, where values of a number are varied."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = math.ceil(len(made) / ACROSS)
    figure = Figure(figsize=(11, 3.4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, ACROSS, squeeze=False)
    labels = _labels(made)
    numbers = all(map(_is_number, labels))
    looks = {label: _look(label, place, len(labels) if numbers else 0) for place, label in enumerate(labels)}
    lines = [made[start : start + ACROSS] for start in range(0, len(made), ACROSS)]
    shown = [_line(mine, line, looks) for mine, line in zip(lines, axes, strict=True)]
    every = {label: artist for each in shown for label, artist in each.items()}
    for mine, line, each in zip(lines, axes, shown if numbers else [every], strict=numbers):
        ordered = [label for label in labels if label in each]
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
        line[len(mine) - 1].legend([each[label] for label in ordered], ordered, **beside)
    return figure


def _line(made: Sequence[Panel], axes: Any, looks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Panels side by side; their lines by label."""
    shown = dict[str, Any]()
    for panel, axis in zip(made, axes, strict=False):
        shown |= _plot(panel, axis, looks)
    for axis in axes[len(made) :]:
        axis.set_visible(False)
    return shown


def _plot(panel: Panel, axis: Any, looks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A panel's lines by label."""
    axis.set(title=panel.title, xlabel="rounds", ylabel="test AUC")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    curves = {label: curve for label, curve in panel.curves.items() if curve}
    shown = {}
    for label, curve in curves.items():
        (shown[label],) = axis.plot([point.rounds for point in curve], [point.auc for point in curve], **looks[label])
    ends = [curve[-1].rounds for curve in curves.values()]
    if max(ends) > APART * min(ends):
        axis.set_xscale("log")
    axis.set_ylim(*_limits(panel))
    return shown


def _is_number(label: str) -> bool:
    """Whether it is a value of I, M or K."""
    return label[1:].isdecimal()


def _labels(made: Sequence[Panel]) -> list[str]:
    """Every label once: values of a number by their size, rows as they come."""
    found = list(dict.fromkeys(label for panel in made for label in panel.curves))
    return sorted(found, key=lambda label: int(label[1:])) if all(map(_is_number, found)) else found


def _limits(panel: Panel) -> tuple[float, float]:
    """A little more than the AUCs after a tenth of the rounds: what comes before would leave no room for the rest.

    Nor would single collapses, which lie far below a curve's other points.
    """
    kept = []
    for curve in filter(None, panel.curves.values()):
        aucs = np.array([point.auc for point in curve[len(curve) // 10 :]])
        low, high = np.quantile(aucs, [0.25, 0.75])
        kept.append(aucs[aucs >= low - COLLAPSED * (high - low)])
    shown = np.concatenate(kept)
    margin = 0.05 * np.ptp(shown) + 1e-4
    return float(shown.min() - margin), float(shown.max() + margin)


def _look(label: str, place: int, of: int) -> dict[str, Any]:
    """A colour each; some lines are dashed, so that those that coincide show.

    Numbers go from dark to light, and are dashed by their size, in every figure alike.
    """
    from matplotlib import colormaps

    colours = COLOURS[:-1]
    number = int(label[1:]) if of else 0
    colour = colormaps["viridis"](0.9 * place / max(1, of - 1)) if of else colours[place % len(colours)]
    return {"color": colour, "linestyle": STYLES[(number.bit_length() - 1 if of else place) % 2], "linewidth": 1.4}
