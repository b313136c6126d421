"""A small stand-in for ChestMNIST, to exercise its code where the real file is not available."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Rows, Table
from fedauc.data.io.stored import File, Source, StoredDataset, save_array

HELD_OUT = (("test", 0.2), ("validation", 0.1))
"""Shares of the patients."""


@dataclass(frozen=True)
class ChestStandIn(StoredDataset):
    """4,999 NIH chest X-rays at 28x28, 161 with a mass, split by patient. NOT ChestMNIST: never report it as that."""

    name: ClassVar[str] = "chest-stand-in"
    about: ClassVar[str] = "a stand-in for ChestMNIST: 4,999 NIH ChestX-ray14 images at 28x28; Wang et al. 2017"
    caveat: ClassVar[str] = "STAND-IN for ChestMNIST: 4,999 NIH chest X-rays, mass or none"
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "nih_chest28.npz",
            "",
            "sha256:a3042156ea49c4209eb71d80c7680d63870c67fc2e4040279bc983008c2633c0",
            "resized from https://nihcc.app.box.com/v/ChestXray-NIHCC and not published; use chestmnist where you can",
        ),
    )

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Images `[n, 1, 28, 28]`, and the label and patient number of each."""
        with np.load(files[0].path, allow_pickle=False) as archive:
            save_array(into, "images", archive["images"][:, None])
            save_array(into, "labels", archive["mass"].astype(np.int8))
            save_array(into, "patients", np.unique(archive["patient"], return_inverse=True)[1])
        return {}

    def load(self, seed: int) -> Table:
        """All images of a patient go to one part; patients with and without a mass are split in the same shares."""
        arrays, _ = self.load_parsed()
        rows, patients = Rows(arrays["images"], np.array(arrays["labels"])), arrays["patients"]
        part_of_row = _assign_patients(np.bincount(patients, rows.labels) > 0, seed)[patients]
        train, validation, test = (
            rows.take(np.flatnonzero(part_of_row == part)) for part in ("", "validation", "test")
        )
        return Table(train, validation, test, self.caveat)


def _assign_patients(has_mass: np.ndarray, seed: int) -> np.ndarray:
    """The held-out part of each patient, empty for training."""
    parts = np.full(len(has_mass), "", dtype="<U10")
    for stratum in (False, True):
        members = np.flatnonzero(has_mass == stratum)
        order, start = members[keys.sample_indices(len(members), len(members), seed, "patients", int(stratum))], 0
        for name, share in HELD_OUT:
            stop = start + max(1, round(share * len(members)))
            parts[order[start:stop]], start = name, stop
    return parts
