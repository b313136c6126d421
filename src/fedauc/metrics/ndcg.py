"""`ndcg@100`: the normalized discounted cumulative gain of the highest-scored rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.curves import count_at_thresholds
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def normalized_discounted_gain(labels: ArrayLike, scores: ArrayLike, top: int = 0) -> float:
    """The sum of 1 / log₂(1 + r) over the ranks r of positives up to `top`, divided by the largest that is possible.

    Ranks count from 1, the highest score first; `top=0` counts all. Tied rows share the mean gain of their ranks, as
    in scikit-learn, so that their order in the table does not matter (McSherry & Najork 2008, "Computing information
    retrieval performance measures efficiently in the presence of tied scores").

    >>> round(normalized_discounted_gain([1, 0, 1], [3, 2, 1]), 4), normalized_discounted_gain([0, 1], [1, 2], top=1)
    (0.9197, 1.0)
    """
    if top < 0:
        raise ValueError(f"top is {top}; it must be at least 0: use 0 for all ranks")
    false_positives, true_positives = count_at_thresholds(labels, scores)
    ends = false_positives + true_positives
    gains = 1 / np.log2(np.arange(2, ends[-1] + 2))
    if top:
        gains[top:] = 0
    summed = np.concatenate([[0.0], np.cumsum(gains)])
    shares = np.diff(true_positives) / np.diff(ends)
    return float(np.sum(shares * np.diff(summed[ends])) / summed[true_positives[-1]])


@dataclass(frozen=True)
class NDCG(Metric):
    """The normalized discounted cumulative gain of as many of the highest ranks as the argument says; 0 is all."""

    name: ClassVar[str] = "ndcg"
    top: int = option(100, "Number of ranks that count; 0 counts all.", at_least=0)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The NDCG."""
        return Measurement(normalized_discounted_gain(labels, scores, self.top))
