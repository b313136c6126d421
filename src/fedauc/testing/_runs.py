"""Checks of whole runs on the small federation, for any recipe."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.testing._expectations import all_finite, expect, same_bits, untouched_generators
from fedauc.testing.small_federation import (
    EMPTY,
    FEATURES,
    assemble_small,
    held_out,
    record_exchanges,
    run_rounds,
    small_federation,
)
from fedauc.training import Round, Training
from fedauc.trees import Tree, tree_at, tree_leaves

ROUNDING = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""How far the weights, which are of order 1, may be from a run in float64: bfloat16 rounds at 2^-8 relative."""


def check_rounds(recipe: Recipe) -> None:
    """A run with clients that are empty or lack a class has all its rounds, stays finite and changes the model."""
    training, _, start = assemble_small(recipe)
    rounds = list(training.rounds(start))
    total = training.plan.total_rounds
    expect([r.phase.round for r in rounds] == list(range(total)), "the rounds are not numbered from 0")
    expect([r.state.round for r in rounds] == list(range(1, total + 1)), "a state does not count its rounds")
    expect(all(all_finite(r.state.server) for r in rounds), "the server's state is not finite")
    expect(not any(EMPTY in r.cohort.clients for r in rounds), "a client without rows takes part")
    expect(all((r.loss_value is None) == r.phase.scoring for r in rounds), "only scoring rounds have no loss")
    expect(all(r.loss_value >= 0 for r in rounds if r.loss_value is not None), "a loss is negative")
    read = recipe.algorithm.extract_model
    changed = not torch.equal(read(start.server.shared).weights, read(rounds[-1].state.server.shared).weights)
    expect(changed, "the run has not changed the model")


def check_determinism(recipe: Recipe) -> None:
    """The same seed gives the same bits, and another seed gives others."""
    first, second = (run_rounds(recipe)[-1].state.server for _ in range(2))
    other_seed = run_rounds(replace(recipe, seed=recipe.seed + 1))[-1].state.server
    expect(same_bits(first, second), "two runs with one seed differ")
    expect(not same_bits(first.shared, other_seed.shared), "another seed gives the same run")


def check_isolation(recipe: Recipe) -> None:
    """Training leaves the module, the data and every global generator as they were."""
    clients, test = small_federation(), held_out()
    # Dropout draws from torch's global generator unless the engine keys it; BatchNorm has buffers to spoil.
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, 1)).double().train()
    state_before = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = (clients.inputs, clients.labels, test.inputs, test.labels)
    arrays = (clients.rows, clients.offsets, *clients.census)
    tensors_before, arrays_before = [tensor.clone() for tensor in tensors], [array.copy() for array in arrays]
    with untouched_generators("the algorithm"):
        fitted = fit(module, clients, recipe, test=test)
    expect(all(map(torch.equal, tensors_before, tensors)), "training has changed the rows")
    expect(all(map(np.array_equal, arrays_before, arrays)), "training has changed the clients")
    expect(module.training, "training has changed the mode of the module")
    unchanged = all(torch.equal(value, state_before[name]) for name, value in module.state_dict().items())
    expect(unchanged, "training has changed the module that it was given")
    expect(all(p.grad is None and p.requires_grad for p in module.parameters()), "the module's parameters have changed")
    learned = not torch.equal(fitted.module.get_parameter("2.weight"), state_before["2.weight"])
    expect(learned, "the fitted module is as it was")


def check_resume(recipe: Recipe) -> None:
    """A run goes on from a checkpoint of any round, with the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        training, _, state = assemble_small(recipe)
        uninterrupted: list[tuple[Round, dict[int, Tree]]] = []
        paths = [Path(folder) / f"{number}" for number in range(training.plan.total_rounds + 1)]
        _save_state(paths[0], training, state)
        for finished, path in zip(training.rounds(state), paths[1:], strict=True):
            uninterrupted.append((finished, training.engine.client_states()))
            _save_state(path, training, finished.state)
        for number, path in enumerate(paths[:-1]):
            again, loaded = assemble_small(recipe).training, load_checkpoint(path, "cpu")
            expect(loaded.state.round == number, "a checkpoint holds another round")
            again.engine.restore_client_states(loaded.client_states)
            again.ledger.restore_from(loaded.ledger)
            # Equal states go on equally, so a cycle and a round from each stop covers the rest.
            expected_rounds = uninterrupted[number : number + 4]
            for (expected, client_states), result in zip(expected_rounds, again.rounds(loaded.state), strict=False):
                _expect_same_round(result, expected, f"resumed after round {number}, round {expected.phase.round}")
                states = again.engine.client_states()
                expect(states.keys() == client_states.keys(), "other clients have a state in a resumed run")
                same = all(same_bits(states[client], client_states[client]) for client in client_states)
                expect(same, f"resumed after round {number}, a client's state differs")


def _save_state(path: Path, training: Training, state: Tree) -> None:
    save_checkpoint(path, Checkpoint(state, training.engine.client_states(), training.ledger, []))


def _expect_same_round(result: Round, expected: Round, where: str) -> None:
    expect(result[:-1] == expected[:-1], f"{where}: phase, cohort, loss, diagnostics or traffic differ")
    expect(result.state.round == expected.state.round, f"{where}: the state has another number of rounds")
    expect(same_bits(result.state.server, expected.state.server), f"{where}: the server's state differs")
    expect(same_bits(result.state.average, expected.state.average), f"{where}: the average differs")
    expect(same_bits(result.state.optimizer, expected.state.optimizer), f"{where}: the server optimizer differs")


def check_precision(recipe: Recipe, dtype: torch.dtype) -> None:
    """A run in another precision has weights of that type, near those of a run in float64."""
    server = run_rounds(replace(recipe, dtype=str(dtype).removeprefix("torch.")))[-1].state.server  # type: ignore[arg-type]
    exact = run_rounds(replace(recipe, dtype="float64"))[-1].state.server
    types = {leaf.dtype for leaf in tree_leaves(server.shared)}
    expect(types == {dtype}, f"the shared state of a run in {dtype} has the types {types}")
    expect(all_finite(server), f"the server's state is not finite in {dtype}")
    first, second = (recipe.algorithm.extract_model(state.shared).weights.double() for state in (server, exact))
    distance = float((first - second).abs().max())
    expect(distance <= ROUNDING[dtype], f"the weights of a run in {dtype} are off by {distance:.2g}")


def check_traffic(recipe: Recipe) -> None:
    """The ledger's totals equal a count of everything that went through the engine."""
    rounds, exchanges = record_exchanges(recipe)
    down, up, anchored = np.zeros(2, dtype=int), np.zeros(2, dtype=int), set()
    for download, cohort, upload in exchanges:
        for position, client in enumerate(cohort.clients):
            down += _count_numbers((download.shared, tree_at(download.per_client, position)))
            up += _count_numbers((upload.mean, tree_at(upload.pool, position)))
            if (download.phase.stage, client) not in anchored:
                anchored.add((download.phase.stage, client))
                down += _count_numbers(download.anchor)
    traffic, visits = rounds[-1].traffic, sum(len(r.cohort.clients) for r in rounds)
    expect((traffic.rounds, traffic.absences) == (len(rounds), 0), "the ledger counts other rounds or absences")
    expect(traffic.visits == visits, f"the ledger counts {traffic.visits} visits instead of {visits}")
    counted_down, counted_up = [traffic.floats_down, traffic.bytes_down], [traffic.floats_up, traffic.bytes_up]
    expect(counted_down == down.tolist(), f"the ledger counts {counted_down} numbers and bytes down, not {down}")
    expect(counted_up == up.tolist(), f"the ledger counts {counted_up} numbers and bytes up, not {up}")
    width = {"float32": 4, "float64": 8}[recipe.dtype]
    expect(traffic.bytes_down == traffic.floats_down * width, f"a number down does not take {width} bytes")


def _count_numbers(tree: Tree) -> np.ndarray:
    """Numbers and bytes of a tree, counted by numpy."""
    arrays = [leaf.numpy() for leaf in tree_leaves(tree)]
    return np.array([sum(a.size for a in arrays), sum(a.nbytes for a in arrays)])
