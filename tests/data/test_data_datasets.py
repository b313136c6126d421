"""One suite for every dataset, then what each promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

import data_files
from fedauc.data import Dataset, Rows, TableParts, find_datasets
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.data.datasets.synthetic import Synthetic, SyntheticMedicare
from fedauc.data.datasets.table import Table
from fedauc.data.standardization import standardize_table
from fedauc.testing._expectations import check_configuration
from fedauc.testing.dataset import check_rows, check_seeds, list_parts


def table_file(folder: Path) -> Table:
    draw = np.random.default_rng(0)
    names = np.array(["a", "b", "c"])[np.arange(60) % 3]
    np.savez(folder / "rows.npz", x=draw.standard_normal((60, 4)), y=np.arange(60) % 5 == 0, client=names)
    return Table(str(folder / "rows.npz"), validation_fraction=0.2)


# A dataset that needs files gets them here; every other one must load with its defaults and without a network.
MADE: dict[str, Callable[[Path, pytest.MonkeyPatch], Dataset]] = {
    "table": lambda folder, patch: table_file(folder),
    "medicare-like": lambda folder, patch: SyntheticMedicare(rows=4000, positive_rate=0.01),
    "chest-stand-in": data_files.make_chest_stand_in,
    "chestmnist": data_files.make_chestmnist,
    "cifar10": data_files.make_cifar10,
    "cifar100": data_files.make_cifar100,
    "creditcard-full": data_files.make_creditcard_full,
    "medicare": data_files.make_medicare,
}

OFFICIAL = {"chestmnist", "medicare"}
"""Those whose publisher, or whose calendar, has split them: the seed changes nothing."""


@pytest.fixture(params=sorted(find_datasets()))
def dataset(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    return MADE[request.param](tmp_path, monkeypatch) if request.param in MADE else find_datasets()[request.param]()


def test_rows_are_complete_finite_and_of_both_classes_without_a_global_generator(dataset: Dataset) -> None:
    check_rows(dataset)


def test_same_seed_same_rows_other_seed_other_rows(dataset: Dataset) -> None:
    check_seeds(dataset, seeded=dataset.name not in OFFICIAL)


def test_configurations_are_frozen_and_comparable(dataset: Dataset) -> None:
    check_configuration(dataset)
    assert find_datasets()[dataset.name] is type(dataset)


def test_creditcard_counts_clients_and_groups() -> None:
    table = CreditCard(validation_fraction=0.1).load(0)
    assert sum(len(rows.labels) for rows in list_parts(table)) == 28_930
    assert sum(int(rows.labels.sum()) for rows in list_parts(table)) == 492
    assert table.test.labels.sum() == round(0.3 * 492)
    assert table.train.client is not None
    assert table.train.group is not None
    clients = np.unique(table.train.client)
    assert (len(clients), clients[0], clients[-1]) == (48, "hour-00", "hour-47")
    assert len(np.unique(table.train.group)) == 8
    # Hour 26 is two in the morning of the second day.
    assert set(table.train.group[table.train.client == "hour-26"]) == {"00-03h"}
    assert set(table.train.group[table.train.client == "hour-47"]) == {"21-24h"}


def test_creditcard_is_standardised_on_its_training_part() -> None:
    table = CreditCard().load(0)
    train = np.asarray(table.train.inputs, dtype=np.float64)
    # Float32 rounding, averaged over 20,000 rows.
    assert np.abs(train.mean(0)).max() < 1e-6
    assert np.abs(train.std(0) - 1).max() < 1e-6
    assert np.abs(np.asarray(table.test.inputs).mean(0)).max() > 1e-3


def test_standardising_keeps_the_scale_of_constant_columns() -> None:
    # 0.1 has no exact binary form: its mean over three rows rounds, and its deviation with it.
    train = Rows(np.array([[0.1, 1.0], [0.1, 3.0], [0.1, 5.0]]), np.array([0, 1, 0]))
    table = standardize_table(TableParts(train, None, train._replace(inputs=np.array([[2.1, 3.0]] * 3)), ""))
    assert np.allclose(table.train.inputs[:, 0], 0.0, atol=1e-7)
    assert np.allclose(table.test.inputs, [[2.0, 0.0]] * 3, atol=1e-7)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_synthetic_has_the_auc_it_says(shift: float) -> None:
    rows = Synthetic(clients=4000, rows_per_client=5, positive_rate=0.5, shift=shift, separation=1.5).load(0).test
    inputs = np.asarray(rows.inputs, dtype=np.float64)
    direction = inputs[rows.labels == 1].mean(0) - inputs[rows.labels == 0].mean(0)
    expected = norm.cdf(1.5 / math.sqrt(2 * (1 + shift**2)))
    # The standard error of an AUC from 10,000 of each class is below 0.005; three of them.
    assert roc_auc_score(rows.labels, inputs @ direction) == pytest.approx(expected, abs=0.015)
    assert rows.labels.sum() == 10_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CreditCard(test_fraction=0.0), "test_fraction is 0.0; it must be a number above 0 and below 1"),
        (lambda: CreditCard(test_fraction=math.nan), "test_fraction is nan"),
        (
            lambda: CreditCard(validation_fraction=1.0),
            "validation_fraction is 1.0; it must be a number of at least 0 and below 1",
        ),
        (lambda: CreditCard(hours_per_group=5), "hours_per_group is 5; it must divide 24"),
        (lambda: CreditCard(hours_per_group=0), "hours_per_group is 0; it must be a whole number of at least 1"),
        (lambda: Synthetic(clients=0), "clients is 0; it must be a whole number of at least 1"),
        (lambda: Synthetic(rows_per_client=2.5), "rows_per_client is 2.5"),  # type: ignore[arg-type]
        (lambda: Synthetic(features=-1), "features is -1"),
        (lambda: Synthetic(positive_rate=1.0), "positive_rate is 1.0; it must be a number above 0 and below 1"),
        (lambda: Synthetic(shift=-0.1), "shift is -0.1; it must be a finite number of at least 0"),
        (lambda: Synthetic(separation=math.inf), "separation is inf; it must be a finite number of at least 0"),
        (lambda: Synthetic(clients=1, rows_per_client=1), "an AUC needs two rows"),
        (lambda: Table("rows.xlsx"), "path is 'rows.xlsx'; it must end in .csv, .parquet, .arrow, .feather, .npz"),
        (lambda: Table("rows.csv", test="rows"), "path is 'rows'; it must end in"),
        (lambda: Table("rows.csv", label=""), "label is empty; name the column that holds 0 and 1"),
    ],
)
def test_parameters_are_bounded(make: Callable[[], Dataset], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
