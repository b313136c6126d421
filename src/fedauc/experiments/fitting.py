"""`fit`: train your own model on your own arrays, without a run folder."""

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
from fedauc.experiments.run_loop import RunLoop
from fedauc.ledger import Traffic
from fedauc.network import ModuleNetwork
from fedauc.training import Round

Observer = Callable[[Round, Quality | None], None]

CHECKED_ROWS = 256
"""Training rows that are scored after a cycle when there are no test rows."""


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
        outputs = network.predict(network.initial_model(), as_inputs(inputs))
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
    test_examples = examples(*test) if isinstance(test, tuple) and not isinstance(test, Examples) else test
    training, network, state = assemble_training(recipe, module, clients)
    evaluator, history = Evaluator(recipe.algorithm, network), list[tuple[int, Quality]]()

    def evaluate(finished: Round) -> dict[str, Any] | None:
        model = recipe.algorithm.extract_model(finished.state.server.shared)
        if test_examples is None:
            # Without test rows, a few training rows still show whether all scores are the same.
            stride = max(1, len(clients.inputs) // CHECKED_ROWS)
            evaluator.check_outputs(model, clients.inputs[::stride], finished.phase)
            return None
        quality = evaluator.measure_quality(model, test_examples, finished.phase)
        history.append((finished.phase.round, quality))
        return quality._asdict()

    def observe(finished: Round) -> None:
        if observer is not None:
            is_evaluated = bool(history) and history[-1][0] == finished.phase.round
            observer(finished, history[-1][1] if is_evaluated else None)

    loop = RunLoop(training, state, evaluate, losses=None, on_round_end=observe)
    loop.train_to_end()
    trained = network.build_module(recipe.algorithm.extract_model(loop.state.server.shared))
    return Fitted(trained, recipe, history, training.ledger.traffic)
