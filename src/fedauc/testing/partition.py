"""The suite of a partition: every row has one client, keyed by the seed."""

from __future__ import annotations

import numpy as np

from fedauc.data.dataset import Rows
from fedauc.data.partitions import Partition
from fedauc.testing._expectations import check_configuration, expect, untouched_generators

ROWS = 2000
LABELS = (np.arange(ROWS) % 10 == 0).astype(np.int8)
DATA = Rows(np.zeros((ROWS, 1)), LABELS, np.arange(ROWS) % 40, np.array(["x", "y"])[np.arange(ROWS) % 2])
"""2000 rows of 40 clients in two groups, 200 of them positive."""


def check_partition(partition: Partition, rows: Rows = DATA, seeded: bool = True) -> None:
    """Check a partition on your rows or on 2000 of its own; with `seeded=False` the seed must change nothing."""
    check_configuration(partition, Partition)
    check_assignment(partition, rows)
    with untouched_generators("the partition"):
        first, again, different = (partition.assign(rows, seed).client for seed in (5, 5, 6))
    expect(np.array_equal(first, again), "assigning twice with one seed gives different clients")
    unchanged = np.array_equal(first, different)
    expect(unchanged != seeded, "another seed must assign rows differently" if seeded else "the seed must not matter")


def check_assignment(partition: Partition, rows: Rows = DATA) -> None:
    """Every row has the number of a client, and every client a name of its own."""
    assignment, count = partition.assign(rows, 0), len(rows.labels)
    shape = assignment.client.shape
    expect(shape == (count,), f"the clients of {count} rows have the shape {shape}")
    expect(assignment.client.dtype.kind == "i", f"clients are {assignment.client.dtype}; they must be integers")
    inside = assignment.client.min() >= 0 and assignment.client.max() < len(assignment.names)
    expect(inside, f"client numbers must be from 0 to {len(assignment.names) - 1}")
    expect(len(set(assignment.names.tolist())) == len(assignment.names), "two clients have one name")
