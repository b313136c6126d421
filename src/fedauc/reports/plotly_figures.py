"""Figures as plotly.js specifications. Colours stay names, which begin with @ and which the page replaces."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedauc.reports.figures import Axis, Bars, Cells, Figure, Intervals, Layer, Line, Points, Shares, round_numbers

MAX_ROW_NAMES = 60
"""Names of more rows than this would overlap beside a grid."""


def to_plotly(figure: Figure) -> dict[str, Any]:
    """The traces and the layout of a figure."""
    traces = [trace for layer in figure.layers for trace in _draw_layer(layer)]
    layout: dict[str, Any] = {
        "height": figure.height,
        "xaxis": _draw_axis(figure.x),
        "yaxis": _draw_axis(figure.y),
        "showlegend": not figure.legend and sum(bool(trace.get("showlegend")) for trace in traces) > 1,
        "barmode": "overlay",
    }
    for layer in figure.layers:
        if isinstance(layer, Intervals | Cells | Shares):
            layout["yaxis"] |= {"autorange": "reversed", "automargin": True, "showgrid": False, "zeroline": False}
            layout["yaxis"]["tickvals"] = list(range(len(layer.rows))) if len(layer.rows) <= MAX_ROW_NAMES else []
            layout["yaxis"]["ticktext"] = list(layer.rows) if len(layer.rows) <= MAX_ROW_NAMES else []
            if isinstance(layer, Intervals):
                layout["yaxis"] |= {"range": [len(layer.rows) - 0.5, -0.5], "autorange": False}
            else:
                layout["xaxis"] |= {"showgrid": False, "zeroline": False}
    return {"data": traces, "layout": layout}


def _draw_axis(axis: Axis) -> dict[str, Any]:
    drawn: dict[str, Any] = {"title": {"text": axis.title}, "type": "log" if axis.logarithmic else "linear"}
    if axis.limits is not None:
        drawn["range"] = list(axis.limits)
    return drawn


def _draw_layer(layer: Layer) -> list[dict[str, Any]]:
    if isinstance(layer, Line):
        return _draw_line(layer)
    if isinstance(layer, Bars):
        return [_draw_bars(layer)]
    if isinstance(layer, Intervals):
        return [_draw_intervals(layer)]
    if isinstance(layer, Points):
        return [_draw_points(layer)]
    return [_draw_cells(layer) if isinstance(layer, Cells) else _draw_shares(layer)]


def _draw_line(line: Line) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    if line.low is not None and line.high is not None:
        x = line.x if line.band_x is None else line.band_x
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": round_numbers(np.concatenate([x, x[::-1]])),
                "y": round_numbers(np.concatenate([line.low, line.high[::-1]])),
                "fill": "toself",
                "fillcolor": f"@band:{line.colour}",
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
                "legendgroup": line.name,
            }
        )
    traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers" if line.markers else "lines",
            "x": round_numbers(line.x),
            "y": round_numbers(line.y),
            "name": line.name,
            "line": {"color": f"@{line.colour}", "dash": line.dash, "width": 2},
            "marker": {"size": 5, "color": f"@{line.colour}"},
            "showlegend": line.in_legend,
            "legendgroup": line.name,
        }
    )
    return traces


def _draw_bars(bars: Bars) -> dict[str, Any]:
    centers = (bars.edges[1:] + bars.edges[:-1]) / 2
    return {
        "type": "bar",
        "x": round_numbers(centers),
        "y": round_numbers(bars.heights),
        "width": float(bars.edges[1] - bars.edges[0]),
        "name": bars.name,
        "marker": {"color": f"@{bars.colour}", "opacity": 0.65, "line": {"width": 0}},
        "showlegend": True,
    }


def _draw_intervals(intervals: Intervals) -> dict[str, Any]:
    above, below = intervals.high - intervals.values, intervals.values - intervals.low
    return {
        "type": "scatter",
        "mode": "markers",
        "x": round_numbers(intervals.values),
        "y": list(range(len(intervals.rows))),
        "text": list(intervals.rows),
        "hovertemplate": "%{text}: %{x:.4f}<extra></extra>",
        "name": intervals.name,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [value or 0 for value in round_numbers(above)],
            "arrayminus": [value or 0 for value in round_numbers(below)],
            "color": f"@{intervals.colour}",
            "thickness": 1.6,
            "width": 4,
        },
        "marker": {"size": 8, "color": f"@{intervals.colour}"},
        "showlegend": True,
    }


def _draw_points(points: Points) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": round_numbers(points.x),
        "y": round_numbers(points.y),
        "name": points.name,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": round_numbers(points.high - points.y),
            "arrayminus": round_numbers(points.y - points.low),
            "color": f"@{points.colour}",
            "thickness": 1.6,
            "width": 4,
        },
        "marker": {"size": 8, "color": f"@{points.colour}", "symbol": points.symbol},
        "showlegend": True,
    }


def _draw_cells(cells: Cells) -> dict[str, Any]:
    last = len(cells.colours) - 1
    scale: list[list[Any]] = []
    for code, colour in enumerate(cells.colours):
        # Two equal ends make a step of one colour per code.
        scale += [[code / (last + 1), f"@{colour}"], [(code + 1) / (last + 1), f"@{colour}"]]
    return {
        "type": "heatmap",
        "z": cells.codes.tolist(),
        "x0": cells.first_column,
        "dx": 1,
        "text": [[cells.meanings[code] for code in row] for row in cells.codes.tolist()],
        "customdata": [[name] * cells.codes.shape[1] for name in cells.rows],
        "hovertemplate": "%{customdata}, round %{x}<br>%{text}<extra></extra>",
        "colorscale": scale,
        "zmin": -0.5,
        "zmax": last + 0.5,
        "showscale": False,
        "xgap": 1 if cells.codes.shape[1] <= 120 else 0,
        "ygap": 1 if cells.codes.shape[0] <= 80 else 0,
        "showlegend": False,
    }


def _draw_shares(shares: Shares) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "z": round_numbers(shares.values),
        "x0": shares.first_column,
        "dx": 1,
        "customdata": [[name] * shares.values.shape[1] for name in shares.rows],
        "hovertemplate": "%{customdata}, round %{x}: %{z:.1%}<extra></extra>",
        "colorscale": [[0, "@empty"], [1, "@series0"]],
        "zmin": 0,
        "colorbar": {"title": {"text": "share"}, "tickformat": ".0%", "thickness": 12},
        "showlegend": False,
    }
