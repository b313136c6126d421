"""What a dataset is: a frozen configuration that loads rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Rows(NamedTuple):
    """Rows not yet assigned to clients: inputs `[n, ...]`, labels 0/1 `[n]`, and client and group names `[n]`."""

    inputs: np.ndarray | Tensor
    labels: np.ndarray
    client: np.ndarray | None = None
    group: np.ndarray | None = None

    def take(self, rows: np.ndarray | slice) -> Rows:
        """The rows with the given numbers; a slice copies nothing."""
        client = None if self.client is None else self.client[rows]
        group = None if self.group is None else self.group[rows]
        return Rows(self.inputs[rows], self.labels[rows], client, group)


ClientColumns = dict[str, dict[int | str, int | float | str]]
"""What a schedule may know about clients: by the column's name, its value for each client's name."""


class Table(NamedTuple):
    """What a dataset loads; `note` describes it in one line, for reports. `client_columns` is for schedules."""

    train: Rows
    validation: Rows | None
    test: Rows
    note: str
    client_columns: ClientColumns = {}  # noqa: RUF012


@dataclass(frozen=True)
class Dataset(ABC):
    """A source of rows. `load` is a pure function of the parameters, the files and the seed."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One line: what it is and whom to cite."""
    caveat: ClassVar[str] = ""
    """For rows that only stand in for real ones: `STAND-IN` or `SYNTHETIC`, and for what. The note begins with it."""

    @abstractmethod
    def load(self, seed: int) -> Table:
        """The rows, split into training, validation (may be None) and test."""
