"""ChestMNIST: chest X-rays of 28x28, one finding against its absence; and a small stand-in to exercise its code."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Rows, TableParts
from fedauc.data.io.readers import NPZ_ERRORS
from fedauc.data.io.stored import File, Source, StoredDataset, save_array
from fedauc.discovery import lookup
from fedauc.fields import option

FINDINGS = (
    *("atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax"),
    *("consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia"),
)
"""In the order of the label columns."""

PARTS = ("train", "val", "test")
"""The parts of the official split, as the archive names them."""

HELD_OUT = (("test", 0.2), ("validation", 0.1))
"""Shares of the patients of the stand-in."""


@dataclass(frozen=True)
class ChestMNIST(StoredDataset):
    """112,120 chest X-rays in their official split; the positives are those with one finding, by default a mass."""

    name: ClassVar[str] = "chestmnist"
    about: ClassVar[str] = (
        "chest X-rays of 28x28, one finding against its absence; Yang et al. 2023, https://medmnist.com, CC BY 4.0, "
        "from NIH ChestX-ray14"
    )
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "chestmnist.npz",
            "https://zenodo.org/records/10519652/files/chestmnist.npz?download=1",
            "md5:02c8a6516a18b556561a56cbdd36c4a8",
            "https://zenodo.org/records/10519652",
        ),
    )

    finding: str = option("mass", "The finding that makes an image positive.")

    def __post_init__(self) -> None:
        lookup("finding", self.finding, dict.fromkeys(FINDINGS, True))

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """All images `[n, 1, 28, 28]` and label columns `[n, 14]`, part after part."""
        path = files[0].path
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is no .npz archive: delete it and fetch it again")
        try:
            with np.load(path, allow_pickle=False) as archive:
                images = [archive[f"{part}_images"] for part in PARTS]
                labels = [archive[f"{part}_labels"] for part in PARTS]
        except NPZ_ERRORS as error:
            raise ValueError(f"{path} is damaged ({error}): delete it and fetch it again") from error
        save_array(into, "images", np.concatenate(images)[:, None])
        save_array(into, "labels", np.concatenate(labels).astype(np.uint8))
        return {part: len(rows) for part, rows in zip(PARTS, labels, strict=True)}

    def load(self, seed: int) -> TableParts:
        """The official split, whatever the seed."""
        arrays, counts = self.load_parsed()
        labels = arrays["labels"][:, FINDINGS.index(self.finding)].astype(np.int8)
        rows, first = Rows(arrays["images"], labels), counts["train"]
        second = first + counts["val"]
        parts = (rows.take(slice(first)), rows.take(slice(first, second)), rows.take(slice(second, None)))
        return TableParts(*parts, f"chestmnist, {self.finding} against its absence")


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

    def load(self, seed: int) -> TableParts:
        """All images of a patient go to one part; patients with and without a mass are split in the same shares."""
        arrays, _ = self.load_parsed()
        rows, patients = Rows(arrays["images"], np.array(arrays["labels"])), arrays["patients"]
        part_of_row = _assign_patients(np.bincount(patients, rows.labels) > 0, seed)[patients]
        train, validation, test = (
            rows.take(np.flatnonzero(part_of_row == part)) for part in ("", "validation", "test")
        )
        return TableParts(train, validation, test, self.caveat)


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
