"""Every partition assigns every row to one client, keyed by the seed; then what each partition promises."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.data import Partition, Rows, find_partitions
from fedauc.data.partitions import IID, ByLabel, ByMetadata, Dirichlet, Natural
from fedauc.testing.partition import DATA, LABELS, ROWS, check_partition

MEMBERS = sorted(find_partitions())
SEEDED = ["by-label", "dirichlet", "iid"]


def make_partition(name: str) -> Partition:
    return find_partitions()[name]()


@pytest.mark.parametrize("name", MEMBERS)
def test_every_row_has_one_client_keyed_by_the_seed_and_no_global_generator(name: str) -> None:
    check_partition(make_partition(name), seeded=name in SEEDED)


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert set(np.bincount(IID(30).assign(DATA, 0).client)) == {66, 67}  # 2000 / 30 = 66.7


def class_spread(concentration: float) -> float:
    """The variance over clients of their share of the positives, times N: 0 when all hold the same."""
    client = Dirichlet(50, concentration).assign(DATA, 0).client
    shares = np.bincount(client[LABELS == 1], minlength=50) / LABELS.sum()
    return float(shares.var() * 50)


def test_dirichlet_skew_grows_as_concentration_falls() -> None:
    spreads = [class_spread(concentration) for concentration in (100.0, 1.0, 0.1, 0.01)]
    assert spreads == sorted(spreads)
    # A share of Dir(c) over N has variance (1/N)(1 - 1/N) / (N c + 1): .0002 and .65 times N at the ends.
    assert spreads[0] < 0.002
    assert spreads[-1] > 0.2


def test_dirichlet_shares_have_their_mean_and_variance() -> None:
    # 400 draws of the share of client 0 of 5 at concentration 1: mean 1/5, variance (1/5)(4/5)/6 = .0267.
    counts = [(Dirichlet(5, 1.0).assign(DATA, seed).client[LABELS == 0] == 0).mean() for seed in range(400)]
    # Three standard errors: 3 sqrt(.0267 / 400) = .0245; the variance's own is below a tenth of it.
    assert np.mean(counts) == pytest.approx(0.2, abs=0.0245)
    assert np.var(counts) == pytest.approx(0.0267, rel=0.3)


def test_dirichlet_spreads_the_classes_independently() -> None:
    client = Dirichlet(20, 0.1).assign(DATA, 0).client
    shares = [np.bincount(client[label == LABELS], minlength=20) / (label == LABELS).sum() for label in (0, 1)]
    assert np.abs(shares[0] - shares[1]).sum() > 0.5


@pytest.mark.parametrize("concentration", [1e-9, 1e9])
def test_dirichlet_survives_extreme_concentrations(concentration: float) -> None:
    sizes = np.bincount(Dirichlet(100, concentration).assign(DATA, 0).client, minlength=100)
    # One client per class gets everything, or all get 20 rows to within two floors per class.
    assert (np.count_nonzero(sizes) <= 2) if concentration < 1 else (np.abs(sizes - 20).max() <= 2)


def test_by_label_gives_equal_sizes_and_few_mixed_clients() -> None:
    client = ByLabel(100, 2).assign(DATA, 0).client
    assert set(np.bincount(client)) == {20}
    # 200 positives fill 20 of the 200 shards exactly, so at most 20 clients hold any.
    assert len(np.unique(client[LABELS == 1])) <= 20


def test_natural_and_metadata_follow_their_columns() -> None:
    natural, metadata = Natural().assign(DATA, 0), ByMetadata().assign(DATA, 0)
    assert natural.names.tolist() == list(range(40))
    assert natural.groups is not None
    assert natural.groups.tolist() == ["x", "y"] * 20
    assert metadata.names.tolist() == ["x", "y"]
    assert np.array_equal(metadata.client, np.arange(ROWS) % 2)
    assert Natural().client_names(DATA) is DATA.client
    assert ByMetadata().client_names(DATA) is DATA.group
    assert IID().client_names(DATA) is None


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Natural(), "partition 'natural' needs a client column and the data has none: use"),
        (ByMetadata(), "partition 'by-metadata' needs a group column and the data has none: use"),
        (IID(11), "clients is 11; it must be at most the 10 training rows: lower clients"),
        (Dirichlet(11), "clients is 11; it must be at most the 10 training rows: lower clients"),
        (ByLabel(6, 2), "is 12; it must be at most the 10 training rows: lower either"),
    ],
)
def test_partitions_that_do_not_fit_are_refused(partition: Partition, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition.assign(Rows(np.zeros((10, 1)), LABELS[:10]), 0)


@pytest.mark.parametrize(
    ("member", "settings", "message"),
    [
        (IID, {"clients": 0}, "clients is 0; it must be a whole number of at least 1"),
        (Dirichlet, {"clients": 1.5}, "clients is 1.5"),
        (Dirichlet, {"concentration": 0.0}, "concentration is 0.0; it must be a finite number above 0"),
        (Dirichlet, {"concentration": float("nan")}, "concentration is nan"),
        (ByLabel, {"shards": 0}, "shards is 0; it must be a whole number of at least 1"),
    ],
)
def test_parameters_are_bounded(member: type[Partition], settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        member(**settings)
