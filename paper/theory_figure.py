"""The figure of the theorems' rates, drawn from the record that `paper/theory.py` wrote.

    python -m paper.theory_figure                           # docs/figures/theory.png
    python -m paper.theory_figure --folder runs/theory

A row of pictures per method. Every solid line is a fit and says its slope; the dashed line beside it has the theorem's
slope and goes through the same centre, so that the angle between them is what the theorem does not explain.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.experiments.checkpoint import write_atomically
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
    costs,
    interval,
    line,
    markdown,
    read,
    slopes,
    speed_up,
)

MARKERS = "ov^s"
THEOREM: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.9, "alpha": 0.4}


def picture(found: Findings, trial: Trial) -> Any:
    """Rounds and local steps against the gap, and both against M at one gap: a row per method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(12, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(METHODS), 3, sharex="col", sharey="col")
    for row, name in zip(grid, METHODS, strict=True):
        judged = slopes(found, trial, name)
        _to_gap(row[0], found.main[name], "rounds", judged["rounds to ε"])
        _control(row[0], found.fixed[name][0], judged["rounds to ε, I fixed"])
        _to_gap(row[1], found.main[name], "steps", judged["local steps to ε"])
        _against_cohort(row[2], found.main[name], judged)
        row[0].set(ylabel="rounds", title=_title(name, "rounds", judged["rounds to ε"]))
        row[1].set(ylabel="local steps of one client", title=_title(name, "local steps", judged["local steps to ε"]))
        row[2].set(ylabel="local steps, rounds", title=f"{name}, cost of one ε against M")
        for axis in row[:2]:
            axis.legend(
                frameon=False, fontsize=8, loc="upper left", title="slope fitted to", title_fontsize=8, alignment="left"
            )
    _dress(grid)
    dashed = Line2D([], [], label="the theorem's slope (I fixed: -1), through the centre of the fit", **THEOREM)
    figure.legend(handles=[dashed], frameon=False, fontsize=9, loc="outside lower center")
    return figure


def draw(found: Findings, trial: Trial, path: Path) -> None:
    """The picture as a file."""
    picture(found, trial).savefig(buffer := io.BytesIO(), format="png", dpi=100)
    write_atomically(path, buffer.getvalue())


def _title(method: str, what: str, judged: Slope) -> str:
    return f"{method}, {what} to ε: slope {judged.measured:.2f}, theorem {judged.theorem:g}"


def _to_gap(axis: Any, curves: Sequence[Curve], cost: Cost, judged: Slope) -> None:
    """A cohort's dots and fit each."""
    looks = zip(COLOURS, MARKERS, COHORTS, curves, judged.alone, strict=False)
    for colour, marker, size, one, own in looks:
        _dots(axis, one, getattr(one, cost), color=colour, marker=marker)
        _fit(axis, one, cost, judged.theorem, label=f"M = {size}: {own:.2f}", color=colour, marker=marker)


def _control(axis: Any, found: Curve, judged: Slope) -> None:
    """The cohort whose visits do not grow, in its colour."""
    look = {"color": COLOURS[COHORTS.index(CONTROL)], "marker": "x"}
    _dots(axis, found, found.rounds, **look)
    label = f"M = {CONTROL}, I fixed: {judged.measured:.2f}"
    _fit(axis, found, "rounds", judged.theorem, label=label, **look)


def _dots(axis: Any, found: Curve, cost: np.ndarray, **look: Any) -> None:
    """The ends of stages, with 95 % bars on the log axis."""
    gap = found.gaps.mean(0)
    factor = np.exp(1.96 * found.gaps.std(0, ddof=1) / len(found.gaps) ** 0.5 / gap)
    bars = [gap - gap / factor, gap * factor - gap]
    axis.errorbar(gap, cost, xerr=bars, linestyle="", markersize=4, elinewidth=0.6, **look)


def _fit(axis: Any, found: Curve, cost: Cost, theorem: float, **look: Any) -> None:
    """The line that the slope comes from, and the theorem's."""
    rate, level = line(found, cost)
    ends = found.gaps.mean(0)[[0, -1]]
    _lines(axis, ends, np.exp((np.log(ends) - level) / rate), theorem, **look)


def _against_cohort(axis: Any, curves: Sequence[Curve], judged: dict[str, Slope]) -> None:
    """What one gap costs each cohort, in the cohort's colour."""
    sizes = np.array(COHORTS, dtype=float)
    rows: list[tuple[Cost, str]] = [("steps", "local steps"), ("rounds", "rounds")]
    for cost, what in rows:
        paid = costs(curves, cost)
        bars = np.abs(interval(partial(costs, cost=cost), curves) - paid)
        for place, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=False)):
            at = slice(place, place + 1)
            axis.errorbar(sizes[at], paid[at], yerr=bars[:, at], color=colour, marker=marker, markersize=4)
        one = judged[f"{what} against M"]
        shape = sizes ** speed_up(curves, cost)
        fitted = shape * np.exp(np.log(paid / shape).mean())
        label = f"{what}: slope {one.measured:.2f}, theorem {one.theorem:g}"
        _lines(axis, sizes, fitted, one.theorem, label=label, color="black")
        middle = np.exp(np.log([sizes, fitted]).mean(1))
        axis.annotate(label, middle, (-20, 14), textcoords="offset points", fontsize=8)


def _lines(axis: Any, along: np.ndarray, fitted: np.ndarray, theorem: float, **look: Any) -> None:
    """A fitted power law, and the theorem's through its middle."""
    # The legend shows the marker; the line itself must not, as its ends are no measurements.
    axis.plot(along, fitted, linewidth=1.1, markersize=4, markevery=[], **look)
    shape = along**theorem
    axis.plot(along, shape * np.exp(np.log(fitted / shape).mean()), **THEOREM)


def _dress(grid: np.ndarray) -> None:
    """Log axes, ε falling to the right, and whole numbers of clients."""
    for axis in grid.flat:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
        axis.tick_params(labelbottom=True)
    for axis in grid[:, :2].flat:
        axis.set_xlabel("ε: mean gap at the end of a stage")
    # Shared axes turn round together.
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
    found, trial = read(arguments.record)
    draw(found, trial, arguments.out)
    print("\n".join(markdown(found, trial)))


if __name__ == "__main__":
    main()
