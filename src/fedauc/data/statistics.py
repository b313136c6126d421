"""The number of positives and negatives in each part of a dataset, next to the counts of the paper's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedauc.data.dataset import Dataset, Rows
from fedauc.data.preparation import remove_positives


class ClassCounts(NamedTuple):
    """Positives and negatives of a part."""

    positives: int
    negatives: int


class PaperCounts(NamedTuple):
    """The share of training positives that the paper removes from a dataset, and the counts it reports."""

    removed: float
    train: ClassCounts
    validation: ClassCounts
    test: ClassCounts


PAPER_COUNTS: Mapping[str, PaperCounts] = {
    "cifar10": PaperCounts(0.95, ClassCounts(224, 40_505), ClassCounts(505, 4_495), ClassCounts(1_000, 9_000)),
    "cifar100": PaperCounts(0.5, ClassCounts(227, 44_546), ClassCounts(46, 4_954), ClassCounts(100, 9_900)),
    "chestmnist": PaperCounts(0.5, ClassCounts(1_994, 74_480), ClassCounts(625, 10_594), ClassCounts(1_133, 21_300)),
    "medicare": PaperCounts(
        0.0, ClassCounts(2_863, 4_028_889), ClassCounts(265, 1_059_078), ClassCounts(132, 1_085_053)
    ),
}
"""The appendix's table of data statistics; its 10.00 % of CIFAR-100's test part is a misprint of 1.00 %."""


def count_classes(dataset: Dataset, seed: int) -> dict[str, ClassCounts]:
    """The counts of each part; those of the training part after the paper's removal of positives, if there is one."""
    table, paper = dataset.load(seed), PAPER_COUNTS.get(dataset.name)
    train = table.train
    if paper and paper.removed:
        # Only labels are counted, so only labels are copied.
        train = remove_positives(Rows(np.arange(len(train.labels)), train.labels), paper.removed, seed)
    parts = {"train": train, "validation": table.validation, "test": table.test}
    labels = {name: rows.labels for name, rows in parts.items() if rows is not None}
    return {name: ClassCounts(int((part == 1).sum()), int((part != 1).sum())) for name, part in labels.items()}
