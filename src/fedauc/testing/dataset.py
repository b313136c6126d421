"""The suite of a dataset: complete rows of both classes, keyed by the seed."""

from __future__ import annotations

import numpy as np

from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.testing._expectations import check_configuration, expect, untouched_generators


def check_dataset(dataset: Dataset, seeded: bool = True) -> None:
    """Check a dataset. With `seeded=False` its split is given, so that the seed must change nothing."""
    check_configuration(dataset, Dataset)
    check_rows(dataset)
    check_seeds(dataset, seeded)


def list_parts(table: TableParts) -> list[Rows]:
    """Training, validation (if there are any) and test rows."""
    return [rows for rows in (table.train, table.validation, table.test) if rows is not None]


def check_rows(dataset: Dataset) -> None:
    """Rows are complete, finite, of one shape, and of both classes in each part; loading uses no global generator."""
    with untouched_generators("the dataset"):
        table = dataset.load(0)
    shapes = {tuple(rows.inputs.shape[1:]) for rows in list_parts(table)}
    expect(len(shapes) == 1, f"the rows of the parts have different shapes: {shapes}")
    for rows in list_parts(table):
        expect(len(rows.inputs) == len(rows.labels), f"{len(rows.inputs)} rows have {len(rows.labels)} labels")
        labels = set(np.unique(rows.labels).tolist())
        expect(labels == {0, 1}, f"the labels are {labels}; every part needs 0 and 1, and nothing else")
        expect(np.isfinite(np.asarray(rows.inputs)).all(), "an input is not finite")
        for name, column in (("client", rows.client), ("group", rows.group)):
            expect(column is None or len(column) == len(rows.labels), f"the {name} column lacks rows")
    expect(table.note, "the table has no note, which says in one line what the rows are")
    expect("\n" not in table.note + dataset.about, "note and about must be one line each")


def check_seeds(dataset: Dataset, seeded: bool) -> None:
    """The same seed gives the same rows; another seed gives others, unless the split is given."""
    first, again, different = dataset.load(1), dataset.load(1), dataset.load(2)
    for part, repeated in zip(list_parts(first), list_parts(again), strict=True):
        same = np.array_equal(part.inputs, repeated.inputs) and np.array_equal(part.labels, repeated.labels)
        expect(same, "loading twice with one seed gives different rows")
    unchanged = np.array_equal(first.train.inputs, different.train.inputs)
    expect(unchanged != seeded, "another seed must give other rows" if seeded else "the seed must not change the rows")
