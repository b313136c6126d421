"""Runs that were made and recorded once, and whose records are no longer kept.

Settings were changed several times, and what an older setting had left behind was deleted. Those runs cost time and
taught something too, so the page of results counts them. `python -m paper.discarded_runs` counts them in the history of
the repository, in which records were one file per run, and writes `discarded_runs.json`: by dataset and method, the
runs, their cycles and their seconds. A run counts once, however often its file was rewritten under other names. Runs
that were never committed are not known.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COUNTS = Path(__file__).with_name("discarded_runs.json")

FORMER_FOLDER = "results/runs"
"""Where each run had a file of its own."""

DEFAULT_CYCLES = 30
"""The cycles of a run whose record leaves them out."""


class DiscardedRuns(NamedTuple):
    """The discarded runs of one method on one dataset."""

    dataset: str
    method: str
    runs: int
    cycles: int
    seconds: float


def read_discarded(path: Path = COUNTS) -> list[DiscardedRuns]:
    """The counts that are kept beside the records."""
    return [DiscardedRuns(**line) for line in json.loads(path.read_text())]


def count_discarded(records: Path) -> list[DiscardedRuns]:
    """Count the runs of the history that no record of the folder holds any more."""
    lines = [
        line for path in records.glob("*.jsonl") if "choices" not in path.name for line in path.read_text().splitlines()
    ]
    kept = {_identify(json.loads(line)) for line in lines}
    discarded = {_identify(run): run for run in _read_former_runs() if _identify(run) not in kept}
    totals: dict[tuple[str, str], list[float]] = {}
    for run in discarded.values():
        recipe = run["config"]["recipe"]
        total = totals.setdefault((run["config"]["data"]["name"], recipe["method"]), [0, 0, 0.0])
        for position, value in enumerate((1, recipe.get("cycles", DEFAULT_CYCLES), run["seconds"])):
            total[position] += value
    return [
        DiscardedRuns(dataset, method, int(runs), int(cycles), round(seconds))
        for (dataset, method), (runs, cycles, seconds) in sorted(totals.items())
    ]


def _identify(run: dict[str, Any]) -> str:
    """What two files of one run have in common, although the names of fields have changed over time."""
    recipe, data = run["config"]["recipe"], run["config"]["data"]["name"]
    # Runs that diverged at once have no curve; those that took the same time count as one, so the count is a bound.
    length = recipe.get("cycles", DEFAULT_CYCLES)
    return json.dumps([data, recipe["method"], length, run["stopped"], run["seconds"], run["curve"]])


def _read_former_runs() -> Iterator[dict[str, Any]]:
    """Every version of every run file that was ever committed."""
    raw = _git("log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", FORMER_FOLDER).decode()
    blobs = sorted({line.split()[3] for line in raw.splitlines() if line.startswith(":")} - {"0" * 40})
    content, start = _git("cat-file", "--batch", text="\n".join(blobs) + "\n"), 0
    while start < len(content):
        end = content.index(b"\n", start)
        size = int(content[start:end].split()[2])
        yield json.loads(content[end + 1 : end + 1 + size])
        start = end + 1 + size + 1


def _git(*words: str, text: str = "") -> bytes:
    command = ["git", "-C", str(COUNTS.parents[1]), *words]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


if __name__ == "__main__":
    counts = count_discarded(COUNTS.with_name("records"))
    COUNTS.write_text(json.dumps([line._asdict() for line in counts], indent=1) + "\n")
    print(f"wrote {COUNTS.name}: {sum(line.runs for line in counts)} runs")
