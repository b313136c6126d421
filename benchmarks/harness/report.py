"""The table on the screen and the JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.race import Outcome

Outcomes = Mapping[str, Sequence[Outcome]]
"""By workload."""


def make_rows(outcomes: Outcomes) -> list[dict[str, Any]]:
    """One entry per workload and contender that was measured; ratio = the contender's time over fedauc's."""
    rows = []
    for workload, lanes in outcomes.items():
        fedauc_lane = next((lane for lane in lanes if lane.contender == "fedauc" and lane.times), None)
        for lane in (lane for lane in lanes if lane.times):
            rows.append(
                {
                    "workload": workload,
                    "contender": lane.contender,
                    "ms_per_round": round(lane.best, 4),
                    "median_ms": round(lane.median, 4),
                    "ratio": None if fedauc_lane is None else _round_digits(lane.best / fedauc_lane.best),
                    "median_ratio": None if fedauc_lane is None else _round_digits(_paired_ratio(lane, fedauc_lane)),
                    "repetitions": len(lane.times),
                    "difference": lane.difference,
                    **lane.about,
                }
            )
    return rows


def list_failures(outcomes: Outcomes) -> list[dict[str, Any]]:
    """Who gave no number, and why."""
    return [
        {"workload": workload, "contender": lane.contender, "reason": lane.failed}
        for workload, lanes in outcomes.items()
        for lane in lanes
        if lane.failed
    ]


def list_versions(outcomes: Outcomes) -> dict[str, dict[str, str]]:
    """What each contender ran on."""
    return {lane.contender: lane.versions for lanes in outcomes.values() for lane in lanes if lane.versions}


def describe_hardware() -> dict[str, Any]:
    """The processor, the cores this process may use, and the memory."""
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def format_table(rows: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: milliseconds per round and how many times fedauc's they are."""
    lines = ["| workload | contender | ms a round | median | x fedauc | x median |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratios = [_format_number(row[name]) for name in ("ms_per_round", "median_ms", "ratio", "median_ratio")]
        lines.append(f"| {row['workload']} | {row['contender']} | {' | '.join(ratios)} |")
    lines += [f"| {row['workload']} | {row['contender']} | {row['reason']} | | | |" for row in failed]
    return "\n".join(lines)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(report, indent=2) + "\n")
    draft.replace(path)


def _paired_ratio(lane: Outcome, fedauc_lane: Outcome) -> float:
    """The median of the ratios within a repetition, where both met the same noise."""
    return median(time / base for time, base in zip(lane.times, fedauc_lane.times, strict=False))


def _round_digits(value: float) -> float:
    """Four digits, whatever the size."""
    return float(f"{value:.4g}")


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _first_line(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
