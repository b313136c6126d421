"""Making positives rarer, in the training part only."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from fedauc import keys
from fedauc.data import bounds
from fedauc.data.dataset import Rows


def remove_positives(rows: Rows, fraction: float, seed: int) -> Rows:
    """Drop that fraction of the positives at random; what is kept is rounded down (95 % of 4,495 leaves 224)."""
    bounds.share("remove_positives", fraction)
    count = int((rows.labels == 1).sum())
    # Binary floats would keep 9 of 100 after removing 0.9; the decimal that was written keeps 10.
    kept = int((1 - Fraction(str(fraction))) * count)
    if kept == 0:
        raise ValueError(f"remove_positives is {fraction}; of {count} positives that leaves none: lower it")
    return _keep(rows, kept, seed, "remove_positives")


def to_positive_rate(rows: Rows, rate: float, seed: int) -> Rows:
    """Drop positives at random until at most `rate` of the rows are positive, and no more than that needs."""
    bounds.fraction("positive_rate", rate)
    count = int((rows.labels == 1).sum())
    exact, negatives = Fraction(str(rate)), len(rows.labels) - count
    if Fraction(count, len(rows.labels)) < exact:
        have = count / len(rows.labels)
        raise ValueError(f"positive_rate is {rate}; the data's rate is already lower, {have:.6g}: use at most that")
    kept = int(exact * negatives / (1 - exact))
    if kept == 0:
        least = 1 / (negatives + 1)
        raise ValueError(
            f"positive_rate is {rate}; with {negatives} negatives that leaves no positive: use {least:.3g}"
        )
    return _keep(rows, kept, seed, "positive_rate")


def _keep(rows: Rows, kept: int, seed: int, purpose: str) -> Rows:
    positives = np.flatnonzero(rows.labels == 1)
    chosen = positives[keys.sample_indices(len(positives), kept, seed, purpose)]
    return rows.take(np.sort(np.concatenate([np.flatnonzero(rows.labels != 1), chosen])))
