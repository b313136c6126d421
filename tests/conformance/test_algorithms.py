"""Every method of the literature, on every engine, keeps the promises of `interfaces.py`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.algorithms import find_algorithms, find_methods
from fedauc.data.weighting import WEIGHTINGS
from fedauc.engines import engines
from fedauc.experiments import checkpoint
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import (
    Algorithm,
    Batch,
    Census,
    Cohort,
    Download,
    ForwardPass,
    Model,
    Network,
    Phase,
    Setting,
    Upload,
)
from fedauc.metrics import auc
from fedauc.network import ModuleNetwork
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.squared_hinge import SquaredHinge
from fedauc.stages import Geometric, StageOutput
from fedauc.training import Round
from fedauc.trees import Tree, is_empty, tree_at, tree_leaves, tree_map, tree_stack
from small_federations import (
    EMPTY,
    FEATURES,
    all_finite,
    assemble_small,
    held_out,
    linear_scorer,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)

ENGINES = sorted(set(engines()) - {"compiled"})
"""Compiling takes seconds for every case; tests/engines/test_compiled.py has its own, fewer ones."""
OUTPUTS: tuple[StageOutput, ...] = ("last", "cycle_mean", "round_mean")

every_method = pytest.mark.parametrize("method", sorted(find_methods()))
every_engine = pytest.mark.parametrize("engine", ENGINES)

TWO_STAGES: dict[str, Any] = {"cycles": 3, "stages": Geometric(initial=1, decay=0.5, scale=2.0)}
"""A stage of one cycle and a stage of two."""


def test_every_algorithm_goes_by_a_method() -> None:
    assert {method.algorithm for method in find_methods().values()} == set(find_algorithms().values())


# ---------------------------------------------------------------------------------------------------------- whole runs


@every_method
@every_engine
@pytest.mark.parametrize("weighting", sorted(WEIGHTINGS))
def test_runs_with_single_class_and_empty_clients(method: str, engine: str, weighting: str) -> None:
    recipe = small_recipe(method, engine=engine, weighting=weighting, **TWO_STAGES)
    training, _, start = assemble_small(recipe)
    rounds = list(training.rounds(start))
    assert [r.phase.round for r in rounds] == list(range(training.plan.total_rounds))
    assert [r.state.round for r in rounds] == list(range(1, training.plan.total_rounds + 1))
    assert all(all_finite(r.state.server) for r in rounds)
    assert not any(EMPTY in r.cohort.clients for r in rounds)
    assert all((r.loss_value is None) == r.phase.scoring for r in rounds)
    assert all(r.loss_value >= 0 for r in rounds if r.loss_value is not None)
    model = recipe.algorithm.extract_model
    assert not torch.equal(model(start.server.shared).weights, model(rounds[-1].state.server.shared).weights)


@every_method
@every_engine
def test_same_seed_same_bits_and_another_seed_other_bits(method: str, engine: str) -> None:
    first, second = (run_rounds(small_recipe(method, engine=engine))[-1].state.server for _ in range(2))
    other = run_rounds(small_recipe(method, engine=engine, seed=4))[-1].state.server
    assert same_bits(first, second)
    assert not same_bits(first.shared, other.shared)


@every_method
@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_leaves_its_inputs_and_every_global_generator_alone(method: str, engine: str) -> None:
    clients, test = small_federation(), held_out()
    # Dropout draws from torch's global generator unless the engine keys it; BatchNorm has buffers to spoil.
    module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, 1)).double().train()
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    data = [t.clone() for t in (clients.inputs, clients.labels, test.inputs, test.labels)]
    index = [a.copy() for a in (clients.rows, clients.offsets, *clients.census)]
    generators = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002
    fitted = fit(module, clients, small_recipe(method, engine=engine), test=test)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert repr(np.random.get_state()) == repr(generators[1])  # noqa: NPY002
    assert random.getstate() == generators[2]
    assert all(map(torch.equal, data, (clients.inputs, clients.labels, test.inputs, test.labels)))
    assert all(map(np.array_equal, index, (clients.rows, clients.offsets, *clients.census)))
    assert module.training
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert not torch.equal(fitted.module.get_parameter("2.weight"), kept["2.weight"])


@every_method
@every_engine
@pytest.mark.parametrize("stage_output", OUTPUTS)
def test_resumes_from_any_round_with_the_same_bits(
    method: str, engine: str, stage_output: StageOutput, tmp_path: Path
) -> None:
    recipe = small_recipe(method, engine=engine, stage_output=stage_output, **TWO_STAGES)
    whole: list[tuple[Round, dict[int, Tree]]] = []
    training, _, state = assemble_small(recipe)
    paths = [tmp_path / f"{number}" for number in range(training.plan.total_rounds)]
    checkpoint.save_checkpoint(
        paths[0], checkpoint.Checkpoint(state, training.engine.client_states(), training.ledger, [])
    )
    for finished, path in zip(training.rounds(state), [*paths[1:], tmp_path / "end"], strict=True):
        whole.append((finished, training.engine.client_states()))
        checkpoint.save_checkpoint(
            path, checkpoint.Checkpoint(finished.state, training.engine.client_states(), training.ledger, [])
        )
    for number, path in enumerate(paths):
        again = assemble_small(recipe).training
        loaded = checkpoint.load_checkpoint(path, "cpu")
        assert loaded.state.round == number
        again.engine.restore_client_states(loaded.client_states)
        again.ledger.restore_from(loaded.ledger)
        # Equal states go on equally, so a cycle and a round from each stop covers the rest.
        for (expected, client_states), result in zip(
            whole[number : number + 4], again.rounds(loaded.state), strict=False
        ):
            assert result[:-1] == expected[:-1]
            assert result.state.round == expected.state.round
            assert same_bits(result.state.server, expected.state.server)
            assert same_bits(result.state.average, expected.state.average)
            found_memories = again.engine.client_states()
            assert found_memories.keys() == client_states.keys()
            assert all(same_bits(found_memories[client], client_states[client]) for client in client_states)


def test_the_stops_above_cover_mid_cycle_scoring_and_stage_boundaries() -> None:
    training = assemble_small(small_recipe("cycp-pairwise", stage_output="round_mean", **TWO_STAGES)).training
    phases = [training.plan.phase(number) for number in range(training.plan.total_rounds)]
    # Scoring + 1 cycle, then scoring + 2 cycles, of K = 3 rounds: 15 rounds.
    assert len(phases) == 15
    assert [p.round for p in phases if p.starts_stage] == [0, 6]
    assert [p.round for p in phases if p.scoring] == [0, 1, 2, 6, 7, 8]
    assert sum(not p.ends_cycle for p in phases) == 10


def _count_arrays(tree: Tree) -> np.ndarray:
    """Numbers and bytes of a tree, counted by numpy."""
    arrays = [leaf.numpy() for leaf in tree_leaves(tree)]
    return np.array([sum(a.size for a in arrays), sum(a.nbytes for a in arrays)])


@every_method
@every_engine
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stage_output", ["last", "round_mean"])
def test_ledger_totals_equal_a_count_at_the_clients(method: str, engine: str, dtype: str, stage_output: str) -> None:
    settings: dict[str, Any] = {"prox": 0.1} if find_methods()[method].algorithm.name in ("minimax", "codasca") else {}
    rounds, exchanges = record_exchanges(
        small_recipe(method, engine=engine, dtype=dtype, stage_output=stage_output, **TWO_STAGES, **settings)
    )
    down, up, anchored = np.zeros(2, dtype=int), np.zeros(2, dtype=int), set()
    for download, cohort, upload in exchanges:
        for position, client in enumerate(cohort.clients):
            down += _count_arrays((download.shared, tree_at(download.per_client, position)))
            up += _count_arrays((upload.mean, tree_at(upload.pool, position)))
            if (download.phase.stage, client) not in anchored:
                anchored.add((download.phase.stage, client))
                down += _count_arrays(download.anchor)
    traffic = rounds[-1].traffic
    assert (traffic.rounds, traffic.absences) == (len(rounds), 0)
    assert traffic.visits == sum(len(r.cohort.clients) for r in rounds)
    assert [traffic.floats_down, traffic.bytes_down] == down.tolist()
    assert [traffic.floats_up, traffic.bytes_up] == up.tolist()
    assert traffic.bytes_down == traffic.floats_down * {"float32": 4, "float64": 8}[dtype]


@every_method
@every_engine
def test_learns(method: str, engine: str) -> None:
    # Class means 3 apart in one feature: the best AUC is Phi(3 / sqrt 2) = 0.983. The start ranks by other features.
    test, module = held_out(separation=3.0), linear_scorer(bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-0.1, 0.3, -0.3, 0.3]]))
    # A full-participation cycle is one round, so that it takes more cycles to do as many.
    cycles = 24 if find_methods()[method].participation == "full" else 8
    recipe = small_recipe(method, engine=engine, cycles=cycles, local_steps=8, positives=8, negatives=8)
    fitted = fit(module, small_federation(times=4, separation=3.0), recipe, test=test)
    labels = test.labels.numpy()
    initial = auc(labels, module(test.inputs).detach().numpy()[:, 0])
    curve = [quality.auc for _, quality in fitted.history]
    assert initial < 0.5
    assert curve[-1] > 0.9
    assert curve[-1] > curve[0] > initial
    assert curve[-1] == pytest.approx(auc(labels, fitted.scores(test.inputs)), abs=1e-12)


@every_method
@every_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_works_in_every_precision(method: str, engine: str, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    recipe = small_recipe(method, engine=engine, dtype=name, **TWO_STAGES)
    rounds = run_rounds(recipe)
    server = rounds[-1].state.server
    assert {leaf.dtype for leaf in tree_leaves(server.shared)} == {dtype}
    assert all_finite(server)
    exact = run_rounds(small_recipe(method, engine=engine, **TWO_STAGES))[-1].state.server
    # 14 to 21 rounds of rounding at 2^-8 relative (bfloat16); the weights are of order 1.
    close = {torch.float64: 0.0, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    first, second = (recipe.algorithm.extract_model(s.shared).weights.double() for s in (server, exact))
    assert (first - second).abs().max() <= close


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_fitted_model_scores_new_rows_in_every_precision(dtype: str) -> None:
    rows = held_out().inputs
    fitted = fit(linear_scorer(), small_federation(), small_recipe("fedavg", dtype=dtype))
    with torch.no_grad():
        expected = fitted.module(rows.to(next(fitted.module.parameters()).dtype))[:, 0].double().numpy()
    np.testing.assert_array_equal(fitted.scores(rows), expected)
    np.testing.assert_array_equal(fitted.scores(rows.numpy()), expected)


# -------------------------------------------------------------------------------------------------- client methods


@final
class LinearNetwork(Network):
    """h = X w in plain torch, for any number of leading dimensions; `width` columns of weights make an embedding."""

    def __init__(self, width: int = 0) -> None:
        self._width = width

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        weights = model.weights.reshape(*model.weights.shape[:-1], FEATURES, max(self._width, 1))
        outputs = inputs @ weights

        def pullback(cotangent: Tensor) -> Tensor:
            wide = cotangent if self._width else cotangent[..., None]
            return (inputs.transpose(-1, -2) @ wide).flatten(-2)

        return ForwardPass(outputs if self._width else outputs[..., 0], model.buffers + 1, pullback)


class Case(NamedTuple):
    """An algorithm and the network it runs on."""

    algorithm: Algorithm
    width: int = 0


def _list_cases() -> dict[str, Case]:
    result = {name: Case(m.algorithm(**dict(m.parameters), weight_decay=0.01)) for name, m in find_methods().items()}
    kinds = find_algorithms()
    result["minimax-prox"] = Case(kinds["minimax"](objective=Minimax(score="identity"), prox=0.3))  # type: ignore[call-arg]
    result["minimax-prior"] = Case(kinds["minimax"](objective=Minimax(prior=0.2)))
    result["codasca-prox"] = Case(kinds["codasca"](objective=Minimax(), prox=0.3))  # type: ignore[call-arg]
    result["pairwise-hinge"] = Case(kinds["pairwise"](objective=SquaredHinge(score="sigmoid")))
    result["pairwise-contrastive"] = Case(kinds["pairwise"](objective=Contrastive()), width=3)
    return result


CASES = _list_cases()
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

STEPS = 3


def _make_setting() -> Setting:
    recipe = small_recipe("fedavg")
    # Clients 0, 4 and 6 of the small federation hold both classes.
    census = Census(*(counts[[0, 4, 6]] for counts in small_federation().census))
    return Setting(0, 2, recipe.batch, census, "clients")


def _start_model(width: int) -> Model:
    rng = np.random.default_rng(5)
    return Model(torch.from_numpy(0.5 * rng.normal(size=FEATURES * max(width, 1))), torch.zeros(2, dtype=torch.float64))


def _make_phase(number: int, scoring: bool) -> Phase:
    batch = small_recipe("fedavg").batch
    # Cycles of two rounds, each with everyone.
    return Phase(number, number // 2, 0, 0.1, STEPS, batch, scoring, number == 0, ends_cycle=number % 2 == 1)


def _draw_batches(number: int, per_client: Tree) -> list[Batch]:
    """Each step's batch of 3 clients, `[3, 5, ...]`: 2 positives, then 3 negatives; the last client lacks positives."""
    rng = np.random.default_rng([7, number])
    labels = torch.tensor([1.0, 1, 0, 0, 0], dtype=torch.float64).expand(3, 5)
    weights = torch.from_numpy(rng.uniform(0.1, 0.5, size=(3, 5)))
    weights[2, :2] = 0
    inputs = torch.from_numpy(rng.normal(size=(STEPS, 3, 5, FEATURES)))
    return [
        Batch(inputs[step], labels, weights, tree_map(lambda leaf, at=step: leaf[:, at], per_client))
        for step in range(STEPS)
    ]


@every_case
def test_the_model_inside_the_shared_and_the_local_state_can_be_replaced(case: Case) -> None:
    """Wrappers and server optimizers change the model, and nothing else that travels or is kept."""
    algorithm, model = case.algorithm, _start_model(case.width)
    server = algorithm.init(_make_setting(), model)
    phase = _make_phase(0, algorithm.scoring_pass)
    download = algorithm.dispatch(_make_setting(), server, Cohort(0, (0,), (1.0,)), phase)
    local = algorithm.begin(download, algorithm.initial_client_state(download))
    other = Model(model.weights + 1, model.buffers + 1)
    assert same_bits(algorithm.local_model(local), model)
    for tree, replace_in, read in (
        (server.shared, algorithm.replace_model, algorithm.extract_model),
        (local, algorithm.replace_local_model, algorithm.local_model),
    ):
        changed = replace_in(tree, other)
        assert type(changed) is type(tree)
        assert read(changed) == other
        assert same_bits(replace_in(changed, model), tree)
        assert sum(not torch.equal(*pair) for pair in zip(*map(tree_leaves, (changed, tree)), strict=True)) == 2


def mean_of(upload: Upload, cohort: Cohort) -> Upload:
    """A stacked cohort's upload as an engine returns it."""
    weights = torch.tensor(cohort.weights, dtype=torch.float64)
    return upload._replace(mean=tree_map(lambda leaf: torch.tensordot(weights, leaf, dims=1), upload.mean))


class Visited(NamedTuple):
    """What a visit yields."""

    upload: Upload
    client_state: Tree
    value: Tensor


def _visit_client(case: Case, download: Download, client_state: Tree, batches: list[Batch]) -> Visited:
    """The client methods in their order; `[I, ...]` comes after the leading dimensions of the batches."""
    network, lead = LinearNetwork(case.width), batches[0].weights.ndim - 1
    client_state = case.algorithm.initial_client_state(download) if is_empty(client_state) else client_state
    local, emitted, values = case.algorithm.begin(download, client_state), [], []
    for batch in batches:
        if not download.phase.scoring:
            values.append(case.algorithm.monitored_loss(network, download, local, batch))
        local, out = case.algorithm.step(network, download, local, batch)
        emitted.append(out)
    together = tree_map(lambda *leaves: torch.stack(leaves, dim=lead), *emitted)
    value = torch.stack(values, dim=lead) if values else torch.zeros(batches[0].weights.shape[:-1])
    return Visited(*case.algorithm.finish(download, client_state, local, together), value)


def _stack_download(download: Download) -> Download:
    """What all are sent, once for each of the 3 clients."""

    def add_clients(leaf: Tensor) -> Tensor:
        return leaf.expand(3, *leaf.shape)

    return download._replace(
        shared=tree_map(add_clients, download.shared), anchor=tree_map(add_clients, download.anchor)
    )


def _assert_close(first: Tree, second: Tree) -> None:
    assert [leaf.shape for leaf in tree_leaves(first)] == [leaf.shape for leaf in tree_leaves(second)]
    for left, right in zip(tree_leaves(first), tree_leaves(second), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@every_case
def test_the_client_methods_give_a_stacked_cohort_what_they_give_each_client(case: Case) -> None:
    setting = _make_setting()
    server = case.algorithm.init(setting, _start_model(case.width))
    client_states: list[Tree] = [(), (), ()]
    # A first visit, and four with a client state, of the same period and of an earlier one.
    for number in range(5):
        phase = _make_phase(number, scoring=case.algorithm.scoring_pass and number < 2)
        cohort = Cohort(number, (0, 1, 2), (0.2, 0.3, 0.5))
        download = case.algorithm.dispatch(setting, server, cohort, phase)
        batches = _draw_batches(number, download.per_client)
        alone = [
            _visit_client(
                case,
                download._replace(per_client=tree_at(download.per_client, i)),
                client_states[i],
                [tree_at(b, i) for b in batches],
            )
            for i in range(3)
        ]
        stacked = _visit_client(
            case, _stack_download(download), () if is_empty(client_states[0]) else tree_stack(client_states), batches
        )
        together: Visited = tree_stack(alone)
        _assert_close(stacked.upload, together.upload)
        _assert_close(stacked.value, together.value)
        _assert_close(stacked.client_state, together.client_state)
        client_states = [visited.client_state for visited in alone]
        server = case.algorithm.merge(setting, server, mean_of(together.upload, cohort), cohort, phase)
    assert not torch.equal(case.algorithm.extract_model(server.shared).weights, _start_model(case.width).weights)


@every_case
@pytest.mark.parametrize("stacked", [False, True], ids=["one-client", "stacked"])
def test_step_can_be_traced_and_the_trace_gives_its_numbers(case: Case, stacked: bool) -> None:
    setting, network = _make_setting(), LinearNetwork(case.width)
    server = case.algorithm.init(setting, _start_model(case.width))
    cohort, scoring = Cohort(0, (0, 1, 2), (1 / 3,) * 3), case.algorithm.scoring_pass
    if scoring:
        filled = _visit_all(case, setting, server, cohort)
        server = case.algorithm.merge(setting, server, filled, cohort, _make_phase(1, scoring=True))
    download = case.algorithm.dispatch(setting, server, cohort, _make_phase(2, scoring=False))
    batches = _draw_batches(1, download.per_client)
    if stacked:
        download = _stack_download(download)
    else:
        batches = [tree_at(batch, 0) for batch in batches]

    def step(shared: Tree, anchor: Tree, local: Tree, batch: Batch) -> Tree:
        return case.algorithm.step(network, download._replace(shared=shared, anchor=anchor), local, batch)

    local = case.algorithm.begin(download, case.algorithm.initial_client_state(download))
    # Tracing knows inputs by identity, and at the start several zeros are one tensor: give each its own.
    example = tree_map(torch.clone, (download.shared, download.anchor, local, batches[0]))
    traced = make_fx(step)(*example)
    # Two steps on: a trace that had baked its first inputs in would not follow.
    for batch in batches:
        result = traced(download.shared, download.anchor, local, batch)
        expected = step(download.shared, download.anchor, local, batch)
        _assert_close(result, expected)
        local = expected[0]


def _visit_all(case: Case, setting: Setting, server: Tree, cohort: Cohort) -> Upload:
    download = case.algorithm.dispatch(setting, server, cohort, _make_phase(0, scoring=True))
    batches = _draw_batches(0, ())
    alone = [_visit_client(case, download, (), [tree_at(batch, i) for batch in batches]).upload for i in range(3)]
    upload: Upload = tree_stack(alone)
    return upload


@every_case
def test_the_methods_do_not_change_their_arguments(case: Case) -> None:
    setting = _make_setting()
    server = case.algorithm.init(setting, _start_model(case.width))
    client_state: Tree = ()
    for number in range(4):
        phase = _make_phase(number, scoring=case.algorithm.scoring_pass and number < 2)
        cohort = Cohort(number, (0,), (1.0,))
        initial = tree_map(torch.clone, (server.shared, server.anchor, server.private, client_state))
        download = case.algorithm.dispatch(setting, server, cohort, phase)
        batches = [tree_at(batch, 0) for batch in _draw_batches(number, download.per_client)]
        visited = _visit_client(
            case, download._replace(per_client=tree_at(download.per_client, 0)), client_state, batches
        )
        upload: Upload = tree_stack([visited.upload])
        sent = tree_map(torch.clone, upload)
        merged = case.algorithm.merge(setting, server, mean_of(upload, cohort), cohort, phase)
        assert same_bits(initial, (server.shared, server.anchor, server.private, client_state))
        assert same_bits(sent, upload)
        server, client_state = merged, visited.client_state


def test_a_recipe_says_which_engines_there_are() -> None:
    with pytest.raises(ValueError, match="engine is 'nothing'; use 'auto', 'batched', 'compiled', 'graphed' or 'loop'"):
        Recipe.of("fedavg", engine="nothing")


def test_the_linear_network_above_is_the_module_network() -> None:
    module, rows = linear_scorer(bias=False), held_out().inputs[:5]
    network = ModuleNetwork(module)
    first, second = (
        network.forward_pass(network.initial_model(), rows),
        LinearNetwork().forward_pass(network.initial_model(), rows),
    )
    cotangent = torch.arange(5, dtype=torch.float64)
    _assert_close((first.outputs, first.pullback(cotangent)), (second.outputs, second.pullback(cotangent)))


def test_assemble_needs_no_method_name() -> None:
    recipe = replace(small_recipe("fedavg"), method="my own")
    assert assemble_training(recipe, linear_scorer(), small_federation()).training.plan.total_rounds == 6
