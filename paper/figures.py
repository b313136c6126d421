"""Figures from tables: learning curves, and differences between methods with their confidence intervals."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedauc.files import write_atomically
from fedauc.reports.curves import COLOURS, STYLES
from paper.findings import Comparison
from paper.records import Point
from paper.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_PER_ROW = 2

LOG_SCALE_RATIO = 4
"""Where runs are this many times longer than others, a linear axis would leave the short ones no room."""

OUTLIER_QUARTILES = 3
"""A point this many interquartile ranges below a curve's lower quartile is a single collapse."""

LEGEND_LINE = 0.23
"""The height of a line of a legend, in inches."""

OUTSIDE = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
"""A legend beside an axis."""


Curves = Mapping[str, Sequence[Point]]
"""Learning curves by label."""


def collect_panels(table: Table) -> dict[str, Curves]:
    """By title, a panel per column of a table; a figure has one per dataset and row, with a curve per column."""
    spec, panels = table.spec, dict[str, Curves]()
    if spec.kind != "figure":
        for column in spec.columns:
            panels[column.name] = {row.name: table.cells[row.name, column.name].curve for row in spec.rows}
        return {title: curves for title, curves in panels.items() if any(curves.values())}
    for dataset in dict.fromkeys(column.dataset for column in spec.columns):
        columns = [column.name for column in spec.columns if column.dataset == dataset]
        for row in spec.rows:
            curves = {name.removeprefix(f"{dataset}-"): table.cells[row.name, name].curve for name in columns}
            # A single curve says nothing about what is varied.
            if sum(map(bool, curves.values())) > 1:
                panels[f"{row.name}, {dataset}"] = curves
    return panels


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def draw_curves(panels: Mapping[str, Curves]) -> Figure:
    """Panels in rows of two. Each row has a legend where values of a number are varied; otherwise the first has one."""
    rows = math.ceil(len(panels) / PANELS_PER_ROW)
    styles = choose_styles(panels.values())
    # A legend of many rows is taller than a panel.
    figure = _make_figure(max(3.4 * rows, 0.4 + LEGEND_LINE * len(styles)))
    axes = figure.subplots(rows, PANELS_PER_ROW, squeeze=False)
    lines_by_row: list[dict[str, Any]] = [{} for _ in range(rows)]
    for position, (axis, title) in enumerate(zip_longest(axes.flat, panels)):
        if title is None:
            axis.set_visible(False)
        else:
            axis.set_title(title)
            lines_by_row[position // PANELS_PER_ROW] |= _draw_panel(panels[title], axis, styles)
    if not all(map(_is_number, styles)):
        lines_by_row = [{label: line for lines in lines_by_row for label, line in lines.items()}]
    for row, lines in enumerate(lines_by_row):
        last = min(PANELS_PER_ROW, len(panels) - row * PANELS_PER_ROW) - 1
        labels = [label for label in styles if label in lines]
        axes[row][last].legend([lines[label] for label in labels], labels, **OUTSIDE)
    return figure


def draw_differences(comparisons: Sequence[Comparison]) -> Figure:
    """A panel per column: each method minus each baseline, with 95 % intervals; the paper's differences are hollow."""
    columns = list(dict.fromkeys(comparison.column.name for comparison in comparisons))
    methods = list(dict.fromkeys(comparison.method for comparison in comparisons))
    baselines = list(dict.fromkeys(comparison.baseline for comparison in comparisons))
    figure = _make_figure(0.8 + 0.3 * len(baselines))
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, column in zip(axes, columns, strict=True):
        axis.axvline(0, color="grey", linewidth=0.8)
        for comparison in [comparison for comparison in comparisons if comparison.column.name == column]:
            number = methods.index(comparison.method)
            height = baselines.index(comparison.baseline) + 0.3 * (number - (len(methods) - 1) / 2)
            error = comparison.test.half_width if comparison.test else 0.0
            dot = {"markersize": 4, "color": COLOURS[number]}
            axis.errorbar(comparison.value, height, xerr=error, fmt="o", capsize=2, **dot)
            if comparison.published is not None:
                axis.plot(comparison.published, height, "o", markerfacecolor="none", **dot)
        axis.set(title=column, xlabel="difference in test AUC to the baseline")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    axes[0].set_yticks(range(len(baselines)), baselines)
    axes[0].invert_yaxis()
    for number, method in enumerate(methods):
        axes[-1].plot([], [], "o", color=COLOURS[number], label=method)
    axes[-1].plot([], [], "o", color="grey", markerfacecolor="none", label="the paper's")
    axes[-1].legend(**OUTSIDE)
    return figure


def _make_figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_panel(curves: Curves, axis: Any, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw the curves that have points; return the lines by label."""
    axis.set(xlabel="rounds", ylabel="test AUC")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    curves = {label: curve for label, curve in curves.items() if curve}
    lines, shown = {}, []
    for label, curve in curves.items():
        aucs = np.array([point.auc for point in curve])
        (lines[label],) = axis.plot([point.rounds for point in curve], aucs, linewidth=1.4, **styles[label])
        # The axis shows the AUCs after a tenth of the rounds, without single collapses, which would leave no room.
        settled = aucs[len(aucs) // 10 :]
        low, high = np.quantile(settled, [0.25, 0.75])
        shown.append(settled[settled >= low - OUTLIER_QUARTILES * (high - low)])
    lengths = [curve[-1].rounds for curve in curves.values()]
    if max(lengths) > LOG_SCALE_RATIO * min(lengths):
        axis.set_xscale("log")
    visible = np.concatenate(shown)
    margin = 0.05 * np.ptp(visible) + 1e-4
    axis.set_ylim(float(visible.min() - margin), float(visible.max() + margin))
    return lines


def choose_styles(panels: Iterable[Curves]) -> dict[str, dict[str, Any]]:
    """A colour for each label; some lines are dashed or dotted, so that lines that coincide can be seen.

    Values of a number are in their order and go from dark to light, and their size decides whether they are dashed, so
    that all figures agree.
    """
    from matplotlib import colormaps

    labels = list(dict.fromkeys(label for curves in panels for label in curves))
    if not all(map(_is_number, labels)):
        colours = len(COLOURS) - 1
        return {
            label: {
                "color": COLOURS[position % colours],
                "linestyle": STYLES[position % 2] if position < 2 * colours else ":",
            }
            for position, label in enumerate(labels)
        }
    styles: dict[str, dict[str, Any]] = {}
    for position, label in enumerate(sorted(labels, key=lambda label: int(label[1:]))):
        colour = colormaps["viridis"](0.9 * position / max(1, len(labels) - 1))
        styles[label] = {"color": colour, "linestyle": STYLES[(int(label[1:]).bit_length() - 1) % 2]}
    return styles


def _is_number(label: str) -> bool:
    """Whether it is a value of I, M or K."""
    return label[1:].isdecimal()
