"""A federated run from outside, while it goes on and afterwards: from its folder alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedauc.federation import journal
from fedauc.federation.server import ATTENDANCE


def summarize_run(run: Path) -> dict[str, Any]:
    """A run's folder in a few numbers, whether it is over or not."""
    if not (run / "gathered.json").is_file():
        raise ValueError(f"{run} is no federated run: it has no gathered.json; give the app's or the run's folder")
    lines, stopped = journal.read(run / ATTENDANCE), run / "stopped.txt"
    done = (run / "result.json").is_file()
    status = "done" if done else stopped.read_text().strip() if stopped.is_file() else "unfinished"
    words = ("came", "away", "refused")
    sites = [site["name"] for site in json.loads((run / "federation.json").read_text())["sites"]]
    return {
        "status": status,
        "done": len(lines),
        "rounds": json.loads((run / "gathered.json").read_text())["rounds"],
        "records": journal.read(run / "records.jsonl"),
        "attendance": {name: {word: sum(name in line[word] for line in lines) for word in words} for name in sites},
    }


def print_progress(run: Path, alive: Callable[[], bool]) -> None:
    """A line per round and per evaluation, as they come."""
    rounds, records, _ = _lines(run)
    while True:
        going = alive()
        attended, evaluated, total = _lines(run)
        for line in attended[len(rounds) :]:
            missing = {**line["away"], **line["refused"]}
            tail = "; " + ", ".join(f"{name} missing: {why}" for name, why in missing.items()) if missing else ""
            print(f"round {line['round'] + 1} of {total}: {', '.join(line['came']) or 'nobody'}{tail}", flush=True)
        for line in evaluated[len(records) :]:
            print(describe_record(line), flush=True)
        rounds, records = attended, evaluated
        if not going:
            return
        time.sleep(0.5)


def _lines(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    gathered = run / "gathered.json"
    total = json.loads(gathered.read_text())["rounds"] if gathered.is_file() else 0
    return journal.read(run / ATTENDANCE), journal.read(run / "records.jsonl"), total


def describe_record(line: dict[str, Any]) -> str:
    """A record in words."""
    if line["auc"] is None:
        return f"round {line['round'] + 1}: no AUC"
    bounds = f"between {line['auc_low']:.4f} and {line['auc_high']:.4f}"
    rows = f"{line['test_positives']} positives and {line['test_negatives']} negatives at {line['test_sites']} sites"
    return f"round {line['round'] + 1}: AUC {line['auc']:.4f}, {bounds}, over {rows}"
