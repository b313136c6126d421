"""Label noise: wrong labels at a known rate."""

from __future__ import annotations

import numpy as np

from fedauc import keys
from fedauc.data import bounds


def flip_labels(labels: np.ndarray, positives: float, negatives: float, seed: int) -> np.ndarray:
    """A copy in which exact shares of the positives and of the negatives, to the nearest row, change class.

    >>> flip_labels(np.array([1, 1, 0, 0]), positives=0.5, negatives=0.0, seed=0).sum()
    np.int64(1)
    """
    flipped = labels.copy()
    for label, rate, name in ((1, positives, "flip_positives"), (0, negatives, "flip_negatives")):
        bounds.share(name, rate)
        members = np.flatnonzero(labels == label)
        count = round(rate * len(members))
        if count and count == len(members):
            raise ValueError(f"{name} is {rate}; of {len(members)} rows that leaves none as they were: lower it")
        if count:
            flipped[members[keys.sample_indices(len(members), count, seed, name)]] = 1 - label
    return flipped
