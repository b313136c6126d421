"""A file of JSON lines with one line per evaluation, for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._log_file import LogFile, LogFileTracker
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class JsonLines(LogFile):
    """One JSON object per line."""

    def write_line(self, file: IO[str], record: Mapping[str, Any]) -> None:
        """Write a line."""
        file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class JsonlLog(LogFileTracker):
    """Writes the record of every evaluation to a file of JSON lines."""

    name: ClassVar[str] = "jsonl"
    path: str = option("log.jsonl", "The file; a relative path is inside the run folder.")

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> JsonLines:
        """A new file, or that of an interrupted run with the lines up to its checkpoint."""
        return JsonLines(self.locate_file(run, self.path), earlier, is_new=run_id is None)
