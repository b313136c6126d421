"""What several client rules share: the gradient of a loss on rows, the plain step, and amplification."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fedauc.interfaces import Algorithm, Batch, Model, Network, Objective, PointObjective


class Gradient(NamedTuple):
    """A gradient with respect to the weights, the buffers after the forward pass, and the monitored value."""

    weights: Tensor
    buffers: Tensor
    value: Tensor


def point_gradient(objective: PointObjective, network: Network, model: Model, batch: Batch) -> Gradient:
    """The gradient of sum_i weights_i · loss(score_i, label_i)."""
    scored = network.score(model, batch.inputs)
    scores, link = objective.link(scored.outputs)
    gradient = scored.pullback(batch.weights * objective.slope(scores, batch.labels) * link)
    value = (batch.weights * objective.value(scores, batch.labels)).sum(-1)
    return Gradient(gradient, scored.buffers, value)


def descend(weights: Tensor, direction: Tensor, step_size: float, weight_decay: float) -> Tensor:
    """w - η (g + decay · w)."""
    if weight_decay:
        direction = direction + weight_decay * weights
    return weights - step_size * direction


def amplify(start: Model, end: Model, factor: float) -> Model:
    """x_start + γ (x_end - x_start), written so that γ = 1 gives x_end to the bit; buffers are statistics, and stay."""
    return Model(end.weights + (factor - 1) * (end.weights - start.weights), end.buffers)


def check_amplify(factor: float) -> None:
    """Refuse factors that would not move forwards."""
    if not factor > 0:
        raise ValueError(f"amplify is {factor}; it must be above 0 (1 leaves the period's progress as it is)")


def check_objective(algorithm: Algorithm, kind: type[Objective], example: str) -> None:
    """Refuse an objective of another kind."""
    objective = algorithm.objective
    if not isinstance(objective, kind):
        name = getattr(objective, "name", type(objective).__name__)
        raise ValueError(f"objective is {name!r}; {algorithm.name} needs a {kind.__name__}, such as {example!r}")
