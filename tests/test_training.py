"""The round loop: what a stage hands on, anchors, pools over stage boundaries, and rounds that nobody comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.data.weighting import WEIGHTINGS
from fedauc.engines.draws import Draws
from fedauc.interfaces import Mean, Model, Server, ServerOptimizer
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace
from fedauc.stages import Geometric
from fedauc.training import Round, State
from fedauc.trees import Tree, tree_leaves, tree_map
from small_federations import (
    EMPTY,
    GROUPS,
    HOLDING,
    assemble_small,
    linear_scorer,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)

STAGES: dict[str, Any] = {"cycles": 4, "stages": Geometric(initial=2, decay=0.5, scale=1.0)}
"""Two stages of two cycles of K = 3 rounds."""

FIRST, SECOND = range(6), range(6, 12)


def mean_twin(trees: list[Tree]) -> list[np.ndarray]:
    """The plain mean of some states, leaf by leaf."""
    return [np.mean([leaf.numpy() for leaf in leaves], axis=0) for leaves in zip(*map(tree_leaves, trees), strict=True)]


def refill(tree: Tree, leaves: list[np.ndarray]) -> Tree:
    """A tree with other numbers."""
    new = iter(leaves)
    return tree_map(lambda _: torch.from_numpy(np.asarray(next(new))), tree)


def assert_leaves(tree: Tree, expected: list[np.ndarray]) -> None:
    for leaf, value in zip(tree_leaves(tree), expected, strict=True):
        np.testing.assert_allclose(leaf.numpy(), value, rtol=0, atol=1e-12)


# A-FedAvg's server also keeps a model of its own, and minimax sends the stage's reference: both must start anew.
PLAIN: list[tuple[str, dict[str, Any]]] = [("cycp-fedavg", {}), ("cycp-minimax", {"prox": 0.5}), ("a-fedavg", {})]


@pytest.mark.parametrize(("method", "settings"), PLAIN, ids=[method for method, _ in PLAIN])
@pytest.mark.parametrize(("stage_output", "every"), [("cycle_mean", 3), ("round_mean", 1)])
def test_a_stage_hands_on_the_mean_of_its_cycles_or_rounds(
    method: str, settings: dict[str, Any], stage_output: str, every: int
) -> None:
    averaged = run_rounds(small_recipe(method, stage_output=stage_output, **STAGES, **settings))
    training = assemble_small(small_recipe(method, **STAGES, **settings)).training
    last = run_rounds(small_recipe(method, **STAGES, **settings))
    # Inside the first stage nothing differs; its end is the mean of every `every`-th state of the plain run.
    assert all(same_bits(averaged[r].state.server, last[r].state.server) for r in FIRST[:-1])
    mean = mean_twin([last[r].state.server.shared for r in FIRST if (r + 1) % every == 0])
    assert_leaves(averaged[5].state.server.shared, mean)
    # The second stage is a plain run that starts from that mean.
    server: Server = last[5].state.server
    state = State(6, server._replace(shared=refill(server.shared, mean)))
    second = list(training.rounds(state))
    for r in SECOND[:-1]:
        assert_leaves(
            averaged[r].state.server.shared, [leaf.numpy() for leaf in tree_leaves(second[r - 6].state.server.shared)]
        )
    end = mean_twin([second[r - 6].state.server.shared for r in SECOND if (r + 1) % every == 0])
    assert_leaves(averaged[11].state.server.shared, end)
    assert not np.allclose(end[0], tree_leaves(last[11].state.server.shared)[0].numpy(), atol=1e-6)


def test_the_last_model_is_handed_on_by_default() -> None:
    rounds = run_rounds(small_recipe("cycp-fedavg", **STAGES))
    assert all(r.state.average == () for r in rounds)
    assert rounds[5].state.server.shared is not rounds[4].state.server.shared


@pytest.mark.parametrize("stage_output", ["last", "cycle_mean", "round_mean"])
def test_the_anchor_is_the_model_at_the_start_of_the_stage(stage_output: str) -> None:
    training, _, start = assemble_small(small_recipe("cycp-minimax", prox=0.5, stage_output=stage_output, **STAGES))
    rounds = list(training.rounds(start))
    assert all(same_bits(rounds[r].state.server.anchor, start.server.shared) for r in FIRST)
    handed_on = rounds[5].state.server.shared
    assert all(same_bits(rounds[r].state.server.anchor, handed_on) for r in SECOND)
    assert not same_bits(handed_on, start.server.shared)


@pytest.mark.parametrize("stage_output", ["cycle_mean", "round_mean"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_mean_of_a_model_that_stands_still_is_the_model(stage_output: str, dtype: str) -> None:
    # Nobody comes after round 0 for 600 rounds. A sum kept in bfloat16 would stand still after 256 of them.
    trace = Trace(rows=((0, 0), (599, EMPTY)), cycle_length=1)
    rounds = run_rounds(small_recipe("fedavg", participation=trace, cycles=600, stage_output=stage_output, dtype=dtype))
    handed_on, before = rounds[-1].state.server.shared.weights, rounds[-2].state.server.shared.weights
    assert handed_on.dtype == before.dtype
    # bfloat16 is allowed the one rounding of the result, float32 the 600 roundings of a sum.
    close = {"float64": 1e-12, "float32": 600 * 2**-24, "bfloat16": 2**-8}[dtype]
    torch.testing.assert_close(handed_on.double(), before.double(), rtol=close, atol=0)


def variate_of(method: str, shared: Tree) -> Tensor:
    """The server's control variate for the weights."""
    variate: Tensor = shared.variate.weights if method == "codasca" else shared.variate
    return variate


def own_variate(method: str, client_state: Tree) -> Tensor:
    """A client's variate for the weights, rolled over to the coming period where there are periods."""
    if method == "a-scaffold":
        variate: Tensor = client_state.next_variate()
    else:
        variate = client_state.weights if method == "codasca" else client_state
    return variate


@pytest.mark.parametrize("method", ["scaffold", "a-scaffold", "codasca"])
@pytest.mark.parametrize("stage_output", ["last", "cycle_mean", "round_mean"])
def test_the_servers_variate_stays_the_mean_of_the_clients(method: str, stage_output: str) -> None:
    training, _, state = assemble_small(small_recipe(method, stage_output=stage_output, **STAGES))
    for finished in training.rounds(state):
        if finished.phase.ends_cycle:
            client_states = training.engine.client_states().values()
            # Clients that were never visited have the variate 0.
            total = torch.stack([own_variate(method, client_state) for client_state in client_states]).sum(0)
            variate = variate_of(method, finished.state.server.shared)
            torch.testing.assert_close(variate, total / HOLDING, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["scaffold", "a-scaffold"])
def test_a_clients_variate_is_the_raw_gradient_of_its_last_visit(method: str) -> None:
    clients = small_federation()
    recipe = small_recipe(method, participation=Cyclic(assignment="metadata"), cycles=3, local_steps=1)
    training, _, state = assemble_small(recipe)
    draws = Draws(clients, training.setting, "rows")
    model = state.server.shared.model
    for finished in training.rounds(state):
        sent = model.weights.numpy()
        for client in finished.cohort.clients:
            rows, weights = draws.draw_visit(client, finished.phase)
            inputs = np.concatenate([clients.inputs.numpy()[rows[0]], np.ones((5, 1))], axis=1)
            slopes = weights * (1 / (1 + np.exp(-inputs @ sent)) - clients.labels.numpy()[rows[0]])
            variate = own_variate(method, training.engine.client_states()[client])
            np.testing.assert_allclose(variate, slopes @ inputs, rtol=0, atol=1e-12)
        model = finished.state.server.shared.model


# ------------------------------------------------------------------------------------------------ pools over stages


def pool_of(finished: Round) -> Tree:
    return finished.state.server.private.pool


def test_a_pool_carries_over_when_the_stage_hands_on_its_last_model() -> None:
    rounds = run_rounds(small_recipe("cycp-pairwise", **STAGES))
    assert [r.phase.round for r in rounds if r.phase.scoring] == [0, 1, 2]
    # Scoring and 2 cycles: the second stage starts with round 9 and uses the pool of rounds 6 to 8 for a cycle.
    assert rounds[9].phase.starts_stage
    assert pool_of(rounds[8]) is pool_of(rounds[9]) is pool_of(rounds[10])


@pytest.mark.parametrize("method", ["cycp-pairwise", "rs-pairwise"])
@pytest.mark.parametrize("stage_output", ["cycle_mean", "round_mean"])
def test_a_pool_is_scored_anew_by_an_averaged_model(method: str, stage_output: str) -> None:
    clients = small_federation()
    rounds = run_rounds(small_recipe(method, stage_output=stage_output, **STAGES))
    assert [r.phase.round for r in rounds if r.phase.scoring] == [0, 1, 2, 9, 10, 11]
    assert rounds[8].phase.ends_stage
    model: Model = rounds[8].state.server.shared
    assert all(same_bits(r.state.server.shared, model) for r in rounds[9:12])
    scores = clients.inputs @ model.weights[:4] + model.weights[4]
    for side, label in enumerate((1, 0)):
        pool = pool_of(rounds[11])[side]
        distance = (pool[:, None] - scores[clients.labels == label]).abs().min(dim=1).values
        assert len(pool) > 0
        assert distance.max() < 1e-12


# ---------------------------------------------------------------------------------------------- rounds without clients


def absences(method: str, **settings: Any) -> list[Round]:
    """Two learning cycles: groups of 2, 2 and 3; of the second group nobody ever comes, of the third only client 6."""
    opening = 3 if method == "cycp-pairwise" else 0
    rows = [(r, c) for r in range(opening + 6) for c in (0, 1) if r % 3 == 0]
    rows += [(r, 6) for r in range(opening + 6) if r % 3 == 2]
    trace = Trace(rows=tuple(rows), schedule=Cyclic(assignment="metadata"))
    return run_rounds(small_recipe(method, participation=trace, **settings))


@pytest.mark.parametrize(
    "method", ["cycp-fedavg", "a-fedavg", "cycp-minimax", "cycp-pairwise", "scaffold", "a-scaffold", "codasca"]
)
def test_absences_are_counted_and_an_empty_round_changes_nothing_shared(method: str) -> None:
    rounds = absences(method)
    cycles = len(rounds) // 3
    traffic = rounds[-1].traffic
    assert (traffic.rounds, traffic.visits, traffic.absences) == (3 * cycles, 3 * cycles, 4 * cycles)
    for before, empty in zip(rounds[0::3], rounds[1::3], strict=True):
        assert empty.cohort.clients == ()
        assert empty.loss_value is None
        assert same_bits(empty.state.server.shared, before.state.server.shared)
        assert empty.traffic.floats_up == before.traffic.floats_up
        assert empty.traffic.absences == before.traffic.absences + 2


@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_a_run_survives_empty_rounds_under_every_weighting(weighting: str) -> None:
    assert len(absences("cycp-pairwise", weighting=weighting)) == 9


@pytest.mark.parametrize("method", ["a-fedavg", "a-scaffold"])
def test_a_period_that_ends_with_an_empty_round_is_still_amplified(method: str) -> None:
    # Only group 0 comes: the period's progress is made in its first round and amplified in its last, which is empty.
    rows = (*((r, c) for r in (0, 3) for c in (0, 1)), (5, EMPTY))
    trace = Trace(rows=rows, schedule=Cyclic(assignment="metadata"))
    training, _, start = assemble_small(small_recipe(method, participation=trace, amplify=1.5))
    rounds = list(training.rounds(start))

    def weights(shared: Tree) -> np.ndarray:
        return training.algorithm.extract_model(shared).weights.numpy()

    begin = weights(start.server.shared)
    for first in (0, 3):
        progress = weights(rounds[first].state.server.shared)
        end = weights(rounds[first + 2].state.server.shared)
        np.testing.assert_allclose(end, begin + 1.5 * (progress - begin), rtol=0, atol=1e-12)
        begin = end
    assert rounds[2].cohort.absent == tuple(c for c, group in enumerate(GROUPS) if group == 2)


@pytest.mark.parametrize("method", ["a-fedavg", "a-scaffold"])
def test_the_first_period_after_an_averaged_stage_starts_from_the_mean(method: str) -> None:
    # As above, in two stages of two cycles; the second starts with round 6.
    rows = (*((r, c) for r in (0, 3, 6, 9) for c in (0, 1)), (11, EMPTY))
    trace = Trace(rows=rows, schedule=Cyclic(assignment="metadata"))
    training, _, start = assemble_small(
        small_recipe(method, participation=trace, amplify=1.5, stage_output="round_mean", **STAGES)
    )
    rounds = list(training.rounds(start))
    begin, progress, end = (training.algorithm.extract_model(rounds[r].state.server.shared).weights for r in (5, 6, 8))
    torch.testing.assert_close(end, begin + 1.5 * (progress - begin), rtol=0, atol=1e-12)


def test_a_whole_cycle_without_clients_leaves_the_model_where_it_was() -> None:
    trace = Trace(rows=((5, EMPTY),), schedule=Cyclic(assignment="metadata"))
    for method in ("a-fedavg", "a-scaffold", "cycp-minimax"):
        training, _, start = assemble_small(small_recipe(method, participation=trace))
        *_, last = training.rounds(start)
        assert same_bits(last.state.server.shared, start.server.shared)


# ------------------------------------------------------------------------------------------------------------ the loop


def test_rounds_are_run_one_at_a_time_and_only_when_asked_for() -> None:
    training, _, start = assemble_small(small_recipe("cycp-fedavg"))
    rounds = training.rounds(start)
    assert training.ledger.traffic.rounds == 0
    next(rounds)
    assert training.ledger.traffic.rounds == 1
    assert list(training.rounds(start._replace(round=training.plan.total_rounds))) == []


def test_a_round_reports_the_mean_value_of_its_visits() -> None:
    recipe = small_recipe("cycp-fedavg", cycles=1)
    rounds, exchanges = record_exchanges(recipe)
    training = assemble_small(recipe).training
    for finished, exchange in zip(rounds, exchanges, strict=True):
        again = training.engine.visit(exchange.download, exchange.cohort)
        assert finished.loss_value == pytest.approx(float(again.loss or 0), rel=1e-12)
        # The logistic loss of a scorer near 0 is near log 2, scaled by 1 under the default weighting.
        assert 0.2 < float(finished.loss_value or 0) < 2


def test_vitals_are_the_duals() -> None:
    rounds = run_rounds(small_recipe("cycp-minimax"))
    duals = rounds[-1].state.server.shared.duals
    assert rounds[-1].diagnostic_values == {"a": float(duals.a), "b": float(duals.b), "alpha": float(duals.alpha)}
    assert run_rounds(small_recipe("fedavg"))[-1].diagnostic_values == {}
    assert linear_scorer().weight.requires_grad


# ---------------------------------------------------------------------------------------------- members that go wrong


@dataclass(frozen=True, kw_only=True)
class Flat(Mean):
    """Returns one number for all weights."""

    name: ClassVar[str] = "flat"

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        return tree_map(torch.mean, uploads)


@dataclass(frozen=True, kw_only=True)
class Forgetful(ServerOptimizer):
    """Returns the change without a state, or a change of another shape."""

    name: ClassVar[str] = "forgetful"
    pair: bool = False

    def update(self, change: Tensor, state: Tree) -> Any:
        return (change[:1], state) if self.pair else change


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_mean_of_another_shape_is_named(engine: str) -> None:
    message = (
        r"mean 'flat' has returned Model\(\[\], \[\]\); it must have the shapes of an upload; one upload has Model"
    )
    with pytest.raises(ValueError, match=message):
        run_rounds(small_recipe("cycp-fedavg", mean=Flat(), engine=engine))


@pytest.mark.parametrize(("pair", "returned"), [(False, r"\[5\]"), (True, r"\(\[1\], \(\)\)")])
def test_a_server_optimizer_without_change_and_state_is_named(pair: bool, returned: str) -> None:
    needs = r"it must return a pair \(change, state\), with a change of shape \[5\]"
    with pytest.raises(ValueError, match=f"server optimizer 'forgetful' has returned {returned}; {needs}"):
        run_rounds(small_recipe("cycp-fedavg", server_optimizer=Forgetful(pair=pair)))
