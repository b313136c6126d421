"""CIFAR and the chest X-rays: both official forms, one class against the rest, the paper's counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import data_files
from fedauc.data.dataset import Rows
from fedauc.data.datasets.chestmnist import FINDINGS, ChestMNIST, ChestStandIn
from fedauc.data.datasets.cifar import CIFAR100_CLASSES, Cifar, Cifar10, Cifar100
from fedauc.data.io.stored import resolve_folder
from fedauc.data.statistics import PAPER_COUNTS, count_classes


@pytest.mark.parametrize("kind", [Cifar10, Cifar100])
@pytest.mark.parametrize("version", [0, 1], ids=["binary", "python"])
@pytest.mark.parametrize("write", [data_files.write_folder, data_files.write_archive])
def test_every_official_form_gives_the_same_rows(
    kind: type[Cifar], version: int, write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(kind.distributions[version], tmp_path)
    data_files.publish_cifar(monkeypatch, kind, tmp_path)
    table = kind(folder=str(tmp_path), positive="3", validation_rows=0).load(0)
    classes, batches = (100, 1) if kind is Cifar100 else (10, 5)
    parts = [data_files.make_photographs(40, classes, seed) for seed in range(batches + 1)]
    assert np.array_equal(table.train.inputs, np.concatenate([images for images, _ in parts[:-1]]))
    assert np.array_equal(table.train.labels, np.concatenate([labels == 3 for _, labels in parts[:-1]]))
    assert np.array_equal(table.test.inputs, parts[-1][0])
    assert np.array_equal(table.test.labels, parts[-1][1] == 3)
    assert table.train.inputs.dtype == np.uint8
    assert isinstance(table.train.inputs, np.memmap)


def test_a_class_goes_by_number_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.make_cifar10(tmp_path, monkeypatch)
    by_name, by_number = (Cifar10(str(tmp_path), positive, 20, 4).load(0) for positive in ("cat", "3"))
    assert np.array_equal(by_name.train.labels, by_number.train.labels)
    assert by_name.note == "cifar10, 'cat' against the rest"
    trucks = Cifar10(str(tmp_path), "truck", 20, 4).load(0)
    assert not np.array_equal(trucks.test.labels, by_name.test.labels)


def test_validation_has_the_counts_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = data_files.make_cifar10(tmp_path, monkeypatch).load(0)
    assert table.validation is not None
    # 200 training images, 20 in the class.
    assert (table.validation.labels.sum(), len(table.validation.labels)) == (4, 20)
    assert (table.train.labels.sum(), len(table.train.labels)) == (16, 180)
    assert (table.test.labels.sum(), len(table.test.labels)) == (4, 40)
    together = np.concatenate([np.asarray(rows.inputs) for rows in (table.train, table.validation)])
    photographs = np.concatenate([data_files.make_photographs(40, 10, seed)[0] for seed in range(5)])
    assert sorted(map(bytes, together)) == sorted(map(bytes, photographs))


def test_an_archive_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.write_archive(Cifar10.distributions[0], tmp_path)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-5000])
    data_files.publish_cifar(monkeypatch, Cifar10, tmp_path)
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz is damaged"):
        Cifar10(folder=str(tmp_path)).load(0)


def test_a_pickle_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.write_folder(Cifar10.distributions[1], tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps({b"data": print, b"labels": []}))
    data_files.publish_cifar(monkeypatch, Cifar10, tmp_path)
    with pytest.raises(ValueError, match=r"test_batch is no file of CIFAR \(.*print does not belong in an image file"):
        Cifar10(folder=str(tmp_path)).load(0)


def test_the_hundred_names_are_in_order() -> None:
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)
    assert (CIFAR100_CLASSES[0], CIFAR100_CLASSES[41], CIFAR100_CLASSES[99]) == ("apple", "lawn_mower", "worm")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cifar10(positive="airplan"), "unknown class 'airplan': did you mean 'airplane'"),
        (lambda: Cifar10(positive="10"), "unknown class '10'"),
        (lambda: Cifar10(validation_rows=-1), "validation_rows is -1; it must be a whole number of at least 0"),
        (lambda: Cifar10(validation_rows=505), "validation_positives is 505; it must be above 0 and below"),
        (lambda: ChestMNIST(finding="masses"), "unknown finding 'masses': did you mean 'mass'"),
    ],
)
def test_parameters_are_bounded(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_more_validation_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.make_cifar10(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="validation_positives asks for 20 of 20 rows labelled 1: lower it"):
        Cifar10(str(tmp_path), "cat", 40, 20).load(0)


def test_chest_parts_and_findings_are_the_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = data_files.make_chestmnist(tmp_path, monkeypatch).load(0)
    assert table.validation is not None
    sizes = [(int(rows.labels.sum()), len(rows.labels)) for rows in (table.train, table.validation, table.test)]
    assert sizes == [(6, 60), (3, 30), (4, 40)]  # every tenth has a mass
    assert table.test.inputs.shape == (40, 1, 28, 28)
    assert np.array_equal(table.test.inputs[:, 0], np.load(tmp_path / "chestmnist.npz")["test_images"])
    assert ChestMNIST(str(tmp_path), "atelectasis").load(0).train.labels.all()
    assert FINDINGS.index("mass") == 4


def test_the_stand_in_says_so_and_keeps_patients_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_files.make_chest_stand_in(tmp_path, monkeypatch)
    table = dataset.load(0)
    assert table.note.startswith("STAND-IN")
    assert "stand-in" in ChestStandIn.name
    assert table.validation is not None
    # 20 of 100 patients have a mass, 10 % and 20 % of them are held out; two images each.
    assert [int(rows.labels.sum()) for rows in (table.train, table.validation, table.test)] == [14, 2, 4]
    owner = {bytes(image): row // 2 for row, image in enumerate(np.load(tmp_path / "nih_chest28.npz")["images"])}
    patients = [
        {owner[bytes(image)] for image in _images(rows)} for rows in (table.train, table.validation, table.test)
    ]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 100


def _images(rows: Rows) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(rows.inputs)[:, 0])


@pytest.mark.parametrize("kind", [Cifar10, Cifar100])
def test_the_real_files_have_the_papers_counts(kind: type[Cifar]) -> None:
    try:
        kind().find_files()
    except ValueError:
        pytest.skip(f"needs the real files in {resolve_folder('')}; run `fedauc data fetch {kind.name}`")
    paper = PAPER_COUNTS[kind.name]
    expected = {"train": paper.train, "validation": paper.validation, "test": paper.test}
    for seed, positive in ((0, "0"), (1, "7")):
        assert count_classes(kind(positive=positive), seed) == expected
