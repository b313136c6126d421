"""CODASCA: the minimax step with SCAFFOLD's control variates on (w, a, b, α).

    v ← v - η (∇_v f - c_m^v + c^v),  α ← α + η (∂_α f - c_m^α + c^α)
    c_m ← mean raw gradient of the visit;  c ← c + |S|/N · mean_S(Δc_m)

Yuan et al., Federated deep AUC maximization for heterogeneous data with a constant communication complexity, ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.algorithms._local import Method
from fedauc.algorithms.minimax import ProximalStep, saddle_gradient, square_loss, starting_point
from fedauc.algorithms.minimax import Shared as Point
from fedauc.interfaces import Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.minimax import Duals
from fedauc.trees import Tree, is_empty, tree_add, tree_map, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class Variate(NamedTuple):
    """A gradient of f: with respect to w, and to (a, b, α)."""

    weights: Tensor
    duals: Duals


class Shared(NamedTuple):
    """The point and the variate c of the server; an upload holds the changes of the point and of c_m."""

    point: Point
    variate: Variate


class Local(NamedTuple):
    """The local point, the client's variate c_m, and the sum of its raw gradients so far."""

    point: Point
    variate: Variate
    total: Variate


@dataclass(frozen=True, kw_only=True)
class Codasca(ProximalStep):
    """Local descent-ascent steps corrected by control variates; the server averages the points."""

    name: ClassVar[str] = "codasca"
    uploads_gradients_only: ClassVar[bool] = True

    def init(self, setting: Setting, model: Model) -> Server:
        """The starting point of the minimax method, and c = 0."""
        point = starting_point(model, self.objective)
        zero = tree_map(torch.zeros_like, Variate(model.weights, point.duals))
        shared = Shared(point, zero)
        return Server(shared=shared, anchor=shared)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the point and c, and the reference of the stage if there is a proximal term."""
        return Download(phase, server.shared, self.stage_reference(server.anchor.point))

    def initial_client_state(self, download: Download) -> Variate:
        """c_m = 0."""
        zero: Variate = tree_map(torch.zeros_like, download.shared.variate)
        return zero

    def begin(self, download: Download, client_state: Variate) -> Local:
        """Start from the point that was sent, with an empty sum of gradients."""
        return Local(download.shared.point, client_state, tree_map(torch.zeros_like, client_state))

    def step(self, network: Network, download: Download, local: Local, batch: Batch) -> tuple[Local, Tree]:
        """The minimax step along g - c_m + c."""
        gradient, duals = saddle_gradient(self.objective, network, local.point, batch)
        raw = Variate(gradient.weights, duals)
        direction = tree_map(lambda g, c_m, c: g - c_m + c, raw, local.variate, download.shared.variate)
        point = self.descend_ascend(
            download, local.point, gradient._replace(weights=direction.weights), direction.duals
        )
        total = tree_add(local.total, raw)
        return Local(point, local.variate, total), ()

    def monitored_loss(self, network: Network, download: Download, local: Local, batch: Batch) -> Tensor:
        """The square AUC loss, which is never negative."""
        return square_loss(self.objective, network, local.point, batch)

    def finish(self, download: Download, client_state: Tree, local: Local, emitted: Tree) -> tuple[Upload, Tree]:
        """c_m becomes the mean raw gradient of the visit; its change is uploaded with that of the point."""
        variate = tree_map(lambda total: total / download.phase.local_steps, local.total)
        changes = Shared(tree_sub(local.point, download.shared.point), tree_sub(variate, local.variate))
        return Upload(mean=changes), variate

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Average; c changes so that it stays the mean of all clients' variates."""
        if is_empty(reduced.mean):
            return server
        share = cohort.divisor / setting.client_count
        variate = tree_map(lambda c, change: c + share * change, server.shared.variate, reduced.mean.variate)
        return server._replace(shared=Shared(tree_add(server.shared.point, reduced.mean.point), variate))

    def stage_output(self, last: Shared, mean: Shared) -> Shared:
        """The mean point with the last c, which has to stay the mean of the clients' variates."""
        return last._replace(point=mean.point)

    def extract_model(self, shared: Shared) -> Model:
        """The model, without duals and variates."""
        return shared.point.model

    def diagnostics(self, shared: Shared) -> dict[str, Tensor]:
        """The dual variables of the point."""
        return shared.point.duals._asdict()


METHODS = (Method("codasca", Codasca, "full", 0.01, reference="Yuan et al. 2021"),)
