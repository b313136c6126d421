"""What a dataset is: a frozen configuration that loads rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor


class Rows(NamedTuple):
    """Rows before they are dealt to clients: inputs `[n, ...]`, labels 0/1 `[n]`, a client and a group name each."""

    inputs: np.ndarray | Tensor
    labels: np.ndarray
    client: np.ndarray | None = None
    group: np.ndarray | None = None

    def take(self, rows: np.ndarray | slice) -> Rows:
        """The rows with the given numbers; a slice copies nothing."""
        client = None if self.client is None else self.client[rows]
        group = None if self.group is None else self.group[rows]
        return Rows(self.inputs[rows], self.labels[rows], client, group)


class Table(NamedTuple):
    """What a dataset loads; `note` is one line on what was read, for a report."""

    train: Rows
    validation: Rows | None
    test: Rows
    note: str


@dataclass(frozen=True)
class Dataset(ABC):
    """A source of rows. Parameters validate themselves; `load` is a pure function of them, the files and the seed."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One line: what it is and whom to cite."""
    foreign: ClassVar[str] = ""
    """How the note begins of rows that only stand in for others: `STAND-IN` or `SYNTHETIC`, and for what."""

    @abstractmethod
    def load(self, seed: int) -> Table:
        """The rows, split into training, validation (perhaps none) and test."""
