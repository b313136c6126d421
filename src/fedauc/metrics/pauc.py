"""`pauc@0.05`: the area under the ROC curve up to a false positive rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.curves import roc_points
from fedauc.metrics.metric import Measurement, Metric

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def partial_auc(labels: ArrayLike, scores: ArrayLike, max_fpr: float, standardized: bool = True) -> float:
    """The area A under the ROC curve up to the false positive rate f = `max_fpr`.

    Standardized (McClish 1989): (1 + (A - f²/2) / (f - f²/2)) / 2, which is 0.5 for chance and 1 for a perfect score.

    >>> partial_auc([0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8], 0.5, standardized=False)
    0.375
    """
    if not 0 < max_fpr <= 1:
        raise ValueError(f"max_fpr is {max_fpr}; it must be above 0 and at most 1: use 1 for the whole curve")
    rates, hits = roc_points(labels, scores)
    inside = rates <= max_fpr
    last_hit = np.interp(max_fpr, rates, hits)
    area = float(np.trapezoid(np.append(hits[inside], last_hit), np.append(rates[inside], max_fpr)))
    chance = max_fpr**2 / 2
    return (1 + (area - chance) / (max_fpr - chance)) / 2 if standardized else area


@dataclass(frozen=True)
class PartialAUC(Metric):
    """The standardized area under the ROC curve up to a false positive rate; chance is 0.5."""

    name: ClassVar[str] = "pauc"
    max_fpr: float = option(0.05, "Largest false positive rate.", above=0, at_most=1)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The standardized partial AUC."""
        return Measurement(partial_auc(labels, scores, self.max_fpr))
