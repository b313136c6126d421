"""Preparation: imbalance, noise and partition on the training part only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedauc.data import Preparation, Rows, TableParts, prepare_table
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.partitions import IID, ByMetadata, Dirichlet, Natural


def make_table() -> TableParts:
    """400 training rows, a quarter positive, of eight clients in two groups; a validation and a test part of 40."""

    def part(size: int) -> Rows:
        row = np.arange(size)
        return Rows(row[:, None].astype(np.float32), row % 4 == 0, row % 8, np.array(["x", "y"])[row % 2])

    return TableParts(part(400), part(40), part(40), "made up")


def test_default_keeps_the_data_as_loaded() -> None:
    split = prepare_table(make_table(), Preparation(), 0)
    assert len(split.train) == 8
    assert split.train.groups is not None
    assert split.train.groups.tolist() == ["x", "y"] * 4
    assert torch.equal(split.train.inputs[:, 0], torch.arange(400.0))
    assert split.test.clients is not None
    assert np.array_equal(split.test.clients, np.arange(40) % 8)
    assert split.note == "made up; 400 of 400 training rows, 100 labelled positive, over 8 clients (0 empty)"


def test_order_is_imbalance_then_noise_then_partition() -> None:
    preparation = Preparation(IID(10), remove_positives=0.5, positive_rate=0.1, flip_positives=0.2, flip_negatives=0.1)
    split = prepare_table(make_table(), preparation, 0)
    # 100 positives, 50 after removal, 33 at a rate of 0.1 beside 300 negatives; 7 of 33 flip down, 30 of 300 up.
    assert len(split.train.labels) == 333
    assert split.train.labels.sum() == 33 - 7 + 30
    true = split.train.inputs[:, 0].numpy() % 4 == 0
    assert (true & (split.train.labels.numpy() == 0)).sum() == 7
    assert split.train.roster.sizes.tolist() == [34, 34, 34] + [33] * 7


def clients_by_row(preparation: Preparation) -> tuple[np.ndarray, np.ndarray]:
    """The client and the label of every training row of the table, by the number of the row."""
    train = prepare_table(make_table(), preparation, 3).train
    numbers = train.inputs[:, 0].numpy().astype(int)
    client, labels = np.zeros(400, int), np.zeros(400, int)
    sizes = np.diff(train.offsets)
    client[numbers[train.rows]] = np.repeat(np.arange(len(train)), sizes)
    labels[numbers] = train.labels.numpy().astype(int)
    return client, labels


@pytest.mark.parametrize("partition", [Dirichlet(20, 0.3), IID(20)])
def test_labels_flipped_after_the_partition_leave_it_as_it_was(partition: Dirichlet | IID) -> None:
    """The same rows are flipped in either order. A partition by labels is another one if it sees the flipped labels."""
    clean, _ = clients_by_row(Preparation(partition))
    flips: dict[str, Any] = {"flip_positives": 0.3, "flip_negatives": 0.1}
    before, labels = clients_by_row(Preparation(partition, **flips))
    after, same_labels = clients_by_row(Preparation(partition, **flips, flip_order="after"))
    assert np.array_equal(labels, same_labels)
    assert (labels != (np.arange(400) % 4 == 0)).sum() == 30 + 30
    assert np.array_equal(after, clean)
    assert np.array_equal(before, clean) == isinstance(partition, IID)
    with pytest.raises(ValueError, match="flip_order is 'later'; use 'before' or 'after'"):
        Preparation(partition, flip_order="later")  # type: ignore[arg-type]


def test_validation_and_test_stay_as_loaded() -> None:
    clean = make_table()
    split = prepare_table(clean, Preparation(IID(4), remove_positives=0.9, flip_negatives=0.3), 0)
    assert split.validation is not None
    for part, loaded in ((split.validation, clean.validation), (split.test, clean.test)):
        assert loaded is not None
        assert np.array_equal(part.labels.numpy(), loaded.labels)
        assert np.array_equal(part.inputs.numpy(), loaded.inputs)
        assert part.clients is None


def test_metadata_names_the_clients_of_held_out_rows() -> None:
    split = prepare_table(make_table(), Preparation(ByMetadata()), 0)
    assert split.test.clients is not None
    assert set(split.test.clients) == set(split.train.names) == {"x", "y"}


def test_same_seed_same_split() -> None:
    preparation = Preparation(Dirichlet(10), flip_positives=0.2)
    first, again, different = (prepare_table(make_table(), preparation, seed).train for seed in (3, 3, 4))
    assert np.array_equal(first.rows, again.rows)
    assert torch.equal(first.labels, again.labels)
    assert not np.array_equal(first.rows, different.rows)


def test_embedded_dataset_prepares_into_48_grouped_clients() -> None:
    split = prepare_table(CreditCard().load(0), Preparation(), 0)
    assert len(split.train) == 48
    assert split.train.groups is not None
    assert split.train.groups.tolist()[:4] == ["00-03h", "00-03h", "00-03h", "03-06h"]
    assert split.validation is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": Rows(np.zeros((2, 1)), np.array([0, 2]))}, "train part: labels holds 2"),
        ({"test": Rows(np.zeros((2, 1)), np.array([0, 0]))}, "test part: labels holds no positives"),
        (
            {"test": Rows(np.zeros((3, 1)), np.array([0, 0, 1]))},
            "test part: labels holds 1 of the at least 2 positives",
        ),
        (
            {"validation": Rows(np.zeros((3, 1)), np.array([0, 1, 1]))},
            "validation part: labels holds 1 of the at least 2 negatives",
        ),
        ({"validation": Rows(np.full((2, 1), np.nan), np.array([0, 1]))}, "validation part: inputs holds 2 values"),
    ],
)
def test_errors_name_the_part(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_table(make_table()._replace(**change), Preparation(IID(2)), 0)


@pytest.mark.parametrize("name", ["remove_positives", "flip_positives", "flip_negatives", "positive_rate"])
def test_parameters_are_bounded(name: str) -> None:
    settings: dict[str, Any] = {name: 1.5}
    with pytest.raises(ValueError, match=rf"{name} is 1\.5; it must be .* below 1"):
        Preparation(Natural(), **settings)
