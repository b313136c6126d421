"""What a dataset is: a frozen configuration that loads rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from fedauc.data.summaries import SummaryTraffic

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.data.features import FeatureEncoder

LABEL_VALUES = ("0", "1")
"""How the negative and the positive class are written where a file does not say otherwise."""


class Rows(NamedTuple):
    """Rows not yet assigned to clients: inputs `[n, ...]`, labels 0/1 `[n]`, and client and group names `[n]`.

    `numbers` are the numbers of the rows in the file that they come from, counted from 0.
    """

    inputs: np.ndarray | Tensor
    labels: np.ndarray
    client: np.ndarray | None = None
    group: np.ndarray | None = None
    numbers: np.ndarray | None = None

    def take(self, rows: np.ndarray | slice) -> Rows:
        """The rows with the given numbers; a slice copies nothing."""
        client, group, numbers = (
            None if column is None else column[rows] for column in (self.client, self.group, self.numbers)
        )
        return Rows(self.inputs[rows], self.labels[rows], client, group, numbers)


ClientColumns = dict[str, dict[int | str, int | float | str]]
"""What a schedule may know about clients: by the column's name, its value for each client's name."""


class TableSummary(NamedTuple):
    """What became of a raw table's columns: those left out and why, what needs attention, and what sites have sent.

    `dropped_rows` counts the rows without a label, a client or a group.
    """

    ignored: Mapping[str, str] = MappingProxyType({})
    warnings: tuple[str, ...] = ()
    traffic: SummaryTraffic = SummaryTraffic()
    dropped_rows: int = 0


class TableParts(NamedTuple):
    """What a dataset loads; `note` describes it in one line, for reports. `client_columns` is for schedules.

    `encoder` says how raw columns became inputs, where they did, and `label_values` how the file writes the negative
    and the positive class; `summary` says what became of the columns of a raw table.
    """

    train: Rows
    validation: Rows | None
    test: Rows
    note: str
    client_columns: ClientColumns = {}  # noqa: RUF012
    encoder: FeatureEncoder | None = None
    label_values: tuple[str, str] = LABEL_VALUES
    summary: TableSummary = TableSummary()


@dataclass(frozen=True)
class Dataset(ABC):
    """A source of rows. `load` is a pure function of the parameters, the files and the seed."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One line: what it is and whom to cite."""
    caveat: ClassVar[str] = ""
    """For rows that only stand in for real ones: `STAND-IN` or `SYNTHETIC`, and for what. The note begins with it."""
    path_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that are paths of files or folders; a run folder stores them as absolute paths."""

    @abstractmethod
    def load(self, seed: int) -> TableParts:
        """The rows, split into training, validation (may be None) and test."""
