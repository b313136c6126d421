"""Lanes: states, rules and parameters of every kind give the loop's result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedauc import split_vectors
from fedauc.algorithms._local import point_gradient
from fedauc.algorithms.fedavg import FedAvg
from fedauc.experiments.assembly import assemble_training
from fedauc.interfaces import Batch, Download, Model, Network, Upload
from fedauc.trees import Tree
from graphed_runs import (
    WAYS,
    force_step_variant,
    largest_difference,
    make_plain_recipe,
    run_all_rounds,
    small_table,
    tiny_network,
)


class Ball(NamedTuple):
    """The model, and its weights before the last step."""

    model: Model
    before: Tensor


@dataclass(frozen=True, kw_only=True)
class Heavy(FedAvg):
    """Heavy ball: the state keeps the weights before the last step, and every step emits its gradient."""

    def begin(self, download: Download, client_state: Tree) -> Any:
        return Ball(download.shared, download.shared.weights)

    def step(self, network: Network, download: Download, local: Any, batch: Batch) -> tuple[Any, Tree]:
        gradient = point_gradient(self.objective, network, local.model, batch)
        weights = local.model.weights - 0.05 * gradient.weights + 0.5 * (local.model.weights - local.before)
        return Ball(Model(weights, gradient.buffers), local.model.weights), gradient.weights

    def monitored_loss(self, network: Network, download: Download, local: Any, batch: Batch) -> Tensor:
        return super().monitored_loss(network, download, local.model, batch)

    def finish(self, download: Download, client_state: Tree, local: Any, emitted: Tree) -> tuple[Upload, Tree]:
        steps: Tensor = emitted.mean(-2)
        return Upload(mean=Model(local.model.weights - download.shared.weights + 0.1 * steps, local.model.buffers)), ()


@pytest.mark.parametrize("way", WAYS)
def test_a_state_may_move_leaves_about_and_a_step_may_emit_vectors(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_step_variant(monkeypatch, way)
    monkeypatch.setattr(split_vectors, "OWN_PART_FROM", 10)
    recipes = [make_plain_recipe("cycp-fedavg", engine=engine) for engine in ("loop", "graphed")]
    loop, graphed = (
        run_all_rounds(assemble_training(replace(recipe, algorithm=Heavy()), tiny_network(), small_table()))
        for recipe in recipes
    )
    assert largest_difference(loop[-1], graphed[-1]) < 1e-11


def test_a_parameter_without_dimensions_trains() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.heat = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.5))

        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = self.heat * self.linear(inputs)
            return scores

    torch.default_generator.manual_seed(0)
    module = Tempered()
    loop, graphed = (
        run_all_rounds(assemble_training(make_plain_recipe("cycp-fedavg", engine=e), module, small_table()))
        for e in ("loop", "graphed")
    )
    assert largest_difference(loop[-1], graphed[-1]) < 1e-11


def test_a_learning_rate_for_each_lane_meets_numbers_for_each_lane_alone() -> None:
    """A batch of as many rows as there are lanes would be scaled in silence, row by row instead of lane by lane."""
    scalar = split_vectors.PerClientScalar(torch.tensor([0.1, 0.2]))
    with pytest.raises(TypeError, match=r"a per-client scalar \(2,\) meets something"):
        scalar * torch.ones(2, 2)
    assert torch.equal(scalar * torch.ones(2), torch.tensor([0.1, 0.2]))
