"""How good a model is on held-out rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedauc.data.clients import Examples
from fedauc.guards import check_scores
from fedauc.interfaces import Algorithm, Model, Phase
from fedauc.metrics import average_precision, delong_interval, pair_auc
from fedauc.network import ModuleNetwork


class Quality(NamedTuple):
    """AUC with its DeLong interval and average precision; embeddings have a verification AUC and no interval."""

    auc: float
    low: float | None
    high: float | None
    average_precision: float | None


class Evaluator:
    """Scores held-out rows with a model of the run, and stops a run whose scores are all the same."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork) -> None:
        self._algorithm, self._network = algorithm, network

    def score_examples(self, model: Model, examples: Examples) -> np.ndarray:
        """Raw outputs in float64: AUC does not change under the monotone link, and raw outputs do not saturate."""
        return _to_array(self._network.predict(model, examples.inputs))

    def check_outputs(self, model: Model, inputs: Tensor, phase: Phase) -> Tensor:
        """Raw outputs; `TrainingStopped` where they are not finite or all the same."""
        outputs = self._network.predict(model, inputs)
        check_scores(self._algorithm, phase, outputs)
        return outputs

    def measure_quality(self, model: Model, examples: Examples, phase: Phase) -> Quality:
        """The quality of a model after a phase."""
        outputs = self.check_outputs(model, examples.inputs, phase)
        labels, scores = examples.labels.cpu().numpy(), _to_array(outputs)
        if outputs.ndim == 2:
            return Quality(pair_auc(scores, labels), None, None, None)
        interval = delong_interval(labels, scores)
        return Quality(interval.estimate, interval.low, interval.high, average_precision(labels, scores))


def _to_array(outputs: Tensor) -> np.ndarray:
    return np.asarray(outputs.double().cpu().numpy())
