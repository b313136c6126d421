"""Follow a federated run while it goes on, and summarize it afterwards, from its folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedauc.federation import journal
from fedauc.federation.registration import CENSUS_FILE
from fedauc.federation.server import AGREEMENT_FILE, ATTENDANCE_FILE, count_attendance


def summarize_run(folder: Path) -> dict[str, Any]:
    """The status, rounds, records and attendance of a run, finished or not."""
    if not (folder / CENSUS_FILE).is_file():
        raise ValueError(f"{folder} is no federated run: it has no {CENSUS_FILE}; give the app's or the run's folder")
    attendance, stopped = journal.read(folder / ATTENDANCE_FILE), folder / "stopped.txt"
    is_done = (folder / "result.json").is_file()
    status = "done" if is_done else stopped.read_text().strip() if stopped.is_file() else "unfinished"
    names = [site["name"] for site in json.loads((folder / AGREEMENT_FILE).read_text())["sites"]]
    return {
        "status": status,
        "done": len(attendance),
        "rounds": json.loads((folder / CENSUS_FILE).read_text())["rounds"],
        "records": journal.read(folder / "records.jsonl"),
        "attendance": count_attendance(attendance, names),
    }


def print_progress(folder: Path, is_running: Callable[[], bool]) -> None:
    """Print a line per new round and per new evaluation until the run ends."""
    printed_rounds, printed_records = (len(lines) for lines in _read_lines(folder))
    while True:
        # Asked first, so that the lines of a run that ends meanwhile are still printed.
        goes_on = is_running()
        attendance, records = _read_lines(folder)
        for line in attendance[printed_rounds:]:
            total = json.loads((folder / CENSUS_FILE).read_text())["rounds"]
            missing = [f"{name} missing: {reason}" for name, reason in {**line["absent"], **line["refused"]}.items()]
            answered = ", ".join(line["answered"]) or "no site"
            print("; ".join([f"round {line['round'] + 1} of {total}: {answered}", *missing]), flush=True)
        for record in records[printed_records:]:
            print(describe_record(record), flush=True)
        printed_rounds, printed_records = len(attendance), len(records)
        if not goes_on:
            return
        time.sleep(0.5)


def describe_record(record: dict[str, Any]) -> str:
    """A record as one line of text."""
    if record["auc"] is None:
        return f"round {record['round'] + 1}: no AUC"
    bounds = f"between {record['auc_low']:.4f} and {record['auc_high']:.4f}"
    rows = f"{record['test_positives']} positives and {record['test_negatives']} negatives"
    return (
        f"round {record['round'] + 1}: AUC {record['auc']:.4f}, {bounds}, over {rows} at {record['test_sites']} sites"
    )


def _read_lines(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return journal.read(folder / ATTENDANCE_FILE), journal.read(folder / "records.jsonl")
