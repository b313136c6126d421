"""Record writing: every record becomes a line of the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedauc.experiments.callbacks.callback import Callback
from fedauc.fields import describe

if TYPE_CHECKING:
    from fedauc.experiments.folder import RunFolder
    from fedauc.experiments.run_view import RunView
    from fedauc.trees import Tree


@dataclass(frozen=True)
class RecordWriter(Callback):
    """Appends each record to `records.jsonl` and the training seconds so far to `timing.jsonl`."""

    folder: RunFolder = field(metadata=describe("The run folder."))

    def on_evaluation(self, run: RunView, state: Tree) -> None:
        """Write the new record."""
        self.folder.append_record(run.records[-1], run.seconds)
