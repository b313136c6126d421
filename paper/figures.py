"""Figures from tables: learning curves, and differences between methods with their confidence intervals."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedauc.files import write_atomically
from fedauc.reports.curves import COLOURS, STYLES
from paper.builder import Table
from paper.records import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paper.findings import Comparison

PANELS_PER_ROW = 2

LOG_SCALE_RATIO = 4
"""Where runs are this many times longer than others, a linear axis would leave the short ones no room."""

OUTLIER_QUARTILES = 3
"""A point this many interquartile ranges below a curve's lower quartile is a single collapse."""


class Panel(NamedTuple):
    """A title, and learning curves by label."""

    title: str
    curves: Mapping[str, Sequence[Point]]


def collect_panels(table: Table) -> list[Panel]:
    """A figure has a panel per dataset and row, with a curve per column; a table has one per column."""
    spec = table.spec
    if spec.kind != "figure":
        panels = [
            Panel(column.name, {row.name: table.cells[row.name, column.name].curve for row in spec.rows})
            for column in spec.columns
        ]
        return [panel for panel in panels if any(panel.curves.values())]
    panels = []
    for dataset in dict.fromkeys(column.dataset for column in spec.columns):
        columns = [column.name for column in spec.columns if column.dataset == dataset]
        for row in spec.rows:
            curves = {name.removeprefix(f"{dataset}-"): table.cells[row.name, name].curve for name in columns}
            panels.append(Panel(f"{row.name}, {dataset}", curves))
    # A single curve says nothing about what is varied.
    return [panel for panel in panels if sum(map(bool, panel.curves.values())) > 1]


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def draw_curves(panels: Sequence[Panel]) -> Figure:
    """Panels in rows of two. Each row has a legend where values of a number are varied; otherwise the first has one."""
    rows = math.ceil(len(panels) / PANELS_PER_ROW)
    figure = _make_figure(11, 3.4 * rows)
    axes = figure.subplots(rows, PANELS_PER_ROW, squeeze=False)
    labels = list_labels(panels)
    numeric = all(map(_is_number, labels))
    styles = {
        label: _choose_style(label, position, len(labels) if numeric else 0) for position, label in enumerate(labels)
    }
    shown: list[dict[str, Any]] = [{} for _ in range(rows)]
    for position, axis in enumerate(axes.flat):
        if position < len(panels):
            shown[position // PANELS_PER_ROW] |= _draw_panel(panels[position], axis, styles)
        else:
            axis.set_visible(False)
    if not numeric:
        shown = [{label: line for lines in shown for label, line in lines.items()}]
    for row, lines in enumerate(shown):
        last = min(PANELS_PER_ROW, len(panels) - row * PANELS_PER_ROW) - 1
        ordered = [label for label in labels if label in lines]
        outside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
        axes[row][last].legend([lines[label] for label in ordered], ordered, **outside)
    return figure


def draw_differences(comparisons: Sequence[Comparison]) -> Figure:
    """A panel per column: each method minus each baseline, with 95 % intervals; the paper's differences are hollow."""
    columns = list(dict.fromkeys(comparison.column.name for comparison in comparisons))
    methods = list(dict.fromkeys(comparison.method for comparison in comparisons))
    baselines = list(dict.fromkeys(comparison.baseline for comparison in comparisons))
    figure = _make_figure(11, 0.8 + 0.3 * len(baselines))
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, column in zip(axes, columns, strict=True):
        axis.axvline(0, color="grey", linewidth=0.8)
        for comparison in [comparison for comparison in comparisons if comparison.column.name == column]:
            number = methods.index(comparison.method)
            height = baselines.index(comparison.baseline) + 0.3 * (number - (len(methods) - 1) / 2)
            error = comparison.test.half_width if comparison.test else 0.0
            axis.errorbar(comparison.value, height, xerr=error, fmt="o", markersize=4, color=COLOURS[number], capsize=2)
            if comparison.published is not None:
                axis.plot(
                    comparison.published, height, "o", markersize=4, markerfacecolor="none", color=COLOURS[number]
                )
        axis.set(title=column, xlabel="difference in test AUC to the baseline")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].set_yticks(range(len(baselines)), baselines)
    axes[0].invert_yaxis()
    for number, method in enumerate(methods):
        axes[-1].plot([], [], "o", color=COLOURS[number], label=method)
    axes[-1].plot([], [], "o", color="grey", markerfacecolor="none", label="the paper's")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _make_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_panel(panel: Panel, axis: Any, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw a panel's curves; return the lines by label."""
    axis.set(title=panel.title, xlabel="rounds", ylabel="test AUC")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    curves = {label: curve for label, curve in panel.curves.items() if curve}
    lines = {}
    for label, curve in curves.items():
        (lines[label],) = axis.plot([point.rounds for point in curve], [point.auc for point in curve], **styles[label])
    lengths = [curve[-1].rounds for curve in curves.values()]
    if max(lengths) > LOG_SCALE_RATIO * min(lengths):
        axis.set_xscale("log")
    axis.set_ylim(*_choose_limits(panel))
    return lines


def _choose_limits(panel: Panel) -> tuple[float, float]:
    """A little more than the AUCs after a tenth of the rounds, without single collapses, which would leave no room."""
    shown = []
    for curve in filter(None, panel.curves.values()):
        aucs = np.array([point.auc for point in curve[len(curve) // 10 :]])
        low, high = np.quantile(aucs, [0.25, 0.75])
        shown.append(aucs[aucs >= low - OUTLIER_QUARTILES * (high - low)])
    aucs = np.concatenate(shown)
    margin = 0.05 * np.ptp(aucs) + 1e-4
    return float(aucs.min() - margin), float(aucs.max() + margin)


def list_labels(panels: Sequence[Panel]) -> list[str]:
    """Every label once: values of a number by their size, rows in their order."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    return sorted(labels, key=lambda label: int(label[1:])) if all(map(_is_number, labels)) else labels


def _is_number(label: str) -> bool:
    """Whether it is a value of I, M or K."""
    return label[1:].isdecimal()


def _choose_style(label: str, position: int, numbers: int) -> dict[str, Any]:
    """A colour for each label; some lines are dashed, so that lines that coincide can be seen.

    Numbers go from dark to light, and their size decides whether they are dashed, so that all figures agree.
    """
    from matplotlib import colormaps

    if numbers:
        colour: Any = colormaps["viridis"](0.9 * position / max(1, numbers - 1))
        return {"color": colour, "linestyle": STYLES[(int(label[1:]).bit_length() - 1) % 2], "linewidth": 1.4}
    return {"color": COLOURS[position % (len(COLOURS) - 1)], "linestyle": STYLES[position % 2], "linewidth": 1.4}
