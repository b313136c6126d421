"""The points of a ROC curve, which the areas under parts of it and the average precision share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedauc.metrics.ranks import check_rows, require_classes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def count_at_thresholds(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """False and true positives at each distinct threshold, from the highest, which has none, to the lowest."""
    positive, values = check_rows(labels, scores)
    require_classes(positive)
    order = np.argsort(-values)
    ordered = values[order]
    last_of_ties = np.append(ordered[1:] != ordered[:-1], True)
    true_positives = np.cumsum(positive[order])[last_of_ties]
    return np.append(0, np.flatnonzero(last_of_ties) + 1 - true_positives), np.append(0, true_positives)


def roc_points(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at each distinct threshold, from (0, 0) to (1, 1)."""
    false_positives, true_positives = count_at_thresholds(labels, scores)
    return false_positives / false_positives[-1], true_positives / true_positives[-1]
