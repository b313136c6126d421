"""Clients and their rows, datasets, partitions, imbalance, label noise and weighting."""

from __future__ import annotations

from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.data.partitions import Assignment, Partition, find_partitions
from fedauc.data.preparation import (
    Preparation,
    Split,
    flip_labels,
    prepare_table,
    reduce_to_positive_rate,
    remove_positives,
)
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
    "TableParts",
    "class_scales",
    "examples",
    "find_datasets",
    "find_partitions",
    "flip_labels",
    "prepare_table",
    "reduce_to_positive_rate",
    "remove_positives",
    "row_scales",
]


def find_datasets() -> dict[str, type[Dataset]]:
    """Every dataset by name."""
    return find_members("fedauc.data.datasets", Dataset)  # type: ignore[type-abstract]
