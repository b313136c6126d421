"""Tiny files in the official formats, and datasets that take them for the published ones."""

from __future__ import annotations

import csv
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedauc.data.datasets.chestmnist import ChestMNIST, ChestStandIn
from fedauc.data.datasets.cifar import Cifar, Cifar10, Cifar100, Distribution
from fedauc.data.datasets.creditcard import CreditCardFull
from fedauc.data.datasets.medicare import AMOUNTS, ENTITY, MEANS, NPI, STATE, STATES, Medicare
from fedauc.data.io.stored import StoredDataset, file_digest


def publish_files(monkeypatch: pytest.MonkeyPatch, kind: type[StoredDataset], folder: Path) -> None:
    """Let the checksums of the files in a folder be the published ones."""
    sources = [source._replace(checksum=file_digest(folder / source.name)) for source in kind.sources]
    monkeypatch.setattr(kind, "sources", tuple(sources))


# --------------------------------------------------------------------------------------------------------------- CIFAR


def make_photographs(rows: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels that go through the classes in turn."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, 3, 32, 32), dtype=np.uint8)
    return images, (np.arange(rows) % classes).astype(np.uint8)


def encode_binary(images: np.ndarray, labels: np.ndarray, coarse: bool) -> bytes:
    """Records of label bytes and pixels; a coarse label (here 255) comes before the fine one."""
    columns = [np.full((len(labels), 1), 255, np.uint8)] if coarse else []
    return np.hstack([*columns, labels[:, None], images.reshape(len(images), -1)]).tobytes()


def encode_pickle(images: np.ndarray, labels: np.ndarray, fine: bool) -> bytes:
    """A dictionary with keys of bytes, as Python 2 wrote it."""
    key = b"fine_labels" if fine else b"labels"
    return pickle.dumps({b"data": images.reshape(len(images), -1), key: labels.tolist()}, protocol=2)


def make_contents(distribution: Distribution, rows: int = 40) -> dict[str, bytes]:
    """Every file of a distribution, `rows` images each, the same images in both distributions."""
    fine = "100" in distribution.folder
    contents = {}
    for number, name in enumerate(distribution.all_files):
        images, labels = make_photographs(rows, 100 if fine else 10, number)
        write = encode_binary if name.endswith(".bin") else encode_pickle
        contents[name] = write(images, labels, fine)
    return contents


def write_folder(distribution: Distribution, folder: Path, rows: int = 40) -> None:
    """The folder that an archive unpacks to."""
    (folder / distribution.folder).mkdir(parents=True)
    for name, content in make_contents(distribution, rows).items():
        (folder / distribution.folder / name).write_bytes(content)


def write_archive(distribution: Distribution, folder: Path, rows: int = 40) -> None:
    """The archive."""
    with tarfile.open(folder / distribution.archive.name, "w:gz") as archive:
        for name, content in make_contents(distribution, rows).items():
            entry = tarfile.TarInfo(f"{distribution.folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def publish_cifar(monkeypatch: pytest.MonkeyPatch, kind: type[Cifar], folder: Path) -> None:
    """Let whatever files are there be the published ones, in every version."""

    def checksum(path: Path) -> str:
        return file_digest(path) if path.is_file() else "md5:none"

    def known(distribution: Distribution) -> Distribution:
        archive = distribution.archive._replace(checksum=checksum(folder / distribution.archive.name))
        train = {name: checksum(folder / distribution.folder / name) for name in distribution.train}
        test = {name: checksum(folder / distribution.folder / name) for name in distribution.test}
        return Distribution(archive, distribution.folder, train, test)

    monkeypatch.setattr(kind, "distributions", tuple(known(distribution) for distribution in kind.distributions))


def make_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cifar10:
    """5 files of 40 training images and 40 test images; 20 and 4 of them in class 3."""
    write_folder(Cifar10.distributions[0], folder)
    publish_cifar(monkeypatch, Cifar10, folder)
    return Cifar10(folder=str(folder), positive="cat", validation_rows=20, validation_positives=4)


def make_cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cifar100:
    """400 training and 400 test images, 4 of each class."""
    write_folder(Cifar100.distributions[0], folder, rows=400)
    publish_cifar(monkeypatch, Cifar100, folder)
    return Cifar100(folder=str(folder), positive="worm", validation_rows=20, validation_positives=2)


# --------------------------------------------------------------------------------------------------- the other datasets


def make_chestmnist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ChestMNIST:
    """60, 30 and 40 images; every tenth has a mass (column 4)."""
    arrays: dict[str, Any] = {}
    for part, rows in (("train", 60), ("val", 30), ("test", 40)):
        arrays[f"{part}_images"] = np.random.default_rng(rows).integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        labels = np.zeros((rows, 14), dtype=np.uint8)
        labels[::10, 4] = 1
        labels[:, 0] = 1
        arrays[f"{part}_labels"] = labels
    np.savez(folder / "chestmnist.npz", allow_pickle=False, **arrays)
    publish_files(monkeypatch, ChestMNIST, folder)
    return ChestMNIST(folder=str(folder))


def make_chest_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ChestStandIn:
    """200 images of 100 patients, two each; every fifth patient has a mass in one of them."""
    images = np.random.default_rng(0).integers(0, 256, (200, 28, 28), dtype=np.uint8)
    mass = (np.arange(200) % 10 == 0).astype(np.uint8)
    np.savez(folder / "nih_chest28.npz", images=images, mass=mass, patient=(np.arange(200) // 2).astype(np.int32))
    publish_files(monkeypatch, ChestStandIn, folder)
    return ChestStandIn(folder=str(folder))


def make_creditcard_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CreditCardFull:
    """960 transactions, 20 in each of the 48 hours, two of them frauds; the label is quoted as in the real file."""
    draw = np.random.default_rng(0)
    names = ["Time", *(f"V{number}" for number in range(1, 29)), "Amount", "Class"]
    lines = [",".join(f'"{name}"' for name in names)]
    for row in range(960):
        values = ",".join(f"{value:.6f}" for value in draw.standard_normal(29))
        lines.append(f'{row * 180},{values},"{int(row % 10 == 0)}"')
    (folder / "creditcard.csv").write_text("\n".join(lines) + "\n")
    publish_files(monkeypatch, CreditCardFull, folder)
    return CreditCardFull(folder=str(folder))


def make_providers(year: int, rows: int = 120) -> list[dict[str, Any]]:
    """A year's providers: three per state in turn, every fifth an organisation, some blanks; 20 in other states."""
    draw = np.random.default_rng(year)
    states = [*STATES, "PR", "ZZ"]
    lines = []
    for row in range(rows + 20):
        line: dict[str, Any] = {name: f"{draw.gamma(2, 100):.2f}" for name in AMOUNTS}
        line |= dict.fromkeys(MEANS, f"{draw.uniform(60, 80):.1f}")
        line |= {NPI: 1_000_000_000 + row, ENTITY: "O" if row % 5 == 0 else "I"}
        line |= {STATE: states[row % 50] if row < rows else "PR", "Rndrng_Prvdr_Last_Org_Name": f'Name, "{row}"'}
        if row % 7 == 0:
            line["Bene_Feml_Cnt"] = line[MEANS[0]] = ""
        lines.append(line)
    return lines


def write_csv(path: Path, lines: list[dict[str, Any]]) -> None:
    """A CSV with the columns of the first line."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def make_exclusion(provider: int, kind: str, day: str) -> dict[str, Any]:
    """A line of the exclusion list."""
    return {"LASTNAME": "X", "NPI": f"{provider:010d}", "EXCLTYPE": f"{kind}  ", "EXCLDATE": day, "REINDATE": "0"}


LISTED = [
    *(make_exclusion(1_000_000_000 + row, "1128a1", "20231115") for row in range(0, 12, 2)),
    make_exclusion(1_000_000_001, "1128b8", "20231115"),  # not a fraud type
    make_exclusion(1_000_000_003, "1128b7", "20180101"),  # the first day of 2018
    make_exclusion(1_000_000_005, "1128b7", "20181231"),  # and the last
    make_exclusion(0, "1128a1", "20231115"),  # no identifier
]


def make_medicare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Medicare:
    """Six years of 120 providers in the 50 states, of whom six are excluded in 2023, and two in 2018."""
    for year in range(2017, 2023):
        write_csv(folder / f"MUP_PHY_R24_P07_V10_DY{year % 100}_Prov.csv", make_providers(year))
    write_csv(folder / "UPDATED.csv", LISTED)
    return Medicare(folder=str(folder), min_rows=100)
