"""Card fraud by the hour: an embedded dataset whose clients come in cycles by nature."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

import numpy as np

from fedauc.data import bounds
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.data.hold_out import split
from fedauc.data.standardize import standardize

HOURS = 48
"""The data spans two days."""


@dataclass(frozen=True)
class CreditCard(Dataset):
    """28,930 European card transactions of September 2013, 492 of them frauds.

    Each of the 48 hours is a client, and clients of the same time of day form a group.
    """

    name: ClassVar[str] = "creditcard"
    about: ClassVar[str] = (
        "card fraud, all 492 frauds and a tenth of the genuine transactions of two days; Dal Pozzolo et al. 2015, "
        "Machine Learning Group of ULB, Kaggle 'Credit Card Fraud Detection', DbCL 1.0"
    )

    test_fraction: float = 0.3
    validation_fraction: float = 0.0
    hours_per_group: int = 3

    def __post_init__(self) -> None:
        bounds.fraction("test_fraction", self.test_fraction)
        bounds.share("validation_fraction", self.validation_fraction)
        bounds.whole("hours_per_group", self.hours_per_group)
        if 24 % self.hours_per_group:
            raise ValueError(
                f"hours_per_group is {self.hours_per_group}; it must divide 24: use 1, 2, 3, 4, 6, 8 or 12"
            )

    def load(self, seed: int) -> Table:
        """Stratified by label; every column standardised on the training part."""
        table = standardize(split(self._rows(), self.test_fraction, self.validation_fraction, seed))
        return table._replace(note=f"{len(table.train.labels)} transactions of {HOURS} hourly clients to train on")

    def _rows(self) -> Rows:
        home = resources.files("fedauc.data") / "files" / "creditcard_sample.npz"
        with home.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return self._named(file["x"], file["y"].astype(np.int8), file["hour"].astype(np.int64))

    def _named(self, inputs: np.ndarray, labels: np.ndarray, hour: np.ndarray) -> Rows:
        clients = np.array([f"hour-{hour:02d}" for hour in range(HOURS)])
        starts = range(0, 24, self.hours_per_group)
        groups = np.array([f"{start:02d}-{start + self.hours_per_group:02d}h" for start in starts])
        return Rows(inputs, labels, clients[hour], groups[hour % 24 // self.hours_per_group])
