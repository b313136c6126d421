"""Progress bars: one per run, on standard error."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedauc.experiments.runner import Observer
from fedauc.experiments.runner import Progress as Step


class Bars:
    """A stack of bars, each with the last AUC beside it."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[auc]}"),
            console=Console(stderr=True),
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def bar(self, name: str) -> Observer:
        """A new bar, as an observer of a run."""
        task = self._progress.add_task(name, total=None, auc="")

        def observe(step: Step) -> None:
            auc = f"AUC {step.record['auc']:.4f}" if step.record else ""
            self._progress.update(task, completed=step.done, total=step.rounds, auc=auc)

        return observe
