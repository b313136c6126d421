"""How many positives and negatives each part of a dataset has, beside the counts of the paper's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedauc.data.dataset import Dataset, Rows
from fedauc.data.imbalance import remove_positives


class Count(NamedTuple):
    """Positives and negatives of a part."""

    positives: int
    negatives: int


class Paper(NamedTuple):
    """The share of training positives that the paper removes from a dataset, and the counts it reports."""

    removed: float
    train: Count
    validation: Count
    test: Count


PAPER: Mapping[str, Paper] = {
    "cifar10": Paper(0.95, Count(224, 40_505), Count(505, 4_495), Count(1_000, 9_000)),
    "cifar100": Paper(0.5, Count(227, 44_546), Count(46, 4_954), Count(100, 9_900)),
    "chestmnist": Paper(0.5, Count(1_994, 74_480), Count(625, 10_594), Count(1_133, 21_300)),
    "medicare": Paper(0.0, Count(2_863, 4_028_889), Count(265, 1_059_078), Count(132, 1_085_053)),
}
"""The appendix's table of data statistics; its 10.00 % of CIFAR-100's test part is a slip for 1.00 %."""


def statistics(dataset: Dataset, seed: int) -> dict[str, Count]:
    """The counts of each part; of the training part after the paper's removal, where the paper has one."""
    table, paper = dataset.load(seed), PAPER.get(dataset.name)
    train = table.train
    if paper and paper.removed:
        # Only labels are counted, so only labels are taken apart.
        train = remove_positives(Rows(np.arange(len(train.labels)), train.labels), paper.removed, seed)
    parts = {"train": train, "validation": table.validation, "test": table.test}
    return {name: _count(rows.labels) for name, rows in parts.items() if rows is not None}


def _count(labels: np.ndarray) -> Count:
    positives = int((labels == 1).sum())
    return Count(positives, len(labels) - positives)
