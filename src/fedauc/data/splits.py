"""Stratified splits into training, validation and test rows, keyed by the seed."""

from __future__ import annotations

import numpy as np

from fedauc import keys
from fedauc.data.checks import MIN_ROWS_PER_CLASS, check_classes
from fedauc.data.dataset import Rows, Table


def split_table(rows: Rows, test: float, validation: float, seed: int) -> Table:
    """Hold out a test part, then a validation part of the remainder (none if its fraction is 0)."""
    rest, test_rows = hold_out_rows(rows, test, seed, "test")
    train, validation_rows = hold_out_validation(rest, validation, seed)
    return Table(train, validation_rows, test_rows, "")


def hold_out_validation(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows | None]:
    """The remaining rows and the validation rows, None if their fraction is 0."""
    return hold_out_rows(rows, fraction, seed, "validation") if fraction else (rows, None)


def hold_out_rows(rows: Rows, fraction: float, seed: int, purpose: str) -> tuple[Rows, Rows]:
    """The remaining rows, and the given fraction of each class, both in their original order.

    The fraction is rounded to the nearest row, and of each class enough rows are held out to evaluate on.
    """
    check_classes(rows.labels)
    is_held = np.zeros(len(rows.labels), dtype=bool)
    needed = MIN_ROWS_PER_CLASS + 1
    for label in (0, 1):
        members = np.flatnonzero(rows.labels == label)
        if len(members) < needed:
            raise ValueError(
                f"{len(members)} of the at least {needed} needed rows labelled {label} are there to split: "
                f"{MIN_ROWS_PER_CLASS} for the {purpose} part and 1 to train on; add {needed - len(members)} or more"
            )
        count = max(MIN_ROWS_PER_CLASS, round(fraction * len(members)))
        if count >= len(members):
            raise ValueError(
                f"{purpose}_fraction is {fraction}; it takes all {len(members)} rows labelled {label} and leaves none "
                "to train on: lower it"
            )
        is_held[members[keys.sample_indices(len(members), count, seed, purpose, label)]] = True
    return rows.take(np.flatnonzero(~is_held)), rows.take(np.flatnonzero(is_held))
