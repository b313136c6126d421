"""Where a run's time went, by what the time was spent on."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import NamedTuple

from rich.table import Column, Table

PARTS: dict[str, list[tuple[str, str]]] = {
    "draw rows": [("engines/draws.py", "draw_cohort")],
    "gather rows": [("engines/batched.py", "gather_rows"), ("engines/loop.py", "_draw_batches")],
    "local steps": [
        ("algorithms/", "step"),
        ("engines/compiled/engine.py", "_run_local_steps"),
        ("engines/cuda/engine.py", "run_local_steps"),
    ],
    "- forward": [(file, "forward_pass") for file in ("network.py", "engines/kernels.py", "engines/batched.py")],
    "- backward": [(file, "pullback") for file in ("network.py", "engines/kernels.py", "engines/batched.py")],
    "draw passive scores": [("algorithms/_pool.py", "draw_passive_scores")],
    "rebuild the pool": [("algorithms/_pool.py", "rebuild_pool")],
    "evaluate": [("experiments/evaluation.py", "measure_model")],
    "save": [("experiments/folder.py", "append_record"), ("experiments/run_loop.py", "save")],
    "check for divergence": [("guards.py", "check_round")],
}
"""Functions by file and name. Parts with a dash are inside the one above; the others do not contain each other."""


class Share(NamedTuple):
    """Seconds spent on something, and how often it was done."""

    part: str
    seconds: float
    calls: int


def profile_work(work: Callable[[], object]) -> list[Share]:
    """Do the work, and return where the time went. The profiler slows Python code down by up to a factor of two."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        work()
    finally:
        profiler.disable()
    stats = pstats.Stats(profiler)
    # `stats` maps (file, line, name) to (primitive calls, calls, own time, time with callees, callers).
    entries: dict[tuple[str, int, str], tuple[int, int, float, float, object]] = stats.stats  # type: ignore[attr-defined]
    shares = []
    for part, functions in PARTS.items():
        timings = [
            (calls, seconds)
            for (file, _, name), (_, calls, _, seconds, _) in entries.items()
            if any(f"fedauc/{path}" in file and name == function for path, function in functions)
        ]
        if timings:
            shares.append(Share(part, sum(seconds for _, seconds in timings), sum(calls for calls, _ in timings)))
    total: float = stats.total_tt  # type: ignore[attr-defined]
    listed = sum(share.seconds for share in shares if share.part[0] != "-")
    return [*shares, Share("everything else", total - listed, 1)]


def shares_table(shares: list[Share]) -> Table:
    """The shares as a table for a terminal."""
    total = sum(share.seconds for share in shares if share.part[0] != "-")
    numbers = [Column(header, justify="right") for header in ("seconds", "share", "calls")]
    table = Table("where the time went", *numbers, box=None, padding=(0, 1), pad_edge=False)
    for share in shares:
        table.add_row(share.part, f"{share.seconds:.2f}", f"{share.seconds / total:.0%}", str(share.calls))
    return table
