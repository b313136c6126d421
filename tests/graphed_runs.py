"""Short runs on the graphed engine, and how far two of them are from each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import Clients
from fedauc.engines.cuda.capture import CompiledStep
from fedauc.engines.cuda.engine import GraphedEngine, StepVariants
from fedauc.engines.cuda.lanes import LaneStep
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.recipe import Recipe
from fedauc.training import Round
from fedauc.trees import tree_leaves

WAYS = ["stacked", "single"]


def make_recipe(method: str, **changes: Any) -> Recipe:
    """Two clients a round, three steps, crops, in float64."""
    defaults: dict[str, Any] = {"cycles": 2, "local_steps": 3, "positives": 2, "negatives": 3, "augment": "crop-flip"}
    return Recipe.of(method, **{**defaults, "dtype": "float64", "weight_decay": 1e-3, **changes})


def run_all_rounds(assembly: Assembly) -> list[Round]:
    return list(assembly.training.rounds(assembly.start))


def largest_difference(one: Round, other: Round) -> float:
    pairs = zip(tree_leaves(one.state.server), tree_leaves(other.state.server), strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs if a.numel())


def force_step_variant(monkeypatch: pytest.MonkeyPatch, way: str, compiled: bool = False) -> None:
    """Let engines take steps in one way only."""
    plain = GraphedEngine.make_step_variants

    def steps(self: GraphedEngine, scoring: bool) -> StepVariants:
        step = LaneStep(self._algorithm, self._network, way == "stacked")
        made: LaneStep | CompiledStep = CompiledStep(step) if compiled and not scoring else step
        return plain(self, scoring)._replace(variants=(made,))

    monkeypatch.setattr(GraphedEngine, "make_step_variants", steps)


def tiny_network() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def small_table(count: int = 7) -> Clients:
    rng = np.random.default_rng(1)
    rows = 9 * count
    return Clients.from_arrays(rng.normal(size=(rows, 3)), np.arange(rows) % 3 == 0, client=np.arange(rows) // 9)


def make_plain_recipe(method: str, **changes: Any) -> Recipe:
    return make_recipe(method, **{"augment": "none", **changes})
