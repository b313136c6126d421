"""A site's own report: the AUC of its held-out rows and what thresholds would mean there. Nothing of it leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.data.checks import MIN_ROWS_PER_CLASS
from fedauc.federation.delivery import MODEL_FOLDER, read_delivered_round
from fedauc.files import append_durably, make_folder
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
        make_folder(path.parent, 0o700)
        with append_durably(path, is_private=True) as file:
            # A line that a crash or a full disk has cut off stays apart from this one.
            start = "\n" if _is_torn(path) else ""
            file.write(f"{start}{json.dumps(line)}\n".encode())


def describe_report(folder: Path, run: str) -> list[str]:
    """The evaluation of the delivered model in words, or else the last one of the run, with the history of the AUC."""
    lines, damaged = _read_lines(folder / REPORT_FOLDER / f"{run}.jsonl")
    if not lines:
        return [f"run {run}: no evaluation is complete"]
    delivered = read_delivered_round(folder / MODEL_FOLDER / run)
    last = next((line for line in lines if line["round"] == delivered), lines[-1])
    rows = f"{last['positives']} positives and {last['negatives']} negatives"
    whose = "the delivered model, of" if last["round"] == delivered else "after"
    text = [
        f"run {run}, {whose} round {last['round'] + 1}: AUC {_format_auc(last)} on this site's held-out rows ({rows})"
    ]
    history = ", ".join(_format_auc(line) for line in lines[-10:])
    text.append(f"AUC of the last {min(10, len(lines))} evaluations: {history}")
    if damaged:
        text.append(f"lines of the report that are damaged and left out: {damaged}")
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


def _is_torn(path: Path) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    return bool(content) and not content.endswith(b"\n")


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a report, and how many lines a crash or a damaged disk has left incomplete."""
    lines, damaged = list[dict[str, Any]](), 0
    for line in filter(None, path.read_text().splitlines()):
        try:
            lines.append(json.loads(line))
        except ValueError:
            damaged += 1
    return lines, damaged


def _format_auc(line: dict[str, Any]) -> str:
    return "unknown" if line["auc"] is None else f"{line['auc']:.4f}"
