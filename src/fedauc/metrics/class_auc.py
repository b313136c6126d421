"""`class-auc@3`: the AUC of one class of several against the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedauc.fields import option
from fedauc.metrics.metric import Measurement, Metric
from fedauc.metrics.ranks import auc, to_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def one_class_auc(labels: ArrayLike, scores: ArrayLike, number: int) -> float:
    """The AUC of the rows of one class against all others, by its column of the scores `[n, C]`.

    One score per row is that of class 1 of two classes, and its negative that of class 0.

    >>> one_class_auc([0, 1, 2], [[0.9, 0.2, 0.1], [0.5, 0.1, 0.2], [0.1, 0.3, 0.7]], 2)
    1.0
    """
    values, classes = to_numpy(scores), to_numpy(labels)
    if values.ndim == 1:
        values = np.stack([-values, values], axis=1)
    if number >= values.shape[1]:
        raise ValueError(f"class {number} has no scores; there are classes 0 to {values.shape[1] - 1}")
    return auc(classes == number, values[:, number])


@dataclass(frozen=True)
class ClassAUC(Metric):
    """The AUC of the class with the number that the argument gives, against the rest."""

    name: ClassVar[str] = "class-auc"
    takes_classes: ClassVar[bool] = True
    number: int = option(0, "Number of the class.", at_least=0)

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The AUC of the class."""
        return Measurement(one_class_auc(labels, scores, self.number))
