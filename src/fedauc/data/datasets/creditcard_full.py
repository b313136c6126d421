"""Card fraud by the hour, with every transaction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc.data.dataset import Rows
from fedauc.data.datasets.creditcard import HOURS, CreditCard
from fedauc.data.io.stored import File, Source, StoredDataset, save_array


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
