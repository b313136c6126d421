"""A small uneven federation, and recipes that run on it in milliseconds, for suites and tests of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn

from fedauc.data.clients import Clients, Examples
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Cohort, Download, Engine, Upload, Visits
from fedauc.training import Round
from fedauc.trees import Tree

POSITIVES = (3, 0, 0, 4, 2, 1, 5, 0)
NEGATIVES = (5, 6, 0, 0, 7, 1, 5, 3)
"""Rows of each class per client: client 2 is empty, 1 and 7 lack positives, 3 lacks negatives."""

GROUPS = (0, 0, 0, 1, 1, 2, 2, 2)
"""Three groups, so that a cycle has K = 3 rounds of 2, 2 and 3 clients."""

EMPTY = 2
FEATURES = 4
EMBEDDING_SIZE = 3
HOLDING = 7
"""Clients that hold data."""


def small_federation(times: int = 1, separation: float = 1.0, seed: int = 0) -> Clients:
    """Gaussian rows whose classes differ along the first feature, and whose clients are shifted."""
    rng = np.random.default_rng(seed)
    counts = np.array([POSITIVES, NEGATIVES]).T * times
    assignment = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    labels = np.concatenate([np.repeat([1, 0], pair) for pair in counts])
    inputs = rng.normal(size=(len(labels), FEATURES)) + 0.3 * rng.normal(size=(len(counts), FEATURES))[assignment]
    inputs[:, 0] += separation * (labels - 0.5)
    return Clients.from_assignment(inputs, labels, assignment, np.arange(len(counts)), np.array(GROUPS))


def held_out(separation: float = 1.0, rows: int = 200) -> Examples:
    """Fresh rows of the same two classes, half positive, without client shift."""
    rng = np.random.default_rng(99)
    labels = np.arange(rows) % 2
    inputs = rng.normal(size=(rows, FEATURES))
    inputs[:, 0] += separation * (labels - 0.5)
    return Examples(torch.from_numpy(inputs), torch.from_numpy(labels.astype(np.float64)))


def linear_scorer(seed: int = 0, bias: bool = True, outputs: int = 1) -> nn.Linear:
    """A linear scorer in float64 with keyed weights."""
    module = nn.Linear(FEATURES, outputs, bias=bias, dtype=torch.float64)
    rng = np.random.default_rng([seed, 1])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(0.3 * rng.normal(size=parameter.shape)))
    return module


def small_recipe(method: str, **changes: Any) -> Recipe:
    """Two cycles of two local steps on 2 positives and 3 negatives, in float64."""
    settings = {"cycles": 2, "local_steps": 2, "positives": 2, "negatives": 3, "seed": 3, "dtype": "float64"}
    return Recipe.of(method, **{**settings, **changes})


def assemble_small(recipe: Recipe, module: nn.Module | None = None, clients: Clients | None = None) -> Assembly:
    """A fresh assembly on the small federation."""
    return assemble_training(recipe, module or _make_scorer(recipe), clients or small_federation())


def _make_scorer(recipe: Recipe) -> nn.Module:
    """A linear model; an objective of embeddings gets three numbers per row.

    Wrapped algorithms get two layers, because a wrapper may treat the last one differently.
    """
    scorer = linear_scorer(outputs=EMBEDDING_SIZE if recipe.algorithm.objective.takes_embeddings else 1)
    if not recipe.wrappers:
        return scorer
    body = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
    nn.init.eye_(body.weight)
    nn.init.zeros_(body.bias)
    return nn.Sequential(body, nn.Tanh(), scorer)


def run_rounds(recipe: Recipe, module: nn.Module | None = None, clients: Clients | None = None) -> list[Round]:
    """Every round of a fresh run."""
    training, _, state = assemble_small(recipe, module, clients)
    return list(training.rounds(state))


class Exchange(NamedTuple):
    """What an engine was given in a round and gave back."""

    download: Download
    cohort: Cohort
    upload: Upload


@final
class RecordingEngine(Engine):
    """An engine that passes on to another and keeps what went through."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.exchanges: list[Exchange] = []

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Pass on, and remember."""
        visits = self._inner.visit(download, cohort)
        self.exchanges.append(Exchange(download, cohort, visits.upload))
        return visits

    def client_states(self) -> dict[int, Tree]:
        """Those of the inner engine."""
        return self._inner.client_states()

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Restore those of the inner engine."""
        self._inner.restore_client_states(client_states)


def record_exchanges(
    recipe: Recipe, module: nn.Module | None = None, clients: Clients | None = None
) -> tuple[list[Round], list[Exchange]]:
    """Every round of a fresh run, and what went through its engine (nothing in rounds that nobody came to)."""
    training, _, state = assemble_small(recipe, module, clients)
    engine = RecordingEngine(training.engine)
    return list(replace(training, engine=engine).rounds(state)), engine.exchanges
