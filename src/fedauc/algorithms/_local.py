"""What algorithms share: declaring methods, the gradient of a loss of examples, the SGD step, and amplification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedauc.interfaces import (
    Algorithm,
    Batch,
    Cohort,
    Download,
    Model,
    Network,
    Objective,
    Phase,
    Server,
    Setting,
    Upload,
)
from fedauc.objectives import find_objectives
from fedauc.objectives.kinds import PointObjective
from fedauc.objectives.logistic import Logistic
from fedauc.trees import Tree, is_empty, tree_add

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Method:
    """A method of the literature: an algorithm, a participation, and default settings that train well.

    `parameters` are those of the algorithm, and `settings` fields of the recipe, such as a server optimizer.
    """

    name: str
    algorithm: type[Algorithm]
    participation: str
    learning_rate: float
    parameters: tuple[tuple[str, Any], ...] = ()
    reference: str = ""
    settings: tuple[tuple[str, Any], ...] = ()


class Gradient(NamedTuple):
    """A gradient with respect to the weights, and the buffers after the forward pass."""

    weights: Tensor
    buffers: Tensor


@dataclass(frozen=True, kw_only=True)
class PointAlgorithm(Algorithm):
    """An algorithm on a loss of single examples, whose clients are sent the shared state and nothing else."""

    objective: PointObjective = Logistic()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self, PointObjective)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model, and the control variate if there is one."""
        return Download(phase, server.shared)


def point_gradient(objective: PointObjective, network: Network, model: Model, batch: Batch) -> Gradient:
    """The gradient of sum_i weights_i · loss(score_i, label_i)."""
    forward = network.forward_pass(model, batch.inputs)
    scores = objective.to_scores(forward.outputs)
    weights = batch.weights[..., None] if objective.takes_classes else batch.weights
    slopes = weights * objective.example_slope(scores, batch.labels)
    return Gradient(forward.pullback(objective.to_output_slopes(scores, slopes)), forward.buffers)


def point_loss(objective: PointObjective, network: Network, model: Model, batch: Batch) -> Tensor:
    """sum_i weights_i · loss(score_i, label_i)."""
    scores = objective.to_scores(network.forward_pass(model, batch.inputs).outputs)
    return (batch.weights * objective.example_loss(scores, batch.labels)).sum(-1)


def sgd_step(weights: Tensor, direction: Tensor, learning_rate: float | Tensor, weight_decay: float) -> Tensor:
    """w - η (g + decay · w)."""
    if weight_decay:
        direction = direction + weight_decay * weights
    if isinstance(learning_rate, int | float):
        return torch.sub(weights, direction, alpha=learning_rate)
    # A compiled step takes the learning rate as an input, so that a new stage needs no new compilation.
    return weights - learning_rate * direction


def apply_mean_change(shared: Tree, reduced: Upload) -> Tree:
    """The shared state plus the mean change of the cohort, if there is one."""
    return shared if is_empty(reduced.mean) else tree_add(shared, reduced.mean)


def amplify_progress(start: Model, end: Model, factor: float) -> Model:
    """x_start + γ (x_end - x_start), where γ = 1 gives x_end to the bit. Buffers are not amplified."""
    return Model(end.weights + (factor - 1) * (end.weights - start.weights), end.buffers)


def check_objective(algorithm: Algorithm, kind: type[Objective]) -> None:
    """Refuse an objective that the algorithm cannot use, and list those that it can."""
    objective = algorithm.objective
    if not isinstance(objective, kind):
        name = getattr(objective, "name", type(objective).__name__)
        fitting = ", ".join(fit for fit, member in find_objectives().items() if issubclass(member, kind))
        raise ValueError(
            f"objective is {name!r}, which the algorithm {algorithm.name} cannot use; use one of: {fitting}"
        )
