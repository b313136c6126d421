"""Rarer positives and wrong labels, in exact numbers."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.data import Rows, flip_labels, reduce_to_positive_rate, remove_positives


def rows(positives: int, negatives: int) -> Rows:
    """Positives spread among the negatives; a row's input is its number."""
    size = positives + negatives
    labels = np.zeros(size, dtype=np.int8)
    labels[np.linspace(0, size - 1, positives).astype(int)] = 1
    return Rows(np.arange(size, dtype=np.float64)[:, None], labels, np.arange(size) % 7)


@pytest.mark.parametrize(
    ("positives", "fraction", "remaining"),
    [
        (4495, 0.95, 224),  # CIFAR-10
        (455, 0.5, 227),  # CIFAR-100
        (3988, 0.5, 1994),  # ChestMNIST
        (100, 0.9, 10),  # in binary 1 - 0.9 is just below 0.1
        (100, 0.07, 93),  # in binary 0.07 * 100 is just above 7
        (5, 0.0, 5),
    ],
)
def test_removal_keeps_the_rounded_down_rest(positives: int, fraction: float, remaining: int) -> None:
    original = rows(positives, 6000)
    reduced = remove_positives(original, fraction, 0)
    assert reduced.labels.sum() == remaining
    assert (reduced.labels == 0).sum() == 6000
    numbers = np.asarray(reduced.inputs)[:, 0].astype(int)
    assert (np.diff(numbers) > 0).all()
    assert np.array_equal(original.labels[numbers], reduced.labels)
    assert reduced.client is not None
    assert np.array_equal(reduced.client, numbers % 7)


@pytest.mark.parametrize(
    ("rate", "remaining"),
    [(0.1, 100), (0.05, 47), (0.01, 9)],  # largest k with k / (k + 900) <= rate: 100, 47.4, 9.1
)
def test_rate_drops_no_more_than_needed(rate: float, remaining: int) -> None:
    assert reduce_to_positive_rate(rows(100, 900), rate, 0).labels.sum() == remaining


@pytest.mark.parametrize(("change", "amount"), [(remove_positives, 0.5), (reduce_to_positive_rate, 0.02)])
def test_removal_is_keyed_by_the_seed(change: type, amount: float) -> None:
    first, again, different = (np.asarray(change(rows(100, 900), amount, seed).inputs) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, different)


@pytest.mark.parametrize(
    ("change", "amount", "message"),
    [
        (remove_positives, 0.95, "remove_positives is 0.95; of 10 positives that leaves none: lower it"),
        (remove_positives, 1.0, "remove_positives is 1.0; it must be at least 0 and below 1"),
        (remove_positives, -0.1, "remove_positives is -0.1"),
        (reduce_to_positive_rate, 0.2, "positive_rate is 0.2; the data's rate is already lower, 0.1: use at most that"),
        (
            reduce_to_positive_rate,
            0.001,
            "positive_rate is 0.001; with 90 negatives that leaves no positive: use 0.011",
        ),
        (reduce_to_positive_rate, 0.0, "positive_rate is 0.0; it must be above 0 and below 1"),
    ],
)
def test_impossible_removals_are_refused(change: type, amount: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change(rows(10, 90), amount, 0)


@pytest.mark.parametrize(
    ("positives", "negatives", "lost", "gained"),
    [(0.2, 0.0, 45, 0), (0.0, 0.1, 0, 78), (0.2, 0.1, 45, 78)],  # .2 * 224 = 44.8 and .1 * 776 = 77.6
)
def test_flips_are_exact_shares_of_each_clean_class(positives: float, negatives: float, lost: int, gained: int) -> None:
    clean = rows(224, 776).labels
    noisy = flip_labels(clean, positives, negatives, 0)
    assert ((clean == 1) & (noisy == 0)).sum() == lost
    assert ((clean == 0) & (noisy == 1)).sum() == gained
    assert clean.sum() == 224
    assert np.array_equal(noisy, flip_labels(clean, positives, negatives, 0))
    assert not np.array_equal(noisy, flip_labels(clean, positives, negatives, 1))


def test_each_side_flips_the_same_rows_alone_and_together() -> None:
    clean = rows(224, 776).labels
    positives_only, both = flip_labels(clean, 0.2, 0.0, 0), flip_labels(clean, 0.2, 0.1, 0)
    assert np.array_equal(positives_only[clean == 1], both[clean == 1])


@pytest.mark.parametrize(
    ("positives", "negatives", "message"),
    [
        (1.0, 0.0, "flip_positives is 1.0; it must be at least 0 and below 1"),
        (0.0, -0.1, "flip_negatives is -0.1; it must be at least 0 and below 1"),
        (0.9, 0.0, "flip_positives is 0.9; of 2 rows that leaves none as they were: lower it"),
        (0.0, 0.9, "flip_negatives is 0.9; of 3 rows that leaves none as they were: lower it"),
    ],
)
def test_impossible_flips_are_refused(positives: float, negatives: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flip_labels(rows(2, 3).labels, positives, negatives, 0)
