"""A small stand-in for the Medicare data, to exercise its path where the real files cannot be had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc.data.dataset import Table
from fedauc.data.datasets.medicare import STATES, TEST, TRAIN, VALIDATION, ProviderYear, read_years, write_years
from fedauc.data.io.stored import File, Source, StoredDataset

FEATURES = ("total_payments", "total_services", "total_beneficiaries", "avg_submitted", "avg_paid")


@dataclass(frozen=True)
class MedicareStandIn(StoredDataset):
    """Provider-years of top billers, 96 positives to train on. NOT the paper's data: never report it as that."""

    name: ClassVar[str] = "medicare-stand-in"
    about: ClassVar[str] = "a stand-in for the Medicare data: top-billing providers by year and state; CMS and OIG"
    caveat: ClassVar[str] = "STAND-IN for the Medicare data: top-billing providers"
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "medicare_provider_years.parquet",
            "",
            "sha256:192d8a2c237c206ebdb153db15c0a636f14112c4ea86cfd21eac54f521903212",
            "a de-identified selection, not published; use medicare where you can",
        ),
    )

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """The years of the paper's split, written like the Medicare data."""
        import pandas as pd

        frame = pd.read_parquet(files[0].path, columns=["year", "state", *FEATURES, "entity_type", "fraud"])
        frame = frame[frame["state"].isin(STATES)]
        found = []
        for year in (*TRAIN, VALIDATION, TEST):
            rows = frame[frame["year"] == year]
            amounts = np.log1p(rows[list(FEATURES)].fillna(0).to_numpy(np.float32).clip(min=0))
            organisation = (rows["entity_type"] == "Organization").to_numpy(np.float32)
            states = np.array([STATES.index(state) for state in rows["state"]], dtype=np.int8)
            labels = rows["fraud"].to_numpy(np.int8)
            found.append(ProviderYear(np.column_stack([amounts, organisation]), labels, states))
        return write_years(found, into)

    def load(self, seed: int) -> Table:
        """2017 to 2020 to train on, 2021 for validation, 2022 for testing, whatever the seed."""
        arrays, counts = self.load_parsed()
        return read_years(arrays, counts, self.caveat)
