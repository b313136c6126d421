"""`ovr-auc`: the mean over classes of the AUC of each class against the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.metrics.class_auc import one_class_auc
from fedauc.metrics.metric import Measurement, Metric
from fedauc.metrics.ranks import auc, to_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def one_vs_rest_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The mean over classes c of the AUC of rows of class c against all others, by column c of the scores `[n, C]`.

    Labels are numbers of classes, all of which must occur. For one score per row, and labels 0 and 1, it is the AUC.
    Unlike scikit-learn's, the columns need not be probabilities.

    >>> one_vs_rest_auc([0, 1, 2], [[0.9, 0.2, 0.1], [0.5, 0.1, 0.2], [0.1, 0.3, 0.7]])
    0.6666666666666666
    """
    values = to_numpy(scores)
    if values.ndim == 1:
        return auc(labels, scores)
    return float(np.mean([one_class_auc(labels, values, column) for column in range(values.shape[1])]))


@dataclass(frozen=True)
class OneVsRestAUC(Metric):
    """The mean over classes of the AUC of each class against the rest."""

    name: ClassVar[str] = "ovr-auc"
    takes_classes: ClassVar[bool] = True

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The macro one-vs-rest AUC."""
        return Measurement(one_vs_rest_auc(labels, scores))
