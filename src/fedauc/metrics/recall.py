"""`recall@0.01`: the share of positives that are found at a false positive rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.curves import roc_points
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def recall_at_fpr(labels: ArrayLike, scores: ArrayLike, max_fpr: float) -> float:
    """The largest true positive rate of a threshold whose false positive rate is at most `max_fpr`.

    A threshold accepts all rows of a score or none, so tied rows are never split.

    >>> recall_at_fpr([0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 3.5, 5], max_fpr=0.2), recall_at_fpr([0, 1], [1, 1], 0.5)
    (0.5, 0.0)
    """
    if not 0 <= max_fpr < 1:
        raise ValueError(f"max_fpr is {max_fpr}; it must be at least 0 and below 1: at 1 every positive is found")
    rates, hits = roc_points(labels, scores)
    return float(hits[rates <= max_fpr].max())


@dataclass(frozen=True)
class RecallAtFPR(Metric):
    """The share of positives that are found while the false positive rate is at most the argument."""

    name: ClassVar[str] = "recall"
    max_fpr: float = option(0.05, "Largest false positive rate.", at_least=0, below=1)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The recall."""
        return Measurement(recall_at_fpr(labels, scores, self.max_fpr))
