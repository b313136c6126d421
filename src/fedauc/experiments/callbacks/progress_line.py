"""Progress lines: one line per evaluation, for notebooks and the logs of batch jobs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.experiments.callbacks.callback import Callback
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


@dataclass(frozen=True)
class ProgressLine(Callback):
    """Prints a line with the round and the metrics after an evaluation, on standard error."""

    name: ClassVar[str] = "progress-line"
    every: int = option(1, "Evaluations between two lines; the last one always gets one.", at_least=1)

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        """Print the line, where one is due."""
        if len(run.records) % self.every and not run.is_over:
            return
        record = run.records[-1]
        named = zip(run.metric_names, run.metric_columns, strict=True)
        values = [f"{name} {record[column]:.4f}" for name, column in named if record[column] is not None]
        print(f"round {run.rounds_done} of {run.total_rounds}: {', '.join(values)}", file=sys.stderr, flush=True)
