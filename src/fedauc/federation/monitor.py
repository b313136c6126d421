"""Follow a federated run while it goes on, and summarize it afterwards, from its folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedauc.experiments.folder import RunFolder
from fedauc.federation.registration import CENSUS_FILE
from fedauc.federation.server import AGREEMENT_FILE, ATTENDANCE_FILE, count_attendance


def summarize_run(path: Path) -> dict[str, Any]:
    """The status, rounds, records and attendance of a run, finished or not."""
    if not (path / CENSUS_FILE).is_file():
        raise ValueError(f"{path} is no federated run: it has no {CENSUS_FILE}; give the app's or the run's folder")
    folder, stopped = RunFolder(path), path / "stopped.txt"
    names = [site["name"] for site in json.loads((path / AGREEMENT_FILE).read_text())["sites"]]
    return {
        "status": "done" if folder.done else stopped.read_text().strip() if stopped.is_file() else "unfinished",
        "done": len(folder.read_lines(ATTENDANCE_FILE)),
        "rounds": json.loads((path / CENSUS_FILE).read_text())["rounds"],
        "records": folder.read_records(),
        "attendance": count_attendance(folder, names),
    }


def print_progress(path: Path, is_running: Callable[[], bool]) -> None:
    """Print a line per new round and per new evaluation until the run ends."""
    folder = RunFolder(path)
    printed_rounds, printed_records = len(folder.read_lines(ATTENDANCE_FILE)), len(folder.read_records())
    goes_on = True
    while goes_on:
        # Asked before reading, so that the last lines of a run that ends meanwhile are printed too.
        goes_on = is_running()
        attendance, records = folder.read_lines(ATTENDANCE_FILE), folder.read_records()
        for line in attendance[printed_rounds:]:
            total = json.loads((path / CENSUS_FILE).read_text())["rounds"]
            missing = [f"{name} missing: {reason}" for name, reason in {**line["absent"], **line["refused"]}.items()]
            answered = ", ".join(line["answered"]) or "no site"
            print("; ".join([f"round {line['round'] + 1} of {total}: {answered}", *missing]), flush=True)
        for record in records[printed_records:]:
            print(describe_record(record), flush=True)
        printed_rounds, printed_records = len(attendance), len(records)
        if goes_on:
            time.sleep(0.5)


def describe_record(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    if record["auc"] is None:
        return f"round {record['round'] + 1}: no AUC"
    bounds = f"between {record['auc_low']:.4f} and {record['auc_high']:.4f}"
    rows = f"{record['test_positives']} positives and {record['test_negatives']} negatives"
    auc = f"round {record['round'] + 1}: AUC {record['auc']:.4f}"
    return f"{auc}, {bounds}, over {rows} at {record['test_sites']} sites"
