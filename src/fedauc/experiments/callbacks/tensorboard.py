"""TensorBoard: event files that `tensorboard --logdir` draws."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._tracker import Tracker, TrackerSession, select_numbers
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class EventFiles(TrackerSession):
    """A folder of event files; a resumed run hides the rounds after its checkpoint, and writes them again."""

    drops_later_rounds: ClassVar[bool] = True

    def __init__(self, folder: Path, first_round: int, parameters: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_id = str(folder)
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_round)
        if not first_round:
            lines = [f"| {name} | {value} |" for name, value in parameters.items()]
            self._writer.add_text("parameters", "\n".join(["| parameter | value |", "| --- | --- |", *lines]))

    def log_record(self, record: Mapping[str, Any]) -> None:
        """One scalar per number."""
        for name, value in select_numbers(record).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The final numbers; event files hold no other files, so these are put beside them."""
        for name, value in select_numbers(record).items():
            self._writer.add_scalar(f"final/{name}", value, record["round"])
        for file in files:
            shutil.copy(file, self.run_id)

    def close(self, failure: str | None) -> None:
        """Write what is left."""
        if failure is not None:
            self._writer.add_text("stopped", failure)
        self._writer.close()

    def pause(self) -> None:
        """Write what is left."""
        self._writer.close()


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """Writes metrics, parameters and the result as event files for TensorBoard."""

    name: ClassVar[str] = "tensorboard"
    needs_packages: ClassVar[tuple[str, ...]] = ("tensorboard",)
    path: str = option("tensorboard", "The folder of the event files; a relative path is inside the run folder.")

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> EventFiles:
        """New event files, beside those that an interrupted run has written; every `fit` has a folder of its own."""
        first_round = earlier[-1]["round"] + 1 if earlier else 0
        folder = run.folder / self.path if run.folder else Path(self.path) / f"fit-{uuid.uuid4().hex[:8]}"
        return EventFiles(folder, first_round, run.parameters)
