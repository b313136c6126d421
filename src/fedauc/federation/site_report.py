"""A site's own report: the AUC of its held-out rows and what thresholds would mean there. Nothing of it leaves."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.data.checks import MIN_ROWS_PER_CLASS
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
        make_folder(path.parent)
        with append_durably(path) as file:
            # A line that a crash or a full disk has cut off stays apart from this one.
            start = "\n" if _is_torn(path) else ""
            file.write(f"{start}{json.dumps(line)}\n".encode())


def describe_report(folder: Path, run: str) -> list[str]:
    """The last evaluation of a run in words, with the history of the AUC."""
    lines = _read_lines(folder / REPORT_FOLDER / f"{run}.jsonl")
    if not lines:
        return [f"run {run}: no evaluation is complete"]
    last = lines[-1]
    rows = f"{last['positives']} positives and {last['negatives']} negatives"
    text = [
        f"run {run}, after round {last['round'] + 1}: AUC {_format_auc(last)} on this site's held-out rows ({rows})"
    ]
    history = ", ".join(_format_auc(line) for line in lines[-10:])
    text.append(f"AUC of the last {min(10, len(lines))} evaluations: {history}")
    if last["points"]:
        widths = [
            max(len(row[index]) for row in [POINT_HEADERS, *last["points"]]) for index in range(len(POINT_HEADERS))
        ]
        for row in [POINT_HEADERS, *last["points"]]:
            text.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return text


def list_reports(folder: Path) -> list[str]:
    """The runs that have a report, the latest last."""
    paths = sorted((folder / REPORT_FOLDER).glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [path.stem for path in paths]


def _is_torn(path: Path) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    return bool(content) and not content.endswith(b"\n")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a report."""
    lines = list[dict[str, Any]]()
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _format_auc(line: dict[str, Any]) -> str:
    return "unknown" if line["auc"] is None else f"{line['auc']:.4f}"
