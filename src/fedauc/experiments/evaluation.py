"""How good a model is on held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedauc.data.clients import Examples
from fedauc.experiments.private_evaluation import NoisedEvaluation
from fedauc.guards import Advice, check_scores
from fedauc.interfaces import Algorithm, Model, Objective, Phase
from fedauc.metrics import DEFAULT_METRICS
from fedauc.metrics.metric import Measurement, Metric
from fedauc.network import ModuleNetwork
from fedauc.training import Training
from fedauc.uploads import algorithm_state


class Quality(dict[str, Any]):
    """What the metrics say about a model: the columns of a record, which can be read as attributes too.

    >>> quality = Quality({"auc": 0.9, "pauc@0.05": 0.7})
    >>> quality.auc, quality["pauc@0.05"]
    (0.9, 0.7)
    """

    def __getattr__(self, column: str) -> Any:
        if column not in self:
            raise AttributeError(f"{column!r} was not measured; the columns are {', '.join(self)}")
        return self[column]


class RecordColumns(NamedTuple):
    """Which columns of a record are values of metrics: all of them, and the one by which rounds are compared.

    `names` are what the values are called on a screen.
    The first metric decides. It is compared on the validation rows, never on the test rows; None where there are none.
    """

    values: tuple[str, ...]
    validation: str | None
    names: tuple[str, ...]

    @staticmethod
    def of(metrics: Sequence[Metric], has_test: bool, has_validation: bool) -> RecordColumns:
        """The columns of metrics on the parts that there are."""
        tested = [metric.columns[0] for metric in metrics] if has_test else []
        decisive = f"validation_{metrics[0].columns[0]}" if has_validation else None
        names = [metric.text for metric in metrics] if has_test else []
        names += [f"validation_{metrics[0].text}"] if has_validation else []
        return RecordColumns((*tested, *([decisive] if decisive else [])), decisive, tuple(names))


class PersonalModels(NamedTuple):
    """The clients' states and names, from which the models of clients come that keep a part of the model."""

    training: Training
    names: np.ndarray

    @staticmethod
    def of(training: Training, names: np.ndarray) -> PersonalModels | None:
        """None where all clients share one model."""
        return PersonalModels(training, names) if training.algorithm.has_personal_models else None

    def report_unknown_clients(self, parts: Mapping[str, Examples | None]) -> None:
        """Say once how many rows belong to no training client, and so are scored with the initial head."""
        training_names = set(self.names.astype(str).tolist())
        for part, rows in parts.items():
            if rows is None:
                continue
            names = [] if rows.clients is None else rows.clients.astype(str).tolist()
            unknown = len(rows.labels) - sum(name in training_names for name in names)
            if unknown:
                logging.getLogger("fedauc").warning(
                    "%d of the %d %s rows name no training client; they are scored with the initial head",
                    unknown,
                    len(rows.labels),
                    part,
                )

    def build_models(self, model: Model) -> dict[str, Model]:
        """The model of every client that has been visited, by the client's name."""
        personal_model, states = self.training.algorithm.personal_model, self.training.engine.client_states()
        return {
            str(self.names[client]): personal_model(model, algorithm_state(state)) for client, state in states.items()
        }


@dataclass(frozen=True)
class Evaluator:
    """Measures models of a run on held-out rows, and stops a run whose scores are all the same."""

    algorithm: Algorithm
    network: ModuleNetwork
    metrics: tuple[Metric, ...]
    personal: PersonalModels | None = None
    advice: Advice = Advice()
    noised: NoisedEvaluation | None = None
    """How a private run is evaluated within its budget; None where held-out rows are public."""

    def __post_init__(self) -> None:
        objective = self.algorithm.objective
        if objective.takes_classes:
            for metric in self.metrics:
                if not metric.takes_classes:
                    needs = f"needs one score per row, and objective {objective.name!r} has a score for every class"
                    raise ValueError(f"metric {metric.text!r} {needs}; use metric 'ovr-auc', or 'class-auc@0'")
        if objective.takes_embeddings and tuple(metric.text for metric in self.metrics) != DEFAULT_METRICS:
            for metric in self.metrics:
                if not metric.takes_embeddings:
                    needs = f"needs one score per row, and objective {objective.name!r} gives embeddings"
                    raise ValueError(f"metric {metric.text!r} {needs}; use metric 'auc'")

    def check_outputs(self, model: Model, inputs: Tensor, phase: Phase) -> Tensor:
        """Raw outputs; `TrainingStopped` where they are not finite or all the same."""
        outputs = self.network.predict(model, inputs)
        check_scores(self.algorithm, phase, outputs, self.advice)
        return outputs

    def measure_model(self, model: Model, phase: Phase, validation: Examples | None, test: Examples | None) -> Quality:
        """The columns of a record: every metric on the test rows, and the first one on the validation rows."""
        if self.noised is not None:
            return self._estimate_quality(self.noised, model, phase, {"test": test, "validation": validation})
        quality = Quality()
        if test is not None:
            labels, scores = self._score_examples(model, test, phase)
            for metric in self.metrics:
                quality |= measure_columns(metric, labels, scores)
        if validation is not None:
            labels, scores = self._score_examples(model, validation, phase)
            measured = _measure_ranking(self.metrics[0], labels, scores)
            quality[f"validation_{self.metrics[0].columns[0]}"] = measured.value
        return quality

    def _estimate_quality(
        self, noised: NoisedEvaluation, model: Model, phase: Phase, parts: Mapping[str, Examples | None]
    ) -> Quality:
        """The AUC from noised histograms, None where the noise hides it; other metrics are empty.

        The run is not stopped where all scores are the same, since that would reveal exact scores.
        """
        quality = Quality()
        for part, examples in parts.items():
            if examples is None:
                continue
            interval = noised.measure_auc(self.score_examples(model, examples), examples, part, phase.round)
            if part == "validation":
                quality["validation_auc"] = None if interval is None else interval.estimate
                continue
            for metric in self.metrics:
                quality |= dict.fromkeys(metric.columns)
            if interval is not None:
                quality |= {"auc": interval.estimate, "low": interval.low, "high": interval.high}
        return quality

    def score_examples(self, model: Model, examples: Examples) -> np.ndarray:
        """Scores in float64; those of clients that keep a part of the model come from their personal models."""
        return _to_array(self.algorithm.objective.to_ranking(self._predict_examples(model, examples)))

    def _score_examples(self, model: Model, examples: Examples, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        outputs = self._predict_examples(model, examples)
        check_scores(self.algorithm, phase, outputs, self.advice)
        return examples.labels.cpu().numpy(), _to_array(self.algorithm.objective.to_ranking(outputs))

    def _predict_examples(self, model: Model, examples: Examples) -> Tensor:
        outputs = self.network.predict(model, examples.inputs)
        if self.personal is None or examples.clients is None:
            return outputs
        models = self.personal.build_models(model)
        names, owners = np.unique(examples.clients.astype(str), return_inverse=True)
        for number, name in enumerate(names.tolist()):
            if name in models:
                rows = np.flatnonzero(owners == number)
                outputs[rows] = self.network.predict(models[name], examples.inputs[rows])
        return outputs


def score_rows(network: ModuleNetwork, model: Model, inputs: Tensor, objective: Objective | None = None) -> np.ndarray:
    """Scores in float64: raw outputs, which do not saturate, or what the objective ranks rows by."""
    outputs = network.predict(model, inputs)
    return _to_array(outputs if objective is None else objective.to_ranking(outputs))


def measure_columns(metric: Metric, labels: np.ndarray, scores: np.ndarray) -> dict[str, float | None]:
    """A metric's columns; they are empty where the metric is not defined for embeddings."""
    if scores.ndim == 2 and not (metric.takes_embeddings or metric.takes_classes):
        return dict.fromkeys(metric.columns)
    return dict(zip(metric.columns, _measure_ranking(metric, labels, scores), strict=False))


def _measure_ranking(metric: Metric, labels: np.ndarray, scores: np.ndarray) -> Measurement:
    """What a metric measures; a metric that returns something else is refused."""
    measured: Any = metric.measure(labels, scores)
    if not isinstance(measured, Measurement):
        kind = type(measured).__name__
        raise ValueError(
            f"metric {metric.text!r} has returned a {kind}; it must return a Measurement: write Measurement(value)"
        )
    return measured


def _to_array(outputs: Tensor) -> np.ndarray:
    return np.asarray(outputs.double().cpu().numpy())
