"""Identity 13: same seed, same bits; every engine gives the loop's result; a cycle of one group is uniform sampling.

The loop itself is held to a numpy twin of the pairwise methods, step by step on the rows and scores that were drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedauc.algorithms import find_methods
from fedauc.data.clients import Clients
from fedauc.engines import engines as all_engines
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Cohort, Download, Engine, Participation, Visits
from fedauc.ledger import Traffic
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.full import Full
from fedauc.participation.uniform import Uniform
from fedauc.stages import Geometric
from fedauc.trees import Tree
from identities.identity_runs import flatten_tree, gaussian_clients, linear_module, make_clients, shared_path

ENGINES = sorted(set(all_engines()) - {"compiled"})
"""Every engine, so that a new one is tested without being listed; `compiled` has its own, fewer cases."""

METHODS = sorted(find_methods())
FEATURES, CLIENTS = 3, 6
COUNTS = [(3, 8), (5, 4), (2, 6), (4, 9), (6, 2), (1, 5)]

PARTICIPATIONS: dict[str, Participation] = {
    "cyclic": Cyclic(groups=2, per_round=2),
    "uniform": Uniform(per_round=2, groups=2),
    "full": Full(),
}

engines = pytest.mark.parametrize("engine", ENGINES)
every_method = pytest.mark.parametrize("method", METHODS)


class Outcome(NamedTuple):
    """All that a run leaves behind."""

    path: np.ndarray
    values: list[float | None]
    diagnostics: list[dict[str, float]]
    client_states: dict[int, np.ndarray]
    traffic: Traffic


def make_federation() -> Clients:
    return make_clients(gaussian_clients(COUNTS, FEATURES, seed=13))


def make_network(dropout: float = 0.0) -> nn.Module:
    """A small model whose weights come from their own stream."""
    rng = np.random.default_rng(13)
    built = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1)).double()
    for parameter in built.parameters():
        parameter.data = torch.from_numpy(rng.normal(0, 0.5, parameter.shape))
    return built


def recipe_of(method: str, participation: Participation | None = None, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "participation": participation or PARTICIPATIONS[find_methods()[method].participation],
        "stages": Geometric(initial=1, decay=0.5, scale=2),
        "cycles": 3,
        "learning_rate": 0.05,
        "local_steps": 3,
        "positives": 2,
        "negatives": 3,
        "dtype": "float64",
    }
    return Recipe.of(method, **{**settings, **changes})


def run_outcome(recipe: Recipe, module: nn.Module) -> Outcome:
    training, _, start = assemble_training(recipe, module, make_federation())
    rounds = list(training.rounds(start))
    client_states = {
        client: flatten_tree(client_state) for client, client_state in training.engine.client_states().items()
    }
    values, diagnostics = (
        [finished.loss_value for finished in rounds],
        [finished.diagnostic_values for finished in rounds],
    )
    return Outcome(shared_path(rounds), values, diagnostics, client_states, rounds[-1].traffic)


def assert_same_bits(first: Outcome, second: Outcome) -> None:
    np.testing.assert_array_equal(first.path, second.path)
    assert (first.values, first.diagnostics, first.traffic) == (second.values, second.diagnostics, second.traffic)
    assert first.client_states.keys() == second.client_states.keys()
    for client, client_state in first.client_states.items():
        np.testing.assert_array_equal(client_state, second.client_states[client])


@pytest.mark.parametrize("engine", ["loop", "auto"])
@every_method
def test_same_seed_gives_the_same_bits_whatever_the_global_generators(engine: str, method: str) -> None:
    """Dropout included: a module's own randomness is keyed as well."""
    recipe = recipe_of(method, engine=engine, seed=4)
    outcomes = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        np.random.seed(noise)  # noqa: NPY002 - the global generator is the point
        outcomes.append(run_outcome(recipe, make_network(dropout=0.3)))
    assert_same_bits(*outcomes)


@engines
@every_method
def test_an_engine_gives_the_same_bits_twice(engine: str, method: str) -> None:
    assert_same_bits(*(run_outcome(recipe_of(method, engine=engine, seed=4), make_network()) for _ in range(2)))


@engines
@every_method
def test_another_seed_gives_other_bits(engine: str, method: str) -> None:
    first, second = (run_outcome(recipe_of(method, engine=engine, seed=seed), make_network()) for seed in (4, 5))
    assert np.abs(first.path[-1] - second.path[-1]).max() > 1e-6


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_a_run_leaves_the_global_generators_alone(engine: str) -> None:
    module = make_network(dropout=0.3)
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - the global generator is the point
    run_outcome(recipe_of("cycp-pairwise", engine=engine), module)
    after = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002 - the global generator is the point
    assert torch.equal(before[0], after[0])
    assert str(before[1]) == str(after[1])


@engines
@pytest.mark.parametrize("weighting", ["clients", "pooled"])
@every_method
def test_every_engine_gives_the_loops_result(engine: str, method: str, weighting: str) -> None:
    loop, second = (
        run_outcome(recipe_of(method, engine=name, weighting=weighting), make_network()) for name in ("loop", engine)
    )
    # Engines may sum in another order; over some thirty steps that is a few units in the last place.
    np.testing.assert_allclose(second.path, loop.path, rtol=1e-10, atol=1e-12)
    assert [value is None for value in second.values] == [value is None for value in loop.values]
    outcomes, expected = ([value for value in run.values if value is not None] for run in (second, loop))
    np.testing.assert_allclose(outcomes, expected, rtol=1e-10, atol=1e-12)
    assert second.traffic == loop.traffic
    assert second.client_states.keys() == loop.client_states.keys()
    for client, client_state in loop.client_states.items():
        np.testing.assert_allclose(second.client_states[client], client_state, rtol=1e-10, atol=1e-12)


@every_method
def test_one_group_gives_the_bits_of_uniform_sampling(method: str) -> None:
    outcomes = [
        run_outcome(recipe_of(method, participation, seed=4), make_network(dropout=0.3))
        for participation in (Cyclic(groups=1, per_round=3), Uniform(per_round=3, groups=1))
    ]
    assert_same_bits(*outcomes)


@every_method
def test_one_whole_group_gives_the_bits_of_full_participation(method: str) -> None:
    outcomes = [
        run_outcome(recipe_of(method, participation, seed=4), make_network(dropout=0.3))
        for participation in (Cyclic(groups=1), Full())
    ]
    assert_same_bits(*outcomes)


# ------------------------------------------------------------------------------------------------------ the numpy twin


class Pools(NamedTuple):
    """Scores by class."""

    positives: np.ndarray
    negatives: np.ndarray


def sigmoid_slope(gap: np.ndarray) -> np.ndarray:
    """ψ'(t) of ψ(t) = 1/(1 + e^t)."""
    loss = 1 / (1 + np.exp(gap))
    return np.asarray(-loss * (1 - loss))


def pairwise_visit(
    w: np.ndarray, batches: Sequence[Pools], passive: Sequence[Pools], learning_rate: float
) -> tuple[np.ndarray, list[Pools]]:
    """I steps of w ← w - η(G1 + G2) with h = w·x; the active scores as they were computed."""
    emitted = []
    for rows, old in zip(batches, passive, strict=True):
        up, down = rows.positives @ w, rows.negatives @ w
        first = sigmoid_slope(up[:, None] - old.negatives[None, :]).mean(axis=1)
        second = sigmoid_slope(old.positives[:, None] - down[None, :]).mean(axis=0)
        gradient = first @ rows.positives / len(up) - second @ rows.negatives / len(down)
        emitted.append(Pools(up, down))
        w = w - learning_rate * gradient
    return w, emitted


class Recorder(Engine):
    """Another engine, and what it was sent."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.orders = inner, list[Download]()

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        self.orders.append(download)
        return self.inner.visit(download, cohort)

    def client_states(self) -> dict[int, Tree]:
        return self.inner.client_states()

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        self.inner.restore_client_states(client_states)


def drawn_from(passive: np.ndarray, pool: np.ndarray) -> bool:
    """Whether scores were drawn from a pool without replacement; small clients put a score in more than once."""
    taken, held = (Counter(np.round(scores, 10).reshape(-1).tolist()) for scores in (passive, pool))
    return taken <= held


@engines
@pytest.mark.parametrize("method", ["cycp-pairwise", "rs-pairwise", "fedxl1"])
def test_pairwise_runs_are_their_twin_step_by_step(engine: str, method: str) -> None:
    data, start = make_federation(), np.array([0.4, -0.2, 0.1])
    recipe = recipe_of(method, engine=engine, seed=6, weighting="clients")
    training, _, state = assemble_training(recipe, linear_module(start), data)
    recorder = Recorder(training.engine)
    rounds = list(replace(training, engine=recorder).rounds(state))
    draws, inputs = Draws(data, training.setting, "classes"), data.inputs.numpy()
    length, window = training.setting.cycle_length, method == "rs-pairwise"
    w, scores = start, list[list[Pools]]()
    for finished, download in zip(rounds, recorder.orders, strict=True):
        phase, number = finished.phase, finished.phase.round
        first = number - length if window else (number // length - 1) * length
        earlier = [part for chunk in scores[max(first, 0) : first + length] for part in chunk]
        ends, emitted = [], list[Pools]()
        for position, client in enumerate(finished.cohort.clients):
            index = np.asarray(draws.draw_visit(client, phase)[0])
            batches = [Pools(inputs[rows[:2]], inputs[rows[2:]]) for rows in index]
            if phase.scoring:
                emitted += [Pools(rows.positives @ w, rows.negatives @ w) for rows in batches]
                continue
            changes = Pools(*(side[position].numpy() for side in download.per_client))
            for side in (0, 1):
                assert drawn_from(changes[side], np.concatenate([part[side] for part in earlier]))
            passive = [Pools(*sides) for sides in zip(*changes, strict=True)]
            end, outcomes = pairwise_visit(w, batches, passive, float(phase.learning_rate))
            ends.append(end)
            emitted += outcomes
        w = np.mean(ends, axis=0) if ends else w
        scores.append(emitted)
        np.testing.assert_allclose(flatten_tree(finished.state.server.shared), w, rtol=1e-12, atol=1e-14)
    # The run goes somewhere.
    assert np.abs(w - start).max() > 1e-2
