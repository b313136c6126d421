"""`tpauc@0.5:0.1`: the area under the ROC curve above a true positive rate and up to a false positive rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.curves import roc_points
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def two_way_partial_auc(labels: ArrayLike, scores: ArrayLike, min_tpr: float, max_fpr: float) -> float:
    """The share of the rectangle [0, f] x [t, 1] that lies under the ROC curve R: f = `max_fpr`, t = `min_tpr`.

    That is the integral of max(R(x) - t, 0) over x from 0 to f, divided by f (1 - t) (Yang, Lu, Lyu & Hu 2019, "Two-way
    partial AUC and its properties", there without the division). A perfect score has 1. Where f·n and t·m are whole
    numbers and no scores are tied, it is the mean wins of the (1 - t)·m lowest positives over the f·n highest
    negatives. Chance has max(f - t, 0)² / (2 f (1 - t)), which is 0 where f <= t.

    >>> two_way_partial_auc([0, 0, 0, 0, 1, 1, 1, 1], [1, 2, 3, 6, 4, 5, 7, 8], min_tpr=0.5, max_fpr=0.5)
    0.5
    """
    if not 0 <= min_tpr < 1:
        raise ValueError(f"min_tpr is {min_tpr}; it must be at least 0 and below 1: use 0 for the one-way partial AUC")
    if not 0 < max_fpr <= 1:
        raise ValueError(f"max_fpr is {max_fpr}; it must be above 0 and at most 1: use 1 for no bound")
    rates, hits = roc_points(labels, scores)
    inside = (hits > min_tpr) & (rates <= max_fpr)
    # The curve crosses the lower side of the rectangle at `enters` and its right side at `leaves`.
    enters, leaves = np.interp(min_tpr, hits, rates), np.interp(max_fpr, rates, hits)
    if enters >= max_fpr:
        return 0.0
    heights = np.concatenate([[0.0], hits[inside] - min_tpr, [leaves - min_tpr]])
    area = np.trapezoid(heights, np.concatenate([[enters], rates[inside], [max_fpr]]))
    return float(area / (max_fpr * (1 - min_tpr)))


@dataclass(frozen=True)
class TwoWayPartialAUC(Metric):
    """The share under the ROC curve of the region with TPR at least the first and FPR at most the second argument."""

    name: ClassVar[str] = "tpauc"
    min_tpr: float = option(0.5, "Smallest true positive rate.", at_least=0, below=1)
    max_fpr: float = option(0.5, "Largest false positive rate.", above=0, at_most=1)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The two-way partial AUC."""
        return Measurement(two_way_partial_auc(labels, scores, self.min_tpr, self.max_fpr))
