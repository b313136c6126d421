"""The figures of a report as files, for papers and slides."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedauc.files import write_atomically
from fedauc.reports.figures import Bars, Cells, Figure, Intervals, Layer, Line, Points, Shares
from fedauc.reports.page_sections import build_sections, choose_detailed_runs
from fedauc.reports.plotly_figures import MAX_ROW_NAMES
from fedauc.reports.report_runs import ReportRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("pdf", "svg", "png")

COLOURS = {
    "series0": "#0072b2",
    "series1": "#c24a00",
    "series2": "#007a5a",
    "series3": "#a3478a",
    "series4": "#7d6200",
    "series5": "#c2185b",
    "series6": "#5b4db3",
    "series7": "#8a4b2a",
    "muted": "#6b7686",
    "empty": "#eceff3",
    "absent": "#14181f",
}
"""The colours of the page's light theme."""

DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}

PIXELS_PER_INCH = 90


def read_formats(text: str) -> list[str]:
    """The formats of a list such as `pdf,svg`.

    >>> read_formats("pdf, svg")
    ['pdf', 'svg']
    """
    formats = [item.strip() for item in text.split(",") if item.strip()]
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"format is {name!r}; it must be one of {', '.join(FORMATS)}")
    return formats


def write_figures(runs: Sequence[ReportRun], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write every figure of the page in every format; figures of single runs carry the run's number from 1."""
    several, written = len(choose_detailed_runs(runs)) > 1, []
    folder.mkdir(parents=True, exist_ok=True)
    for section in build_sections(runs):
        for block in section.blocks:
            for figure in block.figures:
                number = f"-run{block.run + 1}" if several and block.run is not None else ""
                for name in formats:
                    written.append(folder / f"{figure.key}{number}.{name}")
                    write_atomically(written[-1], render_figure(figure, name))
    return written


def render_figure(figure: Figure, file_format: str) -> bytes:
    """The bytes of a file; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    settings: Any = {"svg.hashsalt": "fedauc", "pdf.fonttype": 42, "font.size": 9, "axes.titlesize": 10}
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=(7.0 if figure.wide else 4.6, figure.height / PIXELS_PER_INCH), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots()
        for layer in figure.layers:
            _draw_layer(axes, layer)
        axes.set(title=figure.title, xlabel=figure.x.title, ylabel=figure.y.title)
        if figure.x.limits is not None:
            axes.set_xlim(*figure.x.limits)
        if figure.y.limits is not None:
            axes.set_ylim(*figure.y.limits)
        axes.spines[["top", "right"]].set_visible(False)
        if figure.x.logarithmic:
            axes.set_xscale("log")
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(frameon=False, fontsize=8)
        elif figure.legend:
            _add_legend(axes, figure)
        buffer = io.BytesIO()
        # Without a date, the same numbers give the same file.
        stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": None}[file_format]
        canvas.savefig(buffer, format=file_format, dpi=160, metadata=stamp)
    return buffer.getvalue()


def _draw_layer(axes: Axes, layer: Layer) -> None:
    if isinstance(layer, Line):
        color = COLOURS[layer.colour]
        if layer.low is not None and layer.high is not None:
            x = layer.x if layer.band_x is None else layer.band_x
            axes.fill_between(x, layer.low, layer.high, color=color, alpha=0.18, linewidth=0)
        marker = "o" if layer.markers else ""
        label = layer.name if layer.in_legend else "_"
        axes.plot(layer.x, layer.y, DASHES[layer.dash], color=color, marker=marker, markersize=3, label=label)
    elif isinstance(layer, Bars):
        widths = np.diff(layer.edges)
        axes.bar(
            layer.edges[:-1],
            layer.heights,
            widths,
            align="edge",
            color=COLOURS[layer.colour],
            alpha=0.6,
            label=layer.name,
        )
    elif isinstance(layer, Intervals):
        ends = np.nan_to_num(np.stack([layer.values - layer.low, layer.high - layer.values]))
        rows = np.arange(len(layer.rows))
        axes.errorbar(
            layer.values,
            rows,
            xerr=ends,
            fmt="o",
            markersize=4,
            capsize=2,
            color=COLOURS[layer.colour],
            label=layer.name,
        )
        axes.set_yticks(rows, layer.rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    elif isinstance(layer, Points):
        ends = np.stack([layer.y - layer.low, layer.high - layer.y]).clip(min=0)
        axes.errorbar(
            layer.x, layer.y, yerr=ends, fmt="o", markersize=4, capsize=2, color=COLOURS[layer.colour], label=layer.name
        )
    else:
        _draw_grid(axes, layer)


def _draw_grid(axes: Axes, grid: Cells | Shares) -> None:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    values = grid.codes if isinstance(grid, Cells) else grid.values
    extent = (grid.first_column - 0.5, grid.first_column + values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5)
    if isinstance(grid, Cells):
        colours = ListedColormap([COLOURS[name] for name in grid.colours])
        limits = (-0.5, len(grid.colours) - 0.5)
        axes.imshow(values, colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="none", extent=extent)
    else:
        shades = LinearSegmentedColormap.from_list("shares", [COLOURS["empty"], COLOURS["series0"]])
        image = axes.imshow(values, shades, vmin=0, aspect="auto", interpolation="none", extent=extent)
        axes.figure.colorbar(image, ax=axes, label=grid.meaning)
    few = len(grid.rows) <= MAX_ROW_NAMES
    axes.set_yticks(range(len(grid.rows)) if few else [], grid.rows if few else [])


def _add_legend(axes: Axes, figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[colour], label=name) for name, colour in figure.legend]
    axes.legend(handles=patches, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
