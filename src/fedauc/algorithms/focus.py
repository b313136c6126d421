"""FOCUS: push-pull gradient tracking, which is exact whoever takes part and however rarely.

    pull:   x_m ← x, y_m ← 0
    repeat I times: y_m ← y_m + ∇ℓ(x_m) - g_m;  g_m ← ∇ℓ(x_m);  x_m ← x_m - η y_m
    push:   y ← y + Σ_m y_m / N;  x ← x - η s y

Ying, Li and Yang, Exact and linear convergence for federated learning under arbitrary client participation is
attainable, NeurIPS 2025. A client keeps its last gradient g_m from visit to visit. What it pushes is therefore the
change of that gradient since its last visit, so that y is always the mean of all clients' last gradients, also of those
that are absent. Where x rests, y = 0 and all g_m belong to the same x: that is the optimum.

As printed, y is a sum over the clients and the server takes one step of η along it, that is s = N. Then the learning
rate has to fall with the number of clients. `server_step="local-steps"` takes s = I, as far as FedAvg moves in a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.algorithms._local import Method, PointAlgorithm, point_gradient, point_loss, sgd_step
from fedauc.fields import option
from fedauc.interfaces import Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.trees import Tree, is_empty

if TYPE_CHECKING:
    from torch import Tensor


class Local(NamedTuple):
    """The local model x_m, the tracker y_m of this visit, and the last gradient g_m."""

    model: Model
    tracker: Tensor
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class Focus(PointAlgorithm):
    """Clients push changes of their gradients; the server moves along the sum of all changes so far.

    The state of a client is its last gradient, and that of the server the mean of them. The upload has the shape of the
    model, with the change of the gradient in place of the weights. Momentum at the server makes the server's steps
    those of the heavy ball.
    """

    name: ClassVar[str] = "focus"
    uploads_gradients_only: ClassVar[bool] = True
    server_step: Literal["local-steps", "clients"] = option(
        "local-steps", "The server's step in learning rates: one per local step, or one per client as printed."
    )

    def without_server_settings(self) -> Focus:
        """Only the server knows the size of its step."""
        return replace(self, server_step="local-steps")

    def init(self, setting: Setting, model: Model) -> Server:
        """No client has a gradient yet: y = 0."""
        return Server(shared=model, anchor=model, private=torch.zeros_like(model.weights))

    def initial_client_state(self, download: Download) -> Tensor:
        """g_m = 0."""
        return torch.zeros_like(download.shared.weights)

    def begin(self, download: Download, client_state: Tensor) -> Local:
        """Pull the model, and start from the last gradient with y_m = 0."""
        return Local(download.shared, torch.zeros_like(client_state), client_state)

    def step(self, network: Network, download: Download, local: Local, batch: Batch) -> tuple[Local, Tree]:
        """Add the change of the gradient to y_m, and take a step along it."""
        gradient, buffers = point_gradient(self.objective, network, local.model, batch)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * local.model.weights
        tracker = local.tracker + gradient - local.gradient
        weights = sgd_step(local.model.weights, tracker, download.phase.learning_rate, weight_decay=0.0)
        return Local(Model(weights, buffers), tracker, gradient), ()

    def monitored_loss(self, network: Network, download: Download, local: Local, batch: Batch) -> Tensor:
        """The loss of the batch."""
        return point_loss(self.objective, network, local.model, batch)

    def finish(self, download: Download, client_state: Tree, local: Local, emitted: Tree) -> tuple[Upload, Tree]:
        """Push y_m, and the change of the buffers; keep the last gradient."""
        push = Model(local.tracker, local.model.buffers - download.shared.buffers)
        return Upload(mean=push), local.gradient

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """y ← y + Σ_m y_m / N, and a step along y; nothing moves in a round that nobody came to."""
        if is_empty(reduced.mean):
            return server
        tracker = server.private + cohort.divisor / setting.client_count * reduced.mean.weights
        steps = phase.local_steps if self.server_step == "local-steps" else setting.client_count
        weights = server.shared.weights - phase.learning_rate * steps * tracker
        return server._replace(shared=Model(weights, server.shared.buffers + reduced.mean.buffers), private=tracker)

    def extract_model(self, shared: Model) -> Model:
        """The shared state is the model."""
        return shared


METHODS = (Method("focus", Focus, "cyclic", 0.01, reference="Ying, Li and Yang 2025"),)
