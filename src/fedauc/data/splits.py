"""Stratified splits into training, validation and test rows, keyed by the seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedauc import keys
from fedauc.data.checks import MIN_ROWS_PER_CLASS, check_classes
from fedauc.data.dataset import Rows, TableParts
from fedauc.data.io.memory import index_type


def split_table(rows: Rows, test: float, validation: float, seed: int) -> TableParts:
    """Hold out a test part, then a validation part of the remainder (none if its fraction is 0)."""
    if rows.numbers is None:
        rows = rows._replace(numbers=np.arange(len(rows.labels), dtype=index_type(len(rows.labels))))
    rest, test_rows = hold_out_rows(rows, test, seed, "test")
    train, validation_rows = hold_out_validation(rest, validation, seed)
    return TableParts(train, validation_rows, test_rows, "")


def hold_out_validation(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows | None]:
    """The remaining rows and the validation rows, None if their fraction is 0."""
    return hold_out_rows(rows, fraction, seed, "validation") if fraction else (rows, None)


def hold_out_rows(rows: Rows, fraction: float, seed: int, purpose: str) -> tuple[Rows, Rows]:
    """The remaining rows, and the given fraction of each class, both in their original order.

    The fraction is rounded to the nearest row, and of each class enough rows are held out to evaluate on.
    """
    check_classes(rows.labels)
    needed, counts = MIN_ROWS_PER_CLASS + 1, dict[int, int]()
    for label in (0, 1):
        members = int((rows.labels == label).sum())
        if members < needed:
            raise ValueError(
                f"{members} of the at least {needed} needed rows labelled {label} are there to split: "
                f"{MIN_ROWS_PER_CLASS} for the {purpose} part and 1 to train on; add {needed - members} or more"
            )
        counts[label] = max(MIN_ROWS_PER_CLASS, round(fraction * members))
        if counts[label] >= members:
            raise ValueError(
                f"{purpose}_fraction is {fraction}; it takes all {members} rows labelled {label} and leaves none to "
                "train on: lower it"
            )
    return sample_rows(rows, counts, seed, purpose)


def sample_rows(rows: Rows, counts: Mapping[int, int], seed: int, purpose: str) -> tuple[Rows, Rows]:
    """The remaining rows, and so many random rows of each label, both in their original order."""
    is_sampled = np.zeros(len(rows.labels), dtype=bool)
    for label, count in counts.items():
        members = np.flatnonzero(rows.labels == label)
        is_sampled[members[keys.sample_indices(len(members), count, seed, purpose, label)]] = True
    return rows.take(np.flatnonzero(~is_sampled)), rows.take(np.flatnonzero(is_sampled))
