"""A stratified split, keyed by the seed."""

from __future__ import annotations

import numpy as np

from fedauc import keys
from fedauc.data.checks import EVALUABLE, check_classes
from fedauc.data.dataset import Rows, Table


def hold_out(rows: Rows, fraction: float, seed: int, purpose: str) -> tuple[Rows, Rows]:
    """The rest, and the given fraction of each class, both in their old order.

    The fraction is taken to the nearest row, and of either class enough rows are held out to evaluate on.
    """
    check_classes(rows.labels)
    held = np.zeros(len(rows.labels), dtype=bool)
    for label in (0, 1):
        members = np.flatnonzero(rows.labels == label)
        _check_enough(len(members), label, purpose)
        count = max(EVALUABLE, round(fraction * len(members)))
        if count >= len(members):
            raise ValueError(
                f"{purpose}_fraction is {fraction}; it takes all {len(members)} rows labelled {label} and leaves none "
                "to train on: lower it"
            )
        held[members[keys.sample_indices(len(members), count, seed, purpose, label)]] = True
    return rows.take(np.flatnonzero(~held)), rows.take(np.flatnonzero(held))


def split(rows: Rows, test: float, validation: float, seed: int) -> Table:
    """Hold out a test part, then a validation part of the remainder (none if its fraction is 0)."""
    rest, test_rows = hold_out(rows, test, seed, "test")
    if validation == 0:
        return Table(rest, None, test_rows, "")
    train, validation_rows = hold_out(rest, validation, seed, "validation")
    return Table(train, validation_rows, test_rows, "")


def _check_enough(rows: int, label: int, purpose: str) -> None:
    needed = EVALUABLE + 1
    if rows < needed:
        raise ValueError(
            f"{rows} of the at least {needed} needed rows labelled {label} are there to split: {EVALUABLE} for the "
            f"{purpose} part and 1 to train on; add {needed - rows} or more"
        )
