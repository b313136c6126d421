"""Learning curves as a picture."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedauc.experiments.folder import RunFolder
from fedauc.files import write_atomically
from fedauc.metrics import DEFAULT_METRICS, parse_metrics
from fedauc.reports.caveats import list_caveats, shorten_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's palette, which most colour-blind readers can distinguish."""

STYLES = ("-", "--", ":", "-.")


def write_curves(folders: Iterable[tuple[str, RunFolder]], path: Path) -> None:
    """The first metric on the test rows against rounds and against bytes, a line per run."""
    buffer = io.BytesIO()
    draw_curves(list(folders)).savefig(buffer, format="png", dpi=150)
    write_atomically(path, buffer.getvalue())


def draw_curves(folders: Sequence[tuple[str, RunFolder]]) -> Figure:
    """The curves; the title holds caveats on the data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    if title := "; ".join(map(shorten_note, list_caveats(folders))):
        figure.suptitle(title)
    line_styles: dict[str, dict[str, Any]] = {}
    metric = parse_metrics(folders[0][1].config.metrics if folders else DEFAULT_METRICS)[0]
    for method, folder in folders:
        records = folder.read_records()
        label = None if method in line_styles else method
        color, linestyle = COLOURS[len(line_styles) % len(COLOURS)], STYLES[len(line_styles) % len(STYLES)]
        line_style = line_styles.setdefault(method, {"color": color, "linestyle": linestyle, "linewidth": 1.8})
        values = [record[metric.columns[0]] for record in records]
        left.plot([record["rounds"] for record in records], values, label=label, **line_style)
        traffic = [(record["bytes_up"] + record["bytes_down"]) / 1e6 for record in records]
        right.plot(traffic, values, **line_style)
    left.set(xlabel="rounds", ylabel=f"test {metric.label}")
    right.set(xlabel="megabytes, up and down")
    right.set_xscale("log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, loc="lower right")
    return figure
