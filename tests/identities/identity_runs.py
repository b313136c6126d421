"""What the identities of whole runs share: small federations, two scorers, and a run as a list of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.objectives.kinds import PointObjective
from fedauc.training import Round
from fedauc.trees import Tree, tree_leaves


class Rows(NamedTuple):
    """One client's rows `[n, d]` by class."""

    positives: np.ndarray
    negatives: np.ndarray


def gaussian_clients(counts: Sequence[tuple[int, int]], features: int, seed: int) -> list[Rows]:
    """Clients with so many positives and negatives, each around class means of its own: heterogeneous on purpose."""
    rng = np.random.default_rng(seed)
    federation = []
    for sizes in counts:
        centres = rng.normal(0, 0.5, (2, features)) + np.array([[0.5], [-0.5]])
        federation.append(
            Rows(*(centre + rng.normal(size=(n, features)) for centre, n in zip(centres, sizes, strict=True)))
        )
    return federation


def make_clients(federation: Sequence[Rows]) -> Clients:
    """The library's clients, numbered as they are listed; a client without rows is an empty one."""
    inputs = np.concatenate([side for rows in federation for side in rows])
    labels = np.concatenate([np.repeat([1, 0], [len(r.positives), len(r.negatives)]) for r in federation])
    owner = np.repeat(np.arange(len(federation)), [len(r.positives) + len(r.negatives) for r in federation])
    return Clients.from_assignment(inputs, labels, owner, np.arange(len(federation)))


def linear_module(weights: Any) -> nn.Module:
    """h = w·x in float64, from the given weights."""
    start = torch.as_tensor(weights, dtype=torch.float64)
    module = nn.Linear(len(start), 1, bias=False, dtype=torch.float64)
    module.weight.data = start.reshape(1, -1).clone()
    return module


class Offset(nn.Module):
    """score = w - x with one weight, so that a row holds its own optimum."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight - inputs[:, 0]


@dataclass(frozen=True, kw_only=True)
class Quadratic(PointObjective):
    """h/2 · score², whatever the label."""

    name: ClassVar[str] = "quadratic"
    curvature: float = 1.0

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.curvature / 2 * scores.square()

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.curvature * scores


def make_quadratic_clients(optima: Sequence[float], spread: float = 1.0) -> Clients:
    """One client per optimum b, with the rows b + spread (a positive) and b - spread: two rows whose mean is b."""
    up = [np.array([[b + spread]]) for b in optima]
    down = [np.array([[b - spread]]) for b in optima]
    return make_clients([Rows(first, second) for first, second in zip(up, down, strict=True)])


def run_recipe(recipe: Recipe, module: nn.Module, clients: Clients) -> list[Round]:
    """Every round of a run."""
    training, _, start = assemble_training(recipe, module, clients)
    return list(training.rounds(start))


def run_assembly(assembly: Assembly) -> list[Round]:
    """Every round of a run whose parts the caller keeps."""
    return list(assembly.training.rounds(assembly.start))


def flatten_tree(tree: Tree) -> np.ndarray:
    """The tensors of a tree as one numpy vector."""
    return np.concatenate([leaf.detach().reshape(-1).numpy() for leaf in tree_leaves(tree)])


def shared_path(rounds: Sequence[Round]) -> np.ndarray:
    """What is shared after each round, `[rounds, size]`."""
    return np.stack([flatten_tree(finished.state.server.shared) for finished in rounds])
