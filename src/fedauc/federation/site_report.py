"""A site's own report: the AUC of its held-out rows and what thresholds would mean there. Nothing of it leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.data.checks import MIN_ROWS_PER_CLASS
from fedauc.files import naming_path
from fedauc.metrics import auc
from fedauc.scoring.model_card import POINT_HEADERS, format_point
from fedauc.scoring.thresholds import list_operating_points

REPORT_FOLDER = "reports"


class SiteReport:
    """Writes one line per evaluation into the site's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_evaluation(self, run: str, round: int, labels: np.ndarray, scores: np.ndarray) -> None:
        """Add the AUC and the operating points of a round's model on the site's held-out rows."""
        positives = int((labels == 1).sum())
        negatives = len(labels) - positives
        has_auc = min(positives, negatives) > 0
        points = list_operating_points(labels, scores) if min(positives, negatives) >= MIN_ROWS_PER_CLASS else []
        line = {
            "round": round,
            "positives": positives,
            "negatives": negatives,
            "auc": auc(labels, scores) if has_auc else None,
            "points": [list(format_point(point)) for point in points],
        }
        path = self._folder / REPORT_FOLDER / f"{run}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming_path(path), path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def describe_report(folder: Path, run: str) -> list[str]:
    """The last evaluation of a run in words, with the history of the AUC."""
    path = folder / REPORT_FOLDER / f"{run}.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); remove the damaged line") from error
    if not lines:
        raise ValueError(f"{path} is empty: no model of this run has been evaluated here; wait for the next cycle")
    last = lines[-1]
    rows = f"{last['positives']} positives and {last['negatives']} negatives"
    text = [
        f"run {run}, after round {last['round'] + 1}: AUC {_format_auc(last)} on this site's held-out rows ({rows})"
    ]
    history = ", ".join(_format_auc(line) for line in lines[-10:])
    text.append(f"AUC of the last {min(10, len(lines))} evaluations: {history}")
    if last["points"]:
        text += _format_points(last["points"])
    return text


def _format_points(points: Sequence[Sequence[str]]) -> list[str]:
    """A table that fits 80 columns: a rate on one line, and its interval, `30.0 (27.4-32.8)`, on the next."""
    rows: list[Sequence[str]] = [POINT_HEADERS]
    for point in points:
        cells = [cell.split(" (", 1) for cell in point]
        rows.append([cell[0] for cell in cells])
        rows.append([f"({cell[1]}" if len(cell) == 2 else "" for cell in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def list_reports(folder: Path) -> list[str]:
    """The runs that have a report, the latest last."""
    paths = sorted((folder / REPORT_FOLDER).glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [path.stem for path in paths]


def _format_auc(line: dict[str, Any]) -> str:
    return "unknown" if line["auc"] is None else f"{line['auc']:.4f}"
