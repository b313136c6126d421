"""Progress on standard error: one bar per run at a terminal, plain lines in a log file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedauc.experiments.progress_lines import ProgressLines
from fedauc.experiments.run_loop import Observer
from fedauc.experiments.run_loop import Progress as Step
from fedauc.progress import show_activities

OTHER_COLUMNS = 43
"""Columns of a terminal beside the name and the bar: a count, a time, an AUC, and room between."""

BAR_WIDTH, NARROW_BAR = 20, 6
"""Columns of a bar, and of a bar beside long names."""

MAX_BARS = 16
"""Bars on the screen: a terminal of 24 lines would cut off the run under way below more."""


PHASE_COLUMNS = len("training ")
"""Columns of the phase, which is left out beside long names."""


def open_progress() -> ProgressBars | ProgressLines:
    """Bars at a terminal; elsewhere lines, because a bar would be written only when all is done."""
    return ProgressBars() if Console(stderr=True).is_terminal else ProgressLines()


def shorten_name(name: str, room: int) -> str:
    """A name in so many columns; a long one keeps its end, by which runs differ.

    >>> shorten_name("creditcard-full-cycp-minimax-a7a9f3ec61f1", 22)
    'creditcard-fu…f3ec61f1'
    """
    return name if len(name) <= room else f"{name[: room - 9]}…{name[-8:]}"


class TimeColumn(TimeRemainingColumn):
    """The time that a run still needs, or that it took."""

    def render(self, task: Task) -> Text:
        """A word and the time, unless there is none left."""
        if task.fields["auc"] == "stopped":
            return Text("")
        return Text.assemble("took " if task.finished else "left ", super().render(task))


class ActivityProgress(Progress):
    """Bars, and below them a line on what takes long just now, such as compiling."""

    activity = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The table of bars, then a bar without an end and the activity."""
        yield from super().get_renderables()
        if self.activity:
            line = Table.grid(padding=(0, 1))
            line.add_row(ProgressBar(total=None, width=20, pulse=True), Text(self.activity))
            yield line


class ProgressBars:
    """A stack of bars, each with the last AUC beside it; of many, the finished ones make room first."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._room = max(14 + NARROW_BAR, console.width - OTHER_COLUMNS)
        self._bar = BarColumn(bar_width=BAR_WIDTH)
        self._activities = ExitStack()
        self._progress = ActivityProgress(
            TextColumn("{task.description:<14}", table_column=Column(no_wrap=True)),
            self._bar,
            MofNCompleteColumn(),
            TimeColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[auc]}", table_column=Column(no_wrap=True)),
            console=console,
        )

    def __enter__(self) -> Self:
        self._activities.enter_context(show_activities(self._show_activity))
        return self

    def __exit__(self, *error: object) -> None:
        self._activities.close()
        if not self._progress.live.is_started:
            # Where nothing has run, nothing is shown, not even an empty line.
            return
        self._progress.live.transient = not self._progress.tasks
        for task in self._progress.tasks:
            # A run that was done before has nothing to show.
            self._progress.update(task.id, visible=task.visible and task.total is not None)
        self._progress.stop()

    def add_bar(self, name: str) -> Observer:
        """A new bar, as an observer of a run."""
        self._progress.start()
        shown = [task for task in self._progress.tasks if task.visible]
        if len(shown) >= MAX_BARS:
            self._progress.update(next((task for task in shown if task.finished), shown[0]).id, visible=False)
        name = shorten_name(name, self._room - NARROW_BAR)
        # All bars have one width, so the longest name decides.
        self._bar.bar_width = min(self._bar.bar_width or BAR_WIDTH, self._room - len(name))
        task = self._progress.add_task(name, total=None, auc="")

        def observe(step: Step) -> None:
            value = step.record and step.record[step.column]
            auc = "" if value is None else f"{step.label} {value:.4f}"
            # A longer name of a metric takes its room from the bars, and so does the phase where there is enough.
            room = self._room - len(name) - (len(step.label) - len("test AUC"))
            if step.phase != "done" and room - PHASE_COLUMNS >= NARROW_BAR:
                room, auc = room - PHASE_COLUMNS, f"{step.phase} {auc}"
            self._bar.bar_width = max(1, min(self._bar.bar_width or BAR_WIDTH, room))
            self._progress.update(task, completed=step.done, total=step.rounds, auc="stopped" if step.stopped else auc)

        return observe

    @contextmanager
    def _show_activity(self, description: str) -> Iterator[None]:
        compiles = description.startswith("compiling")
        self._progress.activity = description + " (about a minute the first time)" * compiles
        if self._progress.console.is_terminal:
            # Elsewhere an activity without a run would leave an empty line.
            self._progress.start()
        self._progress.refresh()
        try:
            yield
        finally:
            self._progress.activity = ""
