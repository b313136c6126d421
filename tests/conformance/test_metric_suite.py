"""Every metric passes the suite that is exported for metrics of one's own, and the suite notices mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedauc.metrics import find_metrics, parse_metric
from fedauc.metrics.metric import Measurement, Metric
from fedauc.testing.metric import check_metric


@pytest.mark.parametrize(
    "text", [*find_metrics(), "pauc@1", "pauc@0.001", "tpauc@0:0.1", "tpauc@0.9:1", "recall@0", "ndcg@3", "precision@1"]
)
def test_a_metric_keeps_its_promises(text: str) -> None:
    check_metric(parse_metric(text))


@dataclass(frozen=True)
class Made(Metric):
    """The accuracy at the threshold 0.5, with a mistake built in."""

    name: ClassVar[str] = "made"
    mistake: int = 0

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        accuracy = float(np.mean((scores > 0.5) == labels))
        mistakes: dict[int, Callable[[], Measurement]] = {
            0: lambda: Measurement(accuracy),
            1: lambda: Measurement(1 - accuracy),
            2: lambda: Measurement(np.float64(accuracy)),
            3: lambda: Measurement(accuracy, 0.0, 1.0),
            4: lambda: Measurement(float(scores[0])),
            5: lambda: Measurement(0.5),
        }
        return mistakes[self.mistake]()


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (1, "higher must be better"),
        (2, "it must be a Python float"),
        (3, "has_interval is False, but measure gives"),
        (4, "for the same rows in another order"),
        (5, "does not tell them apart"),
    ],
)
def test_the_suite_notices_a_mistake(mistake: int, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_metric(Made(mistake))


def test_a_metric_from_outside_passes() -> None:
    check_metric(Made())
