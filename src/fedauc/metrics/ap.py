"""`ap`: the average precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.metrics.curves import count_at_thresholds
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """The mean of the precision at each distinct score, weighted by the recall gained there, without interpolation.

    >>> average_precision([0, 1, 0, 1], [1, 2, 3, 4])
    0.8333333333333333
    """
    false_positives, true_positives = count_at_thresholds(labels, scores)
    precision = true_positives[1:] / (true_positives[1:] + false_positives[1:])
    return float(np.sum(np.diff(true_positives) / true_positives[-1] * precision))


@dataclass(frozen=True)
class AveragePrecision(Metric):
    """The average precision: the area under the steps of the precision-recall curve."""

    name: ClassVar[str] = "ap"

    @property
    def label(self) -> str:
        """In capitals, as everybody writes it."""
        return "AP"

    @property
    def columns(self) -> tuple[str, ...]:
        """The column has the metric's long name."""
        return ("average_precision",)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The average precision."""
        return Measurement(average_precision(labels, scores))
