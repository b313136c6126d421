"""What the trackers that write one file share: the file is made new when a run starts, and cut where it is resumed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._tracker import Tracker, TrackerSession
from fedauc.files import naming_path

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class LogFile(TrackerSession):
    """A file with one line per evaluation. Lines are written at once, so that other programs can follow them."""

    drops_later_rounds: ClassVar[bool] = True

    def __init__(self, path: Path, earlier: Sequence[Mapping[str, Any]], is_new: bool) -> None:
        self.path, self.run_id = path, str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_new and path.exists():
            raise ValueError(f"{path} exists already; choose another file")
        with naming_path(path), path.open("w", newline="") as file:
            self.columns: list[str] = []
            for record in earlier:
                self.write_line(file, record)

    @abstractmethod
    def write_line(self, file: IO[str], record: Mapping[str, Any]) -> None:
        """Write the record of one evaluation."""

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Add a line."""
        with naming_path(self.path), self.path.open("a", newline="") as file:
            self.write_line(file, record)

    def log_result(self, record: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The last line is the result, and the model is in the run folder."""

    def close(self, failure: str | None) -> None:
        """Nothing is open between two lines."""


@dataclass(frozen=True)
class LogFileTracker(Tracker):
    """A tracker that writes one file."""

    def locate_file(self, run: RunView, path: str) -> Path:
        """A relative path belongs to the run folder; `fit` has none, and takes the current one."""
        return (run.folder or Path()) / path
