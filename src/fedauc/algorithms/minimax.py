"""CyCp-Minimax (Algorithms 1 and 2): federated descent-ascent on the minimax form of the squared AUC loss.

    OSFM, one stage s with reference v_{s-1} = (w, a, b) at its start:
    for each cycle, for each group: send (w, a, b, α);  each client repeats I times, with gradients at the old point
        v ← v - η (∇_v f(v, α; batch) + γ (v - v_{s-1})),   α ← α + η ∂_α f(v, α; batch)
    server: the mean of (w, a, b, α).

Algorithm 1 prints the local step without the proximal term that its subproblem contains; we include it. Under uniform
participation this is RS-Minimax; with all clients in every round it is CODA+ (Guo et al., Communication-efficient
distributed stochastic AUC maximization with deep neural networks, ICML 2020; Yuan et al., ICML 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.algorithms._local import Gradient, Method, apply_mean_change, check_objective, sgd_step
from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.minimax import Duals, Minimax
from fedauc.trees import Tree, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class Shared(NamedTuple):
    """The model and (a, b, α): d + 3 floats each way."""

    model: Model
    duals: Duals


class Anchor(NamedTuple):
    """The reference of the stage v_{s-1} = (w, a, b): d + 2 floats, sent once per stage and client."""

    weights: Tensor
    a: Tensor
    b: Tensor


def saddle_gradient(objective: Minimax, network: Network, point: Shared, batch: Batch) -> tuple[Gradient, Duals]:
    """∇_w f and ∂f/∂(a, b, α) at one point."""
    forward = network.forward_pass(point.model, batch.inputs)
    scores = objective.to_scores(forward.outputs)
    slopes, duals = objective.saddle_slopes(scores, batch.labels, batch.weights, point.duals)
    return Gradient(forward.pullback(objective.to_output_slopes(scores, slopes)), forward.buffers), duals


def square_loss(objective: Minimax, network: Network, point: Shared, batch: Batch) -> Tensor:
    """The square AUC loss of the batch, which is never negative."""
    scores = objective.to_scores(network.forward_pass(point.model, batch.inputs).outputs)
    return objective.monitored_loss(scores, batch.labels, batch.weights, point.duals)


@dataclass(frozen=True, kw_only=True)
class ProximalStep(Algorithm):
    """The local step: descent-ascent with a proximal term of weight `prox` (γ in the paper)."""

    objective: Minimax = Minimax()
    prox: float = option(0.0, "Weight of the proximal term, which pulls towards the start of the stage.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self, Minimax)

    def stage_reference(self, point: Shared) -> Anchor | tuple[()]:
        """The reference that the proximal term pulls to; nothing is sent without that term."""
        return Anchor(point.model.weights, point.duals.a, point.duals.b) if self.prox else ()

    def descend_ascend(self, download: Download, local: Shared, gradient: Gradient, duals: Duals) -> Shared:
        """One step, given the derivatives with respect to the weights and the duals."""
        learning_rate, direction, (a, b, alpha) = download.phase.learning_rate, gradient.weights, duals
        if self.prox:
            direction = direction + self.prox * (local.model.weights - download.anchor.weights)
            a = a + self.prox * (local.duals.a - download.anchor.a)
            b = b + self.prox * (local.duals.b - download.anchor.b)
        weights = sgd_step(local.model.weights, direction, learning_rate, self.weight_decay)
        old = local.duals
        new = Duals(old.a - learning_rate * a, old.b - learning_rate * b, old.alpha + learning_rate * alpha)
        return Shared(Model(weights, gradient.buffers), new)


def starting_point(model: Model, objective: Minimax) -> Shared:
    """The model with the duals of a model whose raw outputs are all 0.

    If a and b started at 0, the first steps would push every sigmoid score to where its slope vanishes.
    """
    zero = torch.zeros((), dtype=model.weights.dtype, device=model.weights.device)
    score = objective.to_scores(zero)
    return Shared(model, Duals(score, score, zero))


@dataclass(frozen=True, kw_only=True)
class MinimaxAlgorithm(ProximalStep):
    """Local descent-ascent; the server averages the points."""

    name: ClassVar[str] = "minimax"
    uploads_gradients_only: ClassVar[bool] = True

    def init(self, setting: Setting, model: Model) -> Server:
        """a = b = the score of a raw output of 0, and α = 0."""
        start = starting_point(model, self.objective)
        return Server(shared=start, anchor=start)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send (w, a, b, α), and the reference of the stage."""
        return Download(phase, server.shared, self.stage_reference(server.anchor))

    def begin(self, download: Download, client_state: Tree) -> Shared:
        """Start from the point that was sent."""
        point: Shared = download.shared
        return point

    def step(self, network: Network, download: Download, local: Shared, batch: Batch) -> tuple[Shared, Tree]:
        """Simultaneous descent in (w, a, b) and ascent in α."""
        gradient, duals = saddle_gradient(self.objective, network, local, batch)
        return self.descend_ascend(download, local, gradient, duals), ()

    def monitored_loss(self, network: Network, download: Download, local: Shared, batch: Batch) -> Tensor:
        """The square AUC loss, which is never negative, and not the saddle value, which may be."""
        return square_loss(self.objective, network, local, batch)

    def finish(self, download: Download, client_state: Tree, local: Shared, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload the change of the point; the client keeps nothing."""
        return Upload(mean=tree_sub(local, download.shared)), ()

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change to the point."""
        return server._replace(shared=apply_mean_change(server.shared, reduced))

    def extract_model(self, shared: Shared) -> Model:
        """The model, without the duals."""
        return shared.model

    def diagnostics(self, shared: Shared) -> dict[str, Tensor]:
        """a and b follow the mean scores of the classes, and α minus the gap between them."""
        return shared.duals._asdict()


METHODS = (
    Method("cycp-minimax", MinimaxAlgorithm, "cyclic", 0.01, reference="the paper, Algorithms 1-2"),
    Method("rs-minimax", MinimaxAlgorithm, "uniform", 0.01, reference="Guo et al. 2020, random sampling"),
    Method("coda-plus", MinimaxAlgorithm, "full", 0.01, reference="Yuan et al. 2021"),
)
