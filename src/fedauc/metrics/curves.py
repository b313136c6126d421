"""Areas under parts of curves: the partial AUC, and the average precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedauc.metrics.ranks import check_rows, require_classes


def partial_auc(labels: ArrayLike, scores: ArrayLike, max_fpr: float, standardized: bool = True) -> float:
    """The area A under the ROC curve up to the false positive rate f = `max_fpr`.

    Standardized (McClish 1989): (1 + (A - f²/2) / (f - f²/2)) / 2, which is 0.5 for chance and 1 for a perfect score.

    >>> partial_auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8], 0.5, standardized=False)
    0.375
    """
    if not 0 < max_fpr <= 1:
        raise ValueError(f"max_fpr is {max_fpr}; it must be above 0 and at most 1: use 1 for the whole curve")
    false_positives, true_positives = _count_at_thresholds(labels, scores)
    rates, hits = false_positives / false_positives[-1], true_positives / true_positives[-1]
    inside = rates <= max_fpr
    last_hit = np.interp(max_fpr, rates, hits)
    area = float(np.trapezoid(np.append(hits[inside], last_hit), np.append(rates[inside], max_fpr)))
    chance = max_fpr**2 / 2
    return (1 + (area - chance) / (max_fpr - chance)) / 2 if standardized else area


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """The mean of the precision at each distinct score, weighted by the recall gained there, without interpolation.

    >>> average_precision([0, 1, 0, 1], [1, 2, 3, 4])
    0.8333333333333333
    """
    false_positives, true_positives = _count_at_thresholds(labels, scores)
    precision = true_positives[1:] / (true_positives[1:] + false_positives[1:])
    return float(np.sum(np.diff(true_positives) / true_positives[-1] * precision))


def _count_at_thresholds(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """False and true positives at each distinct threshold, from the highest, which has none, to the lowest."""
    positive, values = check_rows(labels, scores)
    require_classes(positive)
    order = np.argsort(-values)
    ordered = values[order]
    last_of_ties = np.append(ordered[1:] != ordered[:-1], True)
    true_positives = np.cumsum(positive[order])[last_of_ties]
    return np.append(0, np.flatnonzero(last_of_ties) + 1 - true_positives), np.append(0, true_positives)
