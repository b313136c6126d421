"""How far runs are, in a terminal, while another process trains them. Only their folders are read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedauc.experiments.comparison import Comparison
from fedauc.federation.server import AGREEMENT_FILE
from fedauc.files import is_process_alive
from fedauc.reports.progress import shorten_name
from fedauc.reports.report_runs import ReportRun, read_report_runs
from fedauc.reports.sentences import format_seconds
from fedauc.reports.tables import format_bytes

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 24
"""Values of a sparkline."""

BUSY_SECONDS = 60
"""A folder that was written to within so many seconds is being trained, wherever its process is."""


class WatchedRun(NamedTuple):
    """How far a run is: `values` are those of the first metric so far, `left` the seconds that it still needs."""

    name: str
    phase: str
    is_over: bool
    rounds: int
    total: int | None
    label: str
    values: list[float]
    left: float | None
    bytes_up: int
    bytes_down: int
    epsilon: float | None = None


def watch_folder(path: Path, interval: float = 1.0, console: Console | None = None) -> None:
    """Show a folder's runs until all are over; a redirected output gets a line per change."""
    console = console or Console()
    if not console.is_terminal:
        _print_changes(path, interval, console)
        return
    with Live(Text(f"waiting for {path}"), console=console, refresh_per_second=4) as live:
        while True:
            runs = read_watched(path)
            live.update(render_watched(path, runs, console.width), refresh=True)
            if runs and all(run.is_over for run in runs):
                return
            time.sleep(interval)


def read_watched(path: Path, now: float | None = None) -> list[WatchedRun]:
    """The runs of a folder, in order; none as long as the folder is not there."""
    known = _list_names(path)
    if known is None:
        return []
    started = {run.folder.path: run for run in _read_started(path)}
    now = time.time() if now is None else now
    watched = [_watch_run(run, now) for run in started.values()]
    waiting = [name for name, folder in known.items() if folder not in started]
    return watched + [WatchedRun(name, "waiting", False, 0, None, "AUC", [], None, 0, 0) for name in waiting]


def draw_sparkline(values: list[float], width: int = SPARKS) -> str:
    """The last values as blocks between their lowest and highest.

    >>> draw_sparkline([0.5, 0.75, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = high - low or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((value - low) / span * len(BLOCKS)))] for value in shown)


def render_watched(path: Path, runs: list[WatchedRun], width: int) -> RenderableType:
    """One run as a list of facts, several as a table."""
    if not runs:
        return Text(f"waiting for {path}")
    if len(runs) == 1:
        return _render_run(runs[0])
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in ("run", "phase", "rounds", runs[0].label, "", "left", "traffic"):
        table.add_column(header, no_wrap=True, justify="right" if header in ("rounds", "left", "traffic") else "left")
    room = max(12, width - 62)
    for run in runs:
        rounds = f"{run.rounds}/{run.total}" if run.total else str(run.rounds)
        table.add_row(
            shorten_name(run.name, room),
            run.phase.split(",")[0].split(":")[0],
            rounds,
            f"{run.values[-1]:.4f}" if run.values else "",
            draw_sparkline(run.values, 10),
            "" if run.left is None else format_seconds(run.left),
            format_bytes(run.bytes_up + run.bytes_down) if run.values else "",
        )
    over = sum(run.is_over for run in runs)
    return Group(table, Text(f"{over} of {len(runs)} runs are over", style="dim"))


def _render_run(run: WatchedRun) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_row(Text("run", style="bold"), run.name)
    facts.add_row(Text("phase", style="bold"), run.phase)
    if run.total:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=run.total, completed=run.rounds, width=30), f"{run.rounds} of {run.total}")
        facts.add_row(Text("rounds", style="bold"), bar)
    else:
        facts.add_row(Text("rounds", style="bold"), str(run.rounds))
    if run.values:
        best = f"best {max(run.values):.4f}"
        facts.add_row(Text(run.label, style="bold"), f"{run.values[-1]:.4f}  {draw_sparkline(run.values)}  {best}")
    if run.epsilon is not None:
        facts.add_row(Text("epsilon", style="bold"), f"{run.epsilon:.4g} spent")
    if run.left is not None:
        facts.add_row(Text("left", style="bold"), f"about {format_seconds(run.left)}")
    traffic = f"{format_bytes(run.bytes_up)} up, {format_bytes(run.bytes_down)} down"
    facts.add_row(Text("traffic", style="bold"), traffic)
    return facts


def _print_changes(path: Path, interval: float, console: Console) -> None:
    printed: dict[str, tuple[int, str]] = {}
    while True:
        runs = read_watched(path)
        for run in runs:
            if printed.get(run.name) != (run.rounds, run.phase):
                printed[run.name] = (run.rounds, run.phase)
                total = f" of {run.total}" if run.total else ""
                value = f", {run.label} {run.values[-1]:.4f}" if run.values else ""
                value += "" if run.epsilon is None else f", epsilon {run.epsilon:.4g}"
                line = f"{run.name}: {run.phase}, {run.rounds}{total} rounds{value}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        if runs and all(run.is_over for run in runs):
            return
        time.sleep(interval)


def _list_names(path: Path) -> dict[str, Path] | None:
    """The names of a folder's runs and where they will be; None as long as the folder is not complete."""
    if Comparison.is_comparison(path):
        return {name.replace("/", " "): path / name for name in Comparison(path).list_names()}
    for folder in (path, path / "run"):
        if (folder / AGREEMENT_FILE).is_file() or (folder == path and (path / "config.json").is_file()):
            return {path.name: folder}
    # The app's folder of a federation is there before its first run.
    if path.is_dir() and any(path.iterdir()) and not (path / "fedauc_app").is_dir():
        raise ValueError(f"{path} is not a run folder; give a folder that run, compare, sweep or a federation made")
    return None


def _read_started(path: Path) -> list[ReportRun]:
    if Comparison.is_comparison(path) and not any(True for _ in Comparison(path).run_folders()):
        return []
    return read_report_runs([path])


def _watch_run(run: ReportRun, now: float) -> WatchedRun:
    metric, last = run.metrics[0], run.records[-1] if run.records else {}
    values = [record[metric.columns[0]] for record in run.records if record.get(metric.columns[0]) is not None]
    total = run.roster.rounds if run.roster is not None else None
    rounds, seconds = run.rounds_done, last.get("seconds")
    is_over = run.status != "unfinished"
    left = None
    if not is_over and total and rounds and seconds is not None:
        since = max(0.0, now - (run.folder.path / "timing.jsonl").stat().st_mtime)
        left = max(0.0, seconds / rounds * (total - rounds) - since)
    traffic = last.get("bytes_up", 0), last.get("bytes_down", 0)
    return WatchedRun(
        run.name,
        _describe_phase(run, now, total),
        is_over,
        rounds,
        total,
        metric.label,
        values,
        left,
        *traffic,
        last.get("epsilon"),
    )


def _describe_phase(run: ReportRun, now: float, total: int | None) -> str:
    if run.done:
        reason = run.result.get("stopped_early")
        return f"done, stopped early: {reason}" if reason else "done"
    if run.status != "unfinished":
        return f"stopped: {run.status}"
    if not _is_training(run, now):
        return f"not running: go on with `fedauc resume {run.folder.path}`"
    if not run.records:
        return "first cycle: compiling or training"
    if total and run.rounds_done >= total:
        return "scoring the test rows"
    last = run.records[-1]
    return f"training, stage {last['stage'] + 1}, cycle {last['cycle'] + 2}, learning rate {last['learning_rate']:.3g}"


def _is_training(run: ReportRun, now: float) -> bool:
    """Whether a process of this machine holds the folder's lock, or something was written a short time ago."""
    lock = run.folder.path / ".lock"
    try:
        text = lock.read_text()
    except OSError:
        text = ""
    if text.isdecimal() and is_process_alive(int(text)):
        return True
    written = (path.stat().st_mtime for path in run.folder.path.iterdir() if path.is_file())
    return now - max(written, default=0.0) < BUSY_SECONDS
