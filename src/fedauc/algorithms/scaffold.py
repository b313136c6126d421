"""SCAFFOLD: every local step is corrected by control variates.

    w_m ← w_m - η (g - c_m + c);  c_m ← mean raw gradient of the visit;  c ← c + |S|/N · mean_S(Δc_m)

Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning, ICML 2020; its option II,
c_m - c + (w - w_m)/(I η), is the mean raw gradient written differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.algorithms._local import Method, PointAlgorithm, point_gradient, point_loss, sgd_step
from fedauc.interfaces import Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.trees import Tree, is_empty, tree_add, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class Shared(NamedTuple):
    """The model and the control variate c of the server; an upload holds the changes of the model and of c_m."""

    model: Model
    variate: Tensor


class Local(NamedTuple):
    """The local model, the client's variate c_m, and the sum of its raw gradients so far."""

    model: Model
    variate: Tensor
    total: Tensor


@dataclass(frozen=True, kw_only=True)
class CorrectedSGD(PointAlgorithm):
    """The local step: SGD corrected by control variates."""

    def step(self, network: Network, download: Download, local: Local, batch: Batch) -> tuple[Local, Tree]:
        """w ← w - η (g - c_m + c)."""
        gradient = point_gradient(self.objective, network, local.model, batch)
        direction = gradient.weights - local.variate + download.shared.variate
        weights = sgd_step(local.model.weights, direction, download.phase.learning_rate, self.weight_decay)
        return Local(Model(weights, gradient.buffers), local.variate, local.total + gradient.weights), ()

    def monitored_loss(self, network: Network, download: Download, local: Local, batch: Batch) -> Tensor:
        """The loss of the batch."""
        return point_loss(self.objective, network, local.model, batch)

    def stage_output(self, last: Shared, mean: Shared) -> Shared:
        """The mean model with the last c, which has to stay the mean of the clients' variates."""
        return last._replace(model=mean.model)

    def extract_model(self, shared: Shared) -> Model:
        """The model, without c."""
        return shared.model


@dataclass(frozen=True, kw_only=True)
class Scaffold(CorrectedSGD):
    """Control variates that change with every visit. The state of a client is its variate c_m."""

    name: ClassVar[str] = "scaffold"
    uploads_gradients_only: ClassVar[bool] = True

    def init(self, setting: Setting, model: Model) -> Server:
        """c = 0."""
        shared = Shared(model, torch.zeros_like(model.weights))
        return Server(shared=shared, anchor=shared)

    def initial_client_state(self, download: Download) -> Tensor:
        """c_m = 0."""
        return torch.zeros_like(download.shared.variate)

    def begin(self, download: Download, client_state: Tensor) -> Local:
        """Start from the model that was sent, with an empty sum of gradients."""
        return Local(download.shared.model, client_state, torch.zeros_like(client_state))

    def finish(self, download: Download, client_state: Tree, local: Local, emitted: Tree) -> tuple[Upload, Tree]:
        """c_m becomes the mean raw gradient of the visit; its change is uploaded with that of the model."""
        variate = local.total / download.phase.local_steps
        change = tree_sub(local.model, download.shared.model)
        return Upload(mean=Shared(change, variate - local.variate)), variate

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average; c changes so that it stays the mean of all clients' variates."""
        if is_empty(reduced.mean):
            return server
        share = cohort.divisor / setting.client_count
        variate = server.shared.variate + share * reduced.mean.variate
        return server._replace(shared=Shared(tree_add(server.shared.model, reduced.mean.model), variate))


METHODS = (Method("scaffold", Scaffold, "uniform", 0.1, reference="Karimireddy et al. 2020"),)
