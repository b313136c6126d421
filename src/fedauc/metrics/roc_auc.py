"""`auc`: the area under the ROC curve with DeLong's interval, or the verification AUC of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc.metrics.delong import delong_interval
from fedauc.metrics.embeddings import pair_auc
from fedauc.metrics.metric import Measurement, Metric


@dataclass(frozen=True)
class AUC(Metric):
    """The area under the ROC curve, with DeLong's interval; embeddings have a verification AUC."""

    name: ClassVar[str] = "auc"
    has_interval: ClassVar[bool] = True
    takes_embeddings: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """In capitals, as everybody writes it."""
        return "AUC"

    @property
    def columns(self) -> tuple[str, ...]:
        """The ends of the AUC's interval have no prefix."""
        return "auc", "low", "high"

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """The AUC and its interval; a verification AUC has none."""
        if scores.ndim == 2:
            return Measurement(pair_auc(scores, labels))
        interval = delong_interval(labels, scores)
        return Measurement(interval.estimate, interval.low, interval.high)
