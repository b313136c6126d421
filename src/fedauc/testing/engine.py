"""The suite of an engine: it gives the result of the reference loop for every method of the library."""

from __future__ import annotations

from dataclasses import replace

from fedauc.algorithms import find_methods
from fedauc.engines.loop import LoopEngine
from fedauc.engines.simulator import Simulator
from fedauc.experiments.recipe import Recipe
from fedauc.testing._expectations import expect, expect_close, same_bits
from fedauc.testing.small_federation import assemble_small, small_federation, small_recipe
from fedauc.training import Round


def check_engine(kind: type[Simulator]) -> None:
    """Check an engine on a small federation: results, losses and client states are those of the loop."""
    for method in sorted(find_methods()):
        check_same_rounds(kind, small_recipe(method))


def check_same_rounds(kind: type[Simulator], recipe: Recipe, rounding: float = 1e-12) -> None:
    """Every round of an engine agrees with the loop's up to rounding, and the engine repeats itself to the bit."""
    reference, loop_rounds = _run_engine(LoopEngine, recipe)
    (engine, rounds), (_, repeated_rounds) = (_run_engine(kind, recipe) for _ in range(2))
    for expected, actual, repeated in zip(loop_rounds, rounds, repeated_rounds, strict=True):
        where = f"{recipe.method}, round {expected.phase.round}"
        expect_close(actual.state.server, expected.state.server, f"{where}: the server differs", rounding, rounding)
        expect((actual.loss is None) == (expected.loss is None), f"{where}: only one of the engines has a loss")
        if actual.loss is not None:
            expect_close(actual.loss, expected.loss, f"{where}: the loss differs", rounding, rounding)
        expect(actual.traffic == expected.traffic, f"{where}: the traffic differs")
        expect(same_bits(actual.state.server, repeated.state.server), f"{where}: the engine does not repeat itself")
    expected_states, states = reference.client_states(), engine.client_states()
    expect(states.keys() == expected_states.keys(), f"{recipe.method}: other clients have a state")
    for client, state in expected_states.items():
        sentence = f"{recipe.method}: the state of client {client} differs"
        expect_close(states[client], state, sentence, rounding, rounding)


def _run_engine(kind: type[Simulator], recipe: Recipe) -> tuple[Simulator, list[Round]]:
    training, network, state = assemble_small(recipe)
    engine = kind(training.algorithm, network, small_federation(), training.setting, training.uploads)
    return engine, list(replace(training, engine=engine).rounds(state))
