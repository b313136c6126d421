"""Data: clients and their rows, datasets (one file each), partitions, imbalance, label noise and weighting."""

from __future__ import annotations

from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.data.imbalance import remove_positives, to_positive_rate
from fedauc.data.noise import flip_labels
from fedauc.data.partitions import Assignment, Partition, partitions
from fedauc.data.prepare import Preparation, Split, prepare
from fedauc.data.weighting import class_scales, row_scales
from fedauc.discovery import find_members

__all__ = [
    "Assignment",
    "Clients",
    "Dataset",
    "Examples",
    "Partition",
    "Preparation",
    "Rows",
    "Split",
    "Table",
    "class_scales",
    "datasets",
    "examples",
    "flip_labels",
    "partitions",
    "prepare",
    "remove_positives",
    "row_scales",
    "to_positive_rate",
]


def datasets() -> dict[str, type[Dataset]]:
    """Every dataset by name."""
    return find_members("fedauc.data", Dataset)  # type: ignore[type-abstract]
