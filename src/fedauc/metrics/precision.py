"""`precision@100`: the share of positives among the highest-scored rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.curves import count_at_thresholds
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def precision_at_top(labels: ArrayLike, scores: ArrayLike, top: int) -> float:
    """The share of positives among the `top` highest-scored rows, or among all rows where there are fewer.

    Where rows are tied at the last rank, it is the mean over their orders.

    >>> precision_at_top([0, 1, 1, 0], [4, 3, 2, 1], top=2), precision_at_top([0, 1, 1, 0], [1, 1, 1, 1], top=1)
    (0.5, 0.5)
    """
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1: raise top")
    false_positives, true_positives = count_at_thresholds(labels, scores)
    ends = false_positives + true_positives
    counted = min(top, int(ends[-1]))
    # Between two thresholds positives come at an even rate, in the mean over the orders of tied rows.
    return float(np.interp(counted, ends, true_positives) / counted)


@dataclass(frozen=True)
class PrecisionAtTop(Metric):
    """The share of positives among as many of the highest-scored rows as the argument says."""

    name: ClassVar[str] = "precision"
    top: int = option(100, "Number of rows.", at_least=1)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The precision."""
        return Measurement(precision_at_top(labels, scores, self.top))
