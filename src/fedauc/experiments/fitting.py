"""The library's front door: train a model of your own on arrays of your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from fedauc.data.checks import as_inputs
from fedauc.data.clients import Clients, Examples, examples
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.evaluation import Evaluator, Quality
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Model, Phase
from fedauc.ledger import Traffic
from fedauc.network import ModuleNetwork
from fedauc.training import Round

Observer = Callable[[Round, Quality | None], None]


SAMPLE = 256
"""Training rows to look at for a dead scorer when there are no test rows."""


@dataclass(frozen=True)
class Fitted:
    """A trained model, how it got there, and what travelled. `history` holds (round, quality) per evaluated cycle."""

    module: nn.Module
    recipe: Recipe
    history: list[tuple[int, Quality]]
    traffic: Traffic

    def scores(self, inputs: Any) -> np.ndarray:
        """Raw scores of new rows."""
        if len(inputs) == 0:
            return np.zeros(0)
        network = ModuleNetwork(self.module)
        outputs = network.predict(network.state(), as_inputs(inputs))
        return np.asarray(outputs.double().numpy())


def fit(
    module: nn.Module,
    clients: Clients,
    method: str | Recipe = "cycp-pairwise",
    test: Examples | tuple[Any, Any] | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> Fitted:
    """Train `module` on the clients' data; evaluate on `test` (examples, or a pair of arrays) after every cycle.

    `settings` are fields of the recipe, the algorithm or the schedule, such as `cycles`, `learning_rate`, `objective`,
    `groups` or `seed`. The module itself is left as it was; the trained one is in the result.
    """
    recipe = method if isinstance(method, Recipe) else Recipe.of(method, **settings)
    if isinstance(method, Recipe) and settings:
        raise ValueError(f"settings {sorted(settings)} come with a whole recipe; use dataclasses.replace(recipe, ...)")
    held = examples(*test) if isinstance(test, tuple) and not isinstance(test, Examples) else test
    training, network, state = assemble_training(recipe, module, clients)
    evaluate, history = Evaluator(recipe.algorithm, network), []
    for finished in training.rounds(state):
        state, quality = finished.state, None
        if finished.phase.ends_cycle and not finished.phase.scoring:
            model = recipe.algorithm.extract_model(state.server.shared)
            quality = _look(evaluate, model, held, clients, finished.phase)
            history += [] if quality is None else [(finished.phase.round, quality)]
        if observer is not None:
            observer(finished, quality)
    trained = network.module(recipe.algorithm.extract_model(state.server.shared))
    return Fitted(trained, recipe, history, training.ledger.traffic)


def _look(evaluate: Evaluator, model: Model, test: Examples | None, clients: Clients, phase: Phase) -> Quality | None:
    """The quality on the test rows; without them, only whether the scorer still tells a few training rows apart."""
    if test is not None:
        return evaluate(model, test, phase)
    stride = max(1, len(clients.inputs) // SAMPLE)
    evaluate.check_outputs(model, clients.inputs[::stride], phase)
    return None
