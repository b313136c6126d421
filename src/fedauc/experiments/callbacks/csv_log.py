"""A CSV file with one line per evaluation, for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar

from fedauc.experiments.callbacks._log_file import LogFile, LogFileTracker
from fedauc.fields import option

if TYPE_CHECKING:
    from fedauc.experiments.run_view import RunView


class CsvFile(LogFile):
    """A header with the columns of the first line, then the lines; a number that is not defined is empty."""

    def write_line(self, file: IO[str], record: Mapping[str, Any]) -> None:
        """Write a line, after the header where it is the first one."""
        if not self.columns:
            self.columns = list(record)
            csv.writer(file).writerow(self.columns)
        csv.writer(file).writerow([record.get(column) for column in self.columns])


@dataclass(frozen=True)
class CsvLog(LogFileTracker):
    """Writes the record of every evaluation to a CSV file."""

    name: ClassVar[str] = "csv"
    path: str = option("log.csv", "The file; a relative path is inside the run folder.")

    def open_session(self, run: RunView, run_id: str | None, earlier: Sequence[Mapping[str, Any]]) -> CsvFile:
        """A new file, or that of an interrupted run with the lines up to its checkpoint."""
        return CsvFile(self.locate_file(run, self.path), earlier, is_new=run_id is None)
