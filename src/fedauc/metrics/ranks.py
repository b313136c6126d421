"""The AUC from mid-ranks, and the input checks that all metrics share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The mean wins over all pairs of a positive and a negative, from mid-ranks in O((m + n) log(m + n)).

    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8])
    0.875
    """
    positive, values = check_rows(labels, scores)
    require_classes(positive)
    positives = int(positive.sum())
    # Mid-ranks are multiples of one half, so this sum is exact in float64.
    wins = mid_ranks(values)[positive].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * (len(values) - positives)))


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, where tied values share the mean of their ranks."""
    order = np.argsort(values)
    ordered = values[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    ends = np.append(starts[1:], len(values))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + 1 + ends) / 2, ends - starts)
    return ranks


def check_rows(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Check labels and scores; return which rows are positive, and the scores as float64."""
    classes, values = to_numpy(labels), to_numpy(scores).astype(np.float64)
    if classes.ndim != 1 or classes.shape != values.shape:
        raise ValueError(f"labels have shape {classes.shape}, scores {values.shape}; both must be (n,): reshape them")
    positive = classes == 1
    unknown = ~(positive | (classes == 0))
    if unknown.any():
        raise ValueError(f"labels hold {classes[unknown][0]}; they must be 0 or 1: map the positive class to 1")
    missing = np.isnan(values)
    if missing.any():
        raise ValueError(f"scores hold NaN, first in row {missing.argmax()}; a rank needs numbers: check the model")
    return positive, values


def require_classes(positive: np.ndarray, least: int = 1) -> None:
    """Refuse rows with fewer than `least` positives or negatives."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if min(positives, negatives) < least:
        counts = f"labels hold {positives} positives and {negatives} negatives"
        raise ValueError(f"{counts}; at least {least} of each class are needed: add rows of the rarer class")


def to_numpy(values: Any) -> np.ndarray:
    """An array from an array, a list, or a tensor on any device."""
    if hasattr(values, "detach"):  # as double, because numpy has no bfloat16
        values = values.detach().cpu().double() if values.is_floating_point() else values.cpu()
    return np.asarray(values)
