"""A small stand-in for ChestMNIST, to exercise its path where the real file cannot be had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Rows, Table
from fedauc.data.sources import File, Source, Stored, save

HELD_OUT = (("test", 0.2), ("validation", 0.1))
"""Shares of the patients."""


@dataclass(frozen=True)
class ChestStandIn(Stored):
    """4,999 NIH chest X-rays at 28x28, 161 with a mass, split by patient. NOT ChestMNIST: never report it as that."""

    name: ClassVar[str] = "chest-stand-in"
    about: ClassVar[str] = "a stand-in for ChestMNIST: 4,999 NIH ChestX-ray14 images at 28x28; Wang et al. 2017"
    foreign: ClassVar[str] = "STAND-IN for ChestMNIST: 4,999 NIH chest X-rays, mass or none"
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "nih_chest28.npz",
            "",
            "sha256:a3042156ea49c4209eb71d80c7680d63870c67fc2e4040279bc983008c2633c0",
            "resized from https://nihcc.app.box.com/v/ChestXray-NIHCC and not published; use chestmnist where you can",
        ),
    )

    def parse(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Images `[n, 1, 28, 28]`, the label and a patient number for each."""
        with np.load(files[0].path, allow_pickle=False) as archive:
            save(into, "images", archive["images"][:, None])
            save(into, "labels", archive["mass"].astype(np.int8))
            save(into, "patients", np.unique(archive["patient"], return_inverse=True)[1])
        return {}

    def load(self, seed: int) -> Table:
        """A patient's images all go to one part; patients with a mass are spread like those without."""
        arrays, _ = self.parsed()
        rows, patients = Rows(arrays["images"], np.array(arrays["labels"])), arrays["patients"]
        part = _deal(np.bincount(patients, rows.labels) > 0, seed)[patients]
        train, validation, test = (rows.take(np.flatnonzero(part == each)) for each in ("", "validation", "test"))
        return Table(train, validation, test, self.foreign)


def _deal(positive: np.ndarray, seed: int) -> np.ndarray:
    """The held-out part of each patient, empty for training."""
    part = np.full(len(positive), "", dtype="<U10")
    for stratum in (False, True):
        members = np.flatnonzero(positive == stratum)
        order, start = members[keys.sample_indices(len(members), len(members), seed, "patients", int(stratum))], 0
        for name, share in HELD_OUT:
            stop = start + max(1, round(share * len(members)))
            part[order[start:stop]], start = name, stop
    return part
