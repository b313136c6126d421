"""Progress as plain lines on standard error: for log files, pipes, notebooks and `fit(verbose=True)`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self, TextIO

from fedauc.experiments.run_loop import Observer, Progress
from fedauc.progress import show_activities

LINES_PER_RUN = 5
"""Lines of a run, besides its first one: a line after each such part of its rounds."""

SECONDS_BETWEEN_LINES = 60.0
"""A slow run gets a line after so many seconds, even if it is not that far yet."""

SECONDS_OF_AN_ACTIVITY = 1.0
"""An activity, such as loading, gets a line if it takes longer than this."""


class ProgressLines:
    """Says what is done and how long it still takes, in a handful of lines per run that are written at once."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._activities = ExitStack()
        self._reminder: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._under_way, self._said_at = "", 0.0

    def __enter__(self) -> Self:
        if not self._quiet:
            self._activities.enter_context(show_activities(self._show_activity))
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed.set()
        self._activities.close()

    def _remind_while_silent(self) -> None:
        """Say what is under way if nothing was said for a while, and again after twice as long."""
        said_at, pause = self._said_at, SECONDS_BETWEEN_LINES
        while not self._is_closed.wait(max(0.05, said_at + pause - time.monotonic())):
            if said_at != self._said_at:
                said_at, pause = self._said_at, SECONDS_BETWEEN_LINES
            elif self._under_way:
                self.print_line(f"{self._under_way}, for {format_seconds(time.monotonic() - said_at)} so far")
                pause *= 2

    def _report_under_way(self, text: str) -> None:
        """What a reminder will say; the thread that reminds is started by the first report."""
        self._under_way, self._said_at = text, time.monotonic()
        if self._reminder is None and not self._quiet:
            self._reminder = threading.Thread(target=self._remind_while_silent, name="progress", daemon=True)
            self._reminder.start()

    def add_bar(self, name: str) -> Observer:
        """Lines for a new run, as an observer of it."""
        begin = last_time = time.monotonic()
        first_round, last_part = -1, 0

        def observe(progress: Progress) -> None:
            nonlocal first_round, last_part, last_time
            is_over = progress.stopped or progress.phase == "done"
            self._report_under_way("" if is_over else f"{name}: in round {progress.done + 1} of {progress.rounds}")
            now, part = time.monotonic(), LINES_PER_RUN * progress.done // max(1, progress.rounds)
            if first_round < 0:
                first_round, last_part = progress.done, part
                done_before = f", {progress.done} of them done before" if progress.done else ""
                self.print_line(f"{name}: {progress.rounds} rounds{done_before}")
            elif progress.stopped:
                self.print_line(f"{name}: stopped after {progress.done} of {progress.rounds} rounds")
            elif part > last_part or now - last_time >= SECONDS_BETWEEN_LINES:
                last_part, last_time = part, now
                self.print_line(f"{name}: {describe_progress(progress, progress.done - first_round, now - begin)}")

        return observe

    def print_line(self, text: str) -> None:
        """Write a line now: a log that is read while the run goes on must not wait for its end."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def _show_activity(self, description: str) -> Iterator[None]:
        timer = threading.Timer(SECONDS_OF_AN_ACTIVITY, self.print_line, [f"{description} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def is_watched(stream: TextIO) -> bool:
    """Whether a person reads a stream while it is written: at a terminal, or below the cell of a notebook."""
    return stream.isatty() or type(stream).__module__.startswith("ipykernel")


def describe_progress(progress: Progress, rounds_here: int, seconds: float) -> str:
    """One line: the phase, the round, the last metric, and the time that is left at the speed of these seconds.

    >>> describe_progress(Progress(50, 248, {"auc": 0.9731}), 50, 3.0)
    'training, round 50 of 248, test AUC 0.9731, about 12 s left'
    >>> describe_progress(Progress(248, 248, {"auc": 0.9831}, phase="done"), 50, 3.0)
    'done, round 248 of 248, test AUC 0.9831'
    """
    parts = [progress.phase, f"round {progress.done} of {progress.rounds}"]
    value = progress.record and progress.record[progress.column]
    if value is not None:
        parts.append(f"{progress.label} {value:.4f}")
    if rounds_here and progress.done < progress.rounds:
        parts.append(f"about {format_seconds(seconds / rounds_here * (progress.rounds - progress.done))} left")
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """A duration in one unit or two.

    >>> format_seconds(4.4), format_seconds(200), format_seconds(7300)
    ('4 s', '3 min 20 s', '2 h 1 min')
    """
    rounded = max(1, round(seconds))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"
