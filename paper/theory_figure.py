"""The figure of the theorems' rates, drawn from the record that `paper/theory.py` wrote.

    python -m paper.theory_figure                           # docs/figures/theory.png
    python -m paper.theory_figure --record runs/theory/theory.json --out runs/theory/theory.png

There is a row of panels per method. Every solid line is a fit with its slope in the legend. The dashed line has the
theorem's slope and the same centre, so that the angle between them shows the difference.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.files import write_atomically
from fedauc.reports.curves import COLOURS
from paper.theory import (
    COHORTS,
    CONTROL,
    METHODS,
    Cost,
    Curve,
    Findings,
    Slope,
    Trial,
    bootstrap_interval,
    compare_slopes,
    costs_to_gap,
    fit_line,
    markdown_table,
    read_record,
    speed_up,
)

MARKERS = "ov^s"
THEOREM: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.9, "alpha": 0.4}


def plot_rates(findings: Findings, trial: Trial) -> Any:
    """Rounds and local steps against the gap, and both against M at one gap: a row per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(12, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(METHODS), 3, sharex="col", sharey="col")
    for row, name in zip(grid, METHODS, strict=True):
        slopes = compare_slopes(findings, trial, name)
        _plot_cost_to_gap(row[0], findings.main[name], "rounds", slopes["rounds to ε"])
        _plot_control(row[0], findings.fixed[name][0], slopes["rounds to ε, I fixed"])
        _plot_cost_to_gap(row[1], findings.main[name], "steps", slopes["local steps to ε"])
        _plot_against_cohort(row[2], findings.main[name], slopes)
        row[0].set(ylabel="rounds", title=_panel_title(name, "rounds", slopes["rounds to ε"]))
        row[1].set(
            ylabel="local steps of one client", title=_panel_title(name, "local steps", slopes["local steps to ε"])
        )
        row[2].set(ylabel="local steps, rounds", title=f"{name}, cost of one ε against M")
        for axis in row[:2]:
            axis.legend(
                frameon=False, fontsize=8, loc="upper left", title="slope fitted to", title_fontsize=8, alignment="left"
            )
    _label_axes(grid)
    dashed = Line2D([], [], label="the theorem's slope (I fixed: -1), through the centre of the fit", **THEOREM)
    figure.legend(handles=[dashed], frameon=False, fontsize=9, loc="outside lower center")
    return figure


def save_figure(findings: Findings, trial: Trial, path: Path) -> None:
    """Write the figure to a file."""
    plot_rates(findings, trial).savefig(buffer := io.BytesIO(), format="png", dpi=100)
    write_atomically(path, buffer.getvalue())


def _panel_title(method: str, what: str, slope: Slope) -> str:
    return f"{method}, {what} to ε: slope {slope.measured:.2f}, theorem {slope.theorem:g}"


def _plot_cost_to_gap(axis: Any, curves: Sequence[Curve], cost: Cost, slope: Slope) -> None:
    """The points and the fit of each cohort."""
    looks = zip(COLOURS, MARKERS, COHORTS, curves, slope.per_cohort, strict=False)
    for colour, marker, size, curve, fitted in looks:
        _plot_points(axis, curve, getattr(curve, cost), color=colour, marker=marker)
        _plot_fit(axis, curve, cost, slope.theorem, label=f"M = {size}: {fitted:.2f}", color=colour, marker=marker)


def _plot_control(axis: Any, curve: Curve, slope: Slope) -> None:
    """The control, whose visits do not become longer, in the colour of its cohort."""
    look = {"color": COLOURS[COHORTS.index(CONTROL)], "marker": "x"}
    _plot_points(axis, curve, curve.rounds, **look)
    label = f"M = {CONTROL}, I fixed: {slope.measured:.2f}"
    _plot_fit(axis, curve, "rounds", slope.theorem, label=label, **look)


def _plot_points(axis: Any, curve: Curve, cost: np.ndarray, **look: Any) -> None:
    """The ends of stages, with 95 % bars on the log axis."""
    gap = curve.gaps.mean(0)
    factor = np.exp(1.96 * curve.gaps.std(0, ddof=1) / len(curve.gaps) ** 0.5 / gap)
    bars = [gap - gap / factor, gap * factor - gap]
    axis.errorbar(gap, cost, xerr=bars, linestyle="", markersize=4, elinewidth=0.6, **look)


def _plot_fit(axis: Any, curve: Curve, cost: Cost, theorem: float, **look: Any) -> None:
    """The fitted line, and one with the theorem's slope."""
    rate, level = fit_line(curve, cost)
    ends = curve.gaps.mean(0)[[0, -1]]
    _plot_lines(axis, ends, np.exp((np.log(ends) - level) / rate), theorem, **look)


def _plot_against_cohort(axis: Any, curves: Sequence[Curve], slopes: dict[str, Slope]) -> None:
    """The cost of the common gap for each cohort."""
    sizes = np.array(COHORTS, dtype=float)
    rows: list[tuple[Cost, str]] = [("steps", "local steps"), ("rounds", "rounds")]
    for cost, what in rows:
        paid = costs_to_gap(curves, cost)
        bars = np.abs(bootstrap_interval(partial(costs_to_gap, cost=cost), curves) - paid)
        for position, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=False)):
            at = slice(position, position + 1)
            axis.errorbar(sizes[at], paid[at], yerr=bars[:, at], color=colour, marker=marker, markersize=4)
        slope = slopes[f"{what} against M"]
        shape = sizes ** speed_up(curves, cost)
        fitted = shape * np.exp(np.log(paid / shape).mean())
        label = f"{what}: slope {slope.measured:.2f}, theorem {slope.theorem:g}"
        _plot_lines(axis, sizes, fitted, slope.theorem, label=label, color="black")
        middle = np.exp(np.log([sizes, fitted]).mean(1))
        axis.annotate(label, middle, (-20, 14), textcoords="offset points", fontsize=8)


def _plot_lines(axis: Any, along: np.ndarray, fitted: np.ndarray, theorem: float, **look: Any) -> None:
    """A fitted power law, and the theorem's through its centre."""
    # Only the legend shows the marker, because the ends of the line are not measurements.
    axis.plot(along, fitted, linewidth=1.1, markersize=4, markevery=[], **look)
    shape = along**theorem
    axis.plot(along, shape * np.exp(np.log(fitted / shape).mean()), **THEOREM)


def _label_axes(grid: np.ndarray) -> None:
    """Log axes with ε decreasing to the right, and whole numbers of clients."""
    for axis in grid.flat:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
        axis.tick_params(labelbottom=True)
    for axis in grid[:, :2].flat:
        axis.set_xlabel("ε: mean gap at the end of a stage")
    # Inverting one of the shared axes inverts all of them.
    for axis in grid[0, :2]:
        axis.invert_xaxis()
    for axis in grid[:, 2]:
        axis.set_xlabel("M, clients a round")
        axis.set_xticks(COHORTS, labels=[str(size) for size in COHORTS])
        axis.set_xticks([], minor=True)


def main() -> None:
    """Draw the figure of a record and print its slopes."""
    parser = argparse.ArgumentParser(description="The figure of the PL theorems' rates.")
    parser.add_argument("--record", type=Path, default=Path("paper/records/theory.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures/theory.png"))
    arguments = parser.parse_args()
    findings, trial = read_record(arguments.record)
    save_figure(findings, trial, arguments.out)
    print("\n".join(markdown_table(findings, trial)))


if __name__ == "__main__":
    main()
