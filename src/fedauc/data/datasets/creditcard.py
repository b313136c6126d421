"""Card fraud by the hour: clients that naturally form a cycle of groups, from a sample in the package or in full."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.data.io.stored import File, Source, StoredDataset, save_array
from fedauc.data.splits import split_table
from fedauc.data.standardization import standardize_table
from fedauc.fields import check_fields, option

HOURS = 48
"""The data span two days."""

COLUMNS = (*(f"V{number}" for number in range(1, 29)), "Amount")
"""The columns of the published file that are inputs: 28 principal components and the amount."""


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

    test_fraction: float = option(0.3, "Fraction of each class held out for testing.", above=0, below=1)
    validation_fraction: float = option(
        0.0, "Fraction of the remaining rows held out for validation.", at_least=0, below=1
    )
    hours_per_group: int = option(3, "Hours of the day in a group of clients; must divide 24.", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if 24 % self.hours_per_group:
            raise ValueError(
                f"hours_per_group is {self.hours_per_group}; it must divide 24: use 1, 2, 3, 4, 6, 8 or 12"
            )

    def load(self, seed: int) -> TableParts:
        """A split stratified by label; every column is standardised on the training part."""
        parts = split_table(self.read_rows(), self.test_fraction, self.validation_fraction, seed)
        table = standardize_table(parts, COLUMNS)
        return table._replace(note=f"{len(table.train.labels)} transactions of {HOURS} hourly clients to train on")

    def read_rows(self) -> Rows:
        """All rows before the split, with inputs as published."""
        path = resources.files("fedauc.data") / "files" / "creditcard_sample.npz"
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return self._name_clients(arrays["x"], arrays["y"].astype(np.int8), arrays["hour"].astype(np.int64))

    def _name_clients(self, inputs: np.ndarray, labels: np.ndarray, hour: np.ndarray) -> Rows:
        clients = np.array([f"hour-{number:02d}" for number in range(HOURS)])
        starts = range(0, 24, self.hours_per_group)
        groups = np.array([f"{start:02d}-{start + self.hours_per_group:02d}h" for start in starts])
        return Rows(inputs, labels, clients[hour], groups[hour % 24 // self.hours_per_group])


@dataclass(frozen=True)
class CreditCardFull(CreditCard, StoredDataset):
    """All 284,807 transactions of which `creditcard` is a sample, 492 of them frauds, with the same clients."""

    name: ClassVar[str] = "creditcard-full"
    about: ClassVar[str] = (
        "card fraud, all 284,807 transactions of two days; Dal Pozzolo et al. 2015, Machine Learning Group of ULB, "
        "Kaggle 'Credit Card Fraud Detection', DbCL 1.0"
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "creditcard.csv",
            "https://zenodo.org/records/7395559/files/creditcard.csv?download=1",
            "md5:e90efcb83d69faf99fcab8b0255024de",
            "https://www.kaggle.com/datasets/mlg-ulb/creditcardfraud",
        ),
    )

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """28 components and the amount, the label, and the hour since the first transaction."""
        table = np.loadtxt(files[0].path, delimiter=",", skiprows=1, quotechar='"')
        save_array(into, "inputs", table[:, 1:-1].astype(np.float32))
        save_array(into, "labels", table[:, -1].astype(np.int8))
        save_array(into, "hours", np.minimum(table[:, 0] // 3600, HOURS - 1).astype(np.int64))
        return {}

    def read_rows(self) -> Rows:
        """All rows before the split, with inputs as published."""
        arrays, _ = self.load_parsed()
        return self._name_clients(arrays["inputs"], np.array(arrays["labels"]), arrays["hours"])
