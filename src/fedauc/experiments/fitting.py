"""The library's front door: train a model of your own on arrays of your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from fedauc.data.checks import as_inputs
from fedauc.data.clients import Clients, Examples
from fedauc.experiments.evaluation import Evaluator, Quality
from fedauc.experiments.recipe import Recipe, assemble
from fedauc.ledger import Traffic
from fedauc.network import ModuleNetwork
from fedauc.training import Round

Observer = Callable[[Round, Quality | None], None]


@dataclass(frozen=True)
class Fitted:
    """A trained model, how it got there, and what travelled. `history` holds (round, quality) per evaluated cycle."""

    module: nn.Module
    recipe: Recipe
    history: list[tuple[int, Quality]]
    traffic: Traffic

    def scores(self, inputs: Any) -> np.ndarray:
        """Raw scores of new rows."""
        network = ModuleNetwork(self.module)
        outputs = network.predict(network.state(), as_inputs(inputs))
        return np.asarray(outputs.double().numpy())


def fit(
    module: nn.Module,
    clients: Clients,
    method: str | Recipe = "cycp-pairwise",
    test: Examples | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Fitted:
    """Train `module` on the clients' data; evaluate on `test` after every cycle if it is given.

    `settings` are fields of the recipe, the algorithm or the schedule, such as `cycles`, `step_size`, `objective`,
    `groups` or `seed`. The module itself is left as it was; the trained one is in the result.
    """
    recipe = method if isinstance(method, Recipe) else Recipe.of(method, **settings)
    if isinstance(method, Recipe) and settings:
        raise ValueError(f"settings {sorted(settings)} come with a whole recipe; use dataclasses.replace(recipe, ...)")
    training, network, state = assemble(recipe, module, clients)
    evaluate, history = Evaluator(recipe.algorithm, network), []
    for finished in training.rounds(state):
        state, quality = finished.state, None
        if test is not None and finished.phase.ends_cycle and not finished.phase.scoring:
            quality = evaluate(recipe.algorithm.model(state.server.shared), test, finished.phase)
            history.append((finished.phase.round, quality))
        if observer is not None:
            observer(finished, quality)
    trained = network.module(recipe.algorithm.model(state.server.shared))
    return Fitted(trained, recipe, history, training.ledger.traffic)
