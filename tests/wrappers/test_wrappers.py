"""Every wrapper around every family is held to a plain torch twin, on every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cli_helpers import fedauc
from fedauc.algorithms import find_algorithms, find_methods
from fedauc.algorithms.compositional import CompositionalPairwise
from fedauc.algorithms.focus import Focus
from fedauc.algorithms.local_pairs import LocalPairs
from fedauc.algorithms.logit_adjusted import LogitAdjustedFedAvg
from fedauc.algorithms.one_vs_rest import OneVsRestPairwise
from fedauc.engines import engines
from fedauc.engines.draws import Draws
from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedauc.experiments.fitting import fit
from fedauc.experiments.recipe import Recipe
from fedauc.federation.server import FederatedRun
from fedauc.interfaces import Download, Upload, Wrapper
from fedauc.metrics import auc
from fedauc.models.mlp import MLP
from fedauc.testing import check_wrapper
from fedauc.trees import tree_at, tree_leaves
from fedauc.wrappers import find_wrappers
from fedauc.wrappers.adam import Adam
from fedauc.wrappers.fedprox import FedProx
from fedauc.wrappers.momentum import Momentum
from fedauc.wrappers.personal_head import PersonalHead
from federation.memory_grid import make_agreement, make_exchange, make_grid
from small_federations import (
    FEATURES,
    assemble_small,
    held_out,
    linear_scorer,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)
from wrappers.wrapper_twins import MakeOptimizer, Rows, Start, run_visit

METHODS = [
    "a-fedavg",
    "a-scaffold",
    "codasca",
    "cycp-fedavg",
    "cycp-minimax",
    "cycp-pairwise",
    "rs-pairwise",
    "scaffold",
]
HIDDEN, HEAD = 3, 4
"""The head of the scorer has 3 weights and a bias."""

LEARNING_RATE = 0.2


class Twin(NamedTuple):
    """What a wrapper means in plain torch: an optimizer, the weight of the pull, and the length of the head."""

    wrappers: tuple[Wrapper, ...]
    optimizer: MakeOptimizer
    mu: float = 0.0
    head: int = 0


def use_sgd(**options: Any) -> MakeOptimizer:
    return lambda weights, rate: torch.optim.SGD(weights, rate, **options)


def use_adam(weights: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, rate, betas=(0.8, 0.95), eps=1e-6)


TWINS = {
    "none": Twin((), use_sgd()),
    "fedprox": Twin((FedProx(mu=0.7),), use_sgd(), mu=0.7),
    "momentum": Twin((Momentum(beta=0.6),), use_sgd(momentum=0.6)),
    "adam": Twin((Adam(beta1=0.8, beta2=0.95, epsilon=1e-6),), use_adam),
    "personal-head": Twin((PersonalHead(),), use_sgd(), head=HEAD),
    "fedprox,momentum": Twin((FedProx(mu=0.7), Momentum(beta=0.6)), use_sgd(momentum=0.6), mu=0.7),
    "personal-head,momentum": Twin((PersonalHead(), Momentum(beta=0.6)), use_sgd(momentum=0.6), head=HEAD),
}
every_twin = pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
every_method = pytest.mark.parametrize("method", METHODS)


def two_layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double()


def score_two_layers(weights: Tensor, inputs: Tensor) -> Tensor:
    first, bias, last, shift = torch.split(weights, [FEATURES * HIDDEN, HIDDEN, HIDDEN, 1])
    return torch.tanh(inputs @ first.view(HIDDEN, FEATURES).T + bias) @ last + shift


def make_recipe(method: str, twin: Twin, **changes: Any) -> Recipe:
    settings = {"cycles": 3, "local_steps": 3, "learning_rate": LEARNING_RATE, "wrappers": twin.wrappers, **changes}
    return small_recipe(method, **settings)


class TwinClients:
    """What each client keeps in the twin: variates of weights and duals, the gradients of a period, and its head."""

    def __init__(self, recipe: Recipe, twin: Twin) -> None:
        self._recipe, self._twin = recipe, twin
        self._variates: dict[int, Tensor] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._periods: dict[int, int] = {}
        self._heads: dict[int, Tensor] = {}

    def visit(self, client: int, download: Download, batches: list[Rows]) -> tuple[Tensor, Tensor | None]:
        """The changes of weights (and duals), and of the variate, where the family has one."""
        weights, duals, variate = read_shared(self._recipe.algorithm.name, download.shared)
        start = weights
        if self._twin.head:
            start = torch.cat([weights[:-HEAD], self._heads.get(client, weights[-HEAD:])])
        old = None if variate is None else self._variates.get(client, torch.zeros_like(variate))
        if self._recipe.algorithm.name == "a-scaffold" and self._periods.get(client) != download.phase.cycle:
            if client in self._gradients:
                self._variates[client] = old = torch.stack(self._gradients.pop(client)).mean(0)
            self._periods[client] = download.phase.cycle
        correction = None if variate is None or old is None else self._without_head(variate - old, len(weights))
        end = run_visit(
            Start(start, duals, *split_correction(correction, len(weights))),
            batches,
            score_two_layers,
            float(download.phase.learning_rate),
            self._twin.optimizer,
            self._twin.mu,
        )
        self._heads[client] = end.weights[-HEAD:]
        change = self._without_head(end.weights - weights, len(weights))
        if end.duals is not None and duals is not None:
            change = torch.cat([change, end.duals - duals])
        if old is None:
            return change, None
        raw = end.gradient if end.dual_gradient is None else torch.cat([end.gradient, end.dual_gradient])
        return change, self._without_head(self._renew_variate(client, raw, old), len(weights))

    def _renew_variate(self, client: int, raw: Tensor, old: Tensor) -> Tensor:
        """How much the client's (next) variate changes."""
        if self._recipe.algorithm.name != "a-scaffold":
            self._variates[client] = raw
            return raw - old
        gradients = self._gradients.setdefault(client, [])
        before = torch.stack(gradients).mean(0) if gradients else old
        gradients.append(raw)
        return torch.stack(gradients).mean(0) - before

    def _without_head(self, vector: Tensor, length: int) -> Tensor:
        if not self._twin.head:
            return vector
        return torch.cat([vector[: length - HEAD], torch.zeros(HEAD, dtype=vector.dtype), vector[length:]])


def split_correction(correction: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None]:
    if correction is None:
        return None, None
    return correction[:length], correction[length:] if len(correction) > length else None


def read_shared(family: str, shared: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weights, duals and c, where the family has them."""
    if family in ("scaffold", "a-scaffold"):
        return shared.model.weights, None, shared.variate
    if family == "minimax":
        return shared.model.weights, torch.stack(tuple(shared.duals)), None
    if family == "codasca":
        duals, dual_variate = (torch.stack(tuple(part.duals)) for part in shared)
        return shared.point.model.weights, duals, torch.cat([shared.variate.weights, dual_variate])
    return shared.weights, None, None


def flatten_upload(upload: Upload) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree_leaves(upload.mean)])


def draw_batches(recipe: Recipe, download: Download, position: int, client: int, draws: Draws) -> list[Rows]:
    clients, (rows, weights) = small_federation(), draws.draw_visit(client, download.phase)
    passive = [tree_at(tree_at(download.per_client, position), step) for step in range(len(rows))]
    return [
        Rows(
            clients.inputs[index],
            clients.labels[index],
            torch.from_numpy(weights),
            download.phase.batch.positives,
            passive[step],
        )
        for step, index in enumerate(rows)
    ]


def check_uploads(method: str, twin: Twin, engine: str) -> None:
    recipe = make_recipe(method, twin, engine=engine)
    training = assemble_small(recipe, two_layers()).training
    draws = Draws(small_federation(), training.setting, recipe.algorithm.objective.batch_kind)
    twin_clients = TwinClients(recipe, twin)
    _, exchanges = record_exchanges(recipe, two_layers())
    compared = 0
    for download, cohort, upload in exchanges:
        if download.phase.scoring:
            continue
        expected = torch.zeros(())
        for position, (client, share) in enumerate(zip(cohort.clients, cohort.weights, strict=True)):
            batches = draw_batches(recipe, download, position, client, draws)
            change, variate = twin_clients.visit(client, download, batches)
            expected = expected + share * (change if variate is None else torch.cat([change, variate]))
        torch.testing.assert_close(flatten_upload(upload), expected, rtol=1e-9, atol=1e-10)
        compared += 1
    assert compared >= 3


def test_the_twins_cover_every_wrapper_and_every_family() -> None:
    # Example-level privacy refuses some families, so it has twins of its own (test_example_dp.py).
    twins = {wrapper.name for twin in TWINS.values() for wrapper in twin.wrappers}
    assert twins | {"example-dp"} == set(find_wrappers())
    families = {find_methods()[method].algorithm for method in METHODS}
    # These have twins of their own: in tests/algorithms test_compositional.py (with wrappers), test_class_balance.py,
    # test_local_pairs.py and test_one_vs_rest.py, and in tests/identities that of Focus.
    families |= {CompositionalPairwise, LogitAdjustedFedAvg, Focus, LocalPairs, OneVsRestPairwise}
    assert families == set(find_algorithms().values())


@every_twin
@every_method
@pytest.mark.parametrize("engine", sorted(set(engines()) - {"compiled"}))
def test_uploads_are_those_of_the_twin(method: str, twin: Twin, engine: str) -> None:
    check_uploads(method, twin, engine)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@every_twin
@pytest.mark.parametrize("method", ["a-scaffold", "codasca", "cycp-fedavg", "cycp-pairwise"])
def test_compiled_uploads_are_those_of_the_twin(method: str, twin: Twin) -> None:
    check_uploads(method, twin, "compiled")


@every_twin
@pytest.mark.parametrize("method", ["cycp-pairwise", "a-scaffold"])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_resumed_run_has_the_same_bits(method: str, twin: Twin, engine: str, tmp_path: Path) -> None:
    recipe, path = make_recipe(method, twin, engine=engine), tmp_path / "checkpoint"
    training, _, start = assemble_small(recipe, two_layers())
    *_, last = rounds = list(training.rounds(start))
    stopped = assemble_small(recipe, two_layers()).training
    middle = next(finished for finished in stopped.rounds(start) if finished.state.round == len(rounds) // 2)
    client_states = stopped.engine.client_states()
    save_checkpoint(path, Checkpoint(middle.state, client_states, stopped.ledger, []))
    loaded, resumed = load_checkpoint(path, "cpu"), assemble_small(recipe, two_layers()).training
    resumed.engine.restore_client_states(loaded.client_states)
    *_, again = resumed.rounds(loaded.state)
    assert same_bits(again.state.server, last.state.server)
    expected_states = training.engine.client_states()
    assert resumed.engine.client_states().keys() == expected_states.keys()
    assert all(same_bits(state, expected_states[client]) for client, state in resumed.engine.client_states().items())


@every_twin
@pytest.mark.parametrize("method", ["cycp-pairwise", "scaffold", "cycp-minimax"])
def test_the_federation_gives_the_bits_of_the_simulation(method: str, twin: Twin, tmp_path: Path) -> None:
    agreement = replace(
        make_agreement(method, {"evaluation": "none"}, wrappers=twin.wrappers), model=MLP(hidden=(HIDDEN,))
    )
    grid = make_grid(tmp_path / "sites")
    run = FederatedRun.create(agreement, make_exchange(grid, agreement), tmp_path / "run")
    run.train_to_end()
    recipe = replace(agreement.recipe, engine="loop")
    *_, expected = run_rounds(recipe, agreement.model.build((FEATURES,), recipe.seed))
    assert same_bits(run.loop.state.server, expected.state.server)


@pytest.mark.parametrize("name", sorted(find_wrappers()))
def test_every_wrapper_passes_the_exported_suite(name: str) -> None:
    check_wrapper(find_wrappers()[name]())


def test_a_personal_head_needs_a_body_to_average() -> None:
    message = "personal-head.layers is 1; it must be below the 1 layers of the model"
    with pytest.raises(ValueError, match=message):
        assemble_small(small_recipe("cycp-fedavg", wrappers="personal-head"), linear_scorer())


def test_a_personal_head_never_leaves_its_client() -> None:
    """The server keeps the initial head, every client has another one, and personal models use it."""
    recipe = make_recipe("cycp-fedavg", TWINS["personal-head"])
    training, _, start = assemble_small(recipe, two_layers())
    *_, last = training.rounds(start)
    shared, initial = last.state.server.shared, start.server.shared
    assert torch.equal(shared.weights[-HEAD:], initial.weights[-HEAD:])
    assert not torch.equal(shared.weights[:-HEAD], initial.weights[:-HEAD])
    states = training.engine.client_states()
    models = [training.algorithm.personal_model(shared, state).weights for state in states.values()]
    assert len({tuple(weights[-HEAD:].tolist()) for weights in models}) == len(states)
    assert all(torch.equal(weights[:-HEAD], shared.weights[:-HEAD]) for weights in models)


@pytest.mark.parametrize("wrappers", ["momentum,personal-head", "personal-head,momentum"])
@pytest.mark.parametrize("method", ["cycp-fedavg", "a-scaffold"])
def test_a_personal_head_scores_rows_inside_and_outside_another_wrapper(method: str, wrappers: str) -> None:
    """Clients of cycp-fedavg keep nothing inside the head's wrapper, and those of a-scaffold keep variates."""
    recipe = small_recipe(method, cycles=1, wrappers=wrappers)
    test = held_out()._replace(clients=np.zeros(len(held_out().labels), dtype=int))
    fitted = fit(two_layers(), small_federation(), recipe, test=test)
    model = fitted.state.server.shared if method == "cycp-fedavg" else fitted.state.server.shared.model
    state = fitted.client_states[0].wrapper if wrappers.endswith("head") else fitted.client_states[0].inner.wrapper
    scores = score_two_layers(torch.cat([model.weights[:-HEAD], state]), test.inputs)
    assert not torch.equal(state, model.weights[-HEAD:])
    assert fitted.history[-1][1].auc == pytest.approx(auc(test.labels.numpy(), scores.numpy()), abs=1e-12)


def test_rows_are_scored_with_the_head_of_their_client() -> None:
    clients, recipe = small_federation(), make_recipe("cycp-fedavg", TWINS["personal-head"])
    test = held_out()._replace(clients=np.arange(len(held_out().labels)) % (len(clients) + 1))
    fitted = fit(two_layers(), clients, recipe, test=test)
    scores = fitted.scores(test.inputs)
    training = assemble_small(recipe, two_layers()).training
    for client, state in fitted.client_states.items():
        personal = training.algorithm.personal_model(fitted.state.server.shared, state)
        rows = test.clients == client
        own_scores = score_two_layers(personal.weights, test.inputs[rows])
        assert not np.allclose(scores[rows], own_scores)
        scores[rows] = own_scores
    # Client 2 has no rows and number 8 is unknown: their rows are scored with the initial head.
    assert fitted.history[-1][1].auc == pytest.approx(auc(test.labels.numpy(), scores), abs=1e-12)


def test_a_federations_server_cannot_evaluate_personal_heads(tmp_path: Path) -> None:
    agreement = replace(make_agreement("cycp-fedavg", wrappers="personal-head"), model=MLP(hidden=(HIDDEN,)))
    with pytest.raises(ValueError, match="evaluation is 'histograms'; parts of the model stay at the sites"):
        FederatedRun.create(agreement, make_exchange(make_grid(tmp_path / "sites"), agreement), tmp_path / "run")


@pytest.mark.parametrize("wrapper", [FedProx(mu=0), Momentum(beta=0)], ids=["fedprox", "momentum"])
def test_a_wrapper_of_weight_zero_changes_no_bit(wrapper: Wrapper) -> None:
    plain, wrapped = (
        run_rounds(small_recipe("cycp-minimax", wrappers=chosen), linear_scorer())[-1] for chosen in ((), (wrapper,))
    )
    assert same_bits(plain.state.server, wrapped.state.server)


def test_wrapped_runs_with_equal_local_steps_may_share_a_graph() -> None:
    """What only the server reads does not count, inside a wrapper as well."""
    first, second, other = (
        assemble_small(small_recipe("a-fedavg", amplify=amplify, wrappers=(FedProx(mu=mu),))).training.algorithm
        for amplify, mu in ((1.2, 0.1), (1.7, 0.1), (1.2, 0.2))
    )
    assert first != second
    assert first.without_server_settings() == second.without_server_settings() != other.without_server_settings()


@pytest.mark.gpu
@every_twin
@pytest.mark.parametrize("method", ["a-scaffold", "codasca", "cycp-pairwise"])
def test_a_gpu_gives_the_result_of_the_loop(method: str, twin: Twin) -> None:
    """In float64, so that only the order of sums differs; short runs are captured without compiling."""
    on_cpu, on_gpu = (
        run_rounds(make_recipe(method, twin, engine=engine, device=device), two_layers())[-1].state.server.shared
        for engine, device in (("loop", "cpu"), ("auto", "cuda"))
    )
    for expected, found in zip(tree_leaves(on_cpu), tree_leaves(on_gpu), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("wrappers", ["fedprox,momentum", "adam"])
def test_a_compiled_graph_gives_the_result_of_the_loop(wrappers: str) -> None:
    """Momentum works on split vectors; Adam takes roots, so its vectors stay whole."""
    on_cpu, on_gpu = (
        run_rounds(small_recipe("cycp-fedavg", wrappers=wrappers, engine=engine, device=device), two_layers())[-1]
        for engine, device in (("loop", "cpu"), ("graphed", "cuda"))
    )
    expected, found = (done.state.server.shared.weights.cpu() for done in (on_cpu, on_gpu))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_command_line_wraps_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--data", "synthetic", "--data.clients", "6", "--cycles", "2", "--local-steps", "2", "--model", "mlp"]
    wrapped = ["--wrappers", "personal-head,momentum", "--wrappers.momentum.beta", "0.5"]
    for name, chosen in (("plain", []), ("wrapped", wrapped)):
        assert fedauc(capsys, "run", *options, *chosen, "--out", str(tmp_path / name)).code == 0
    plain, records = ((tmp_path / name / "records.jsonl").read_text() for name in ("plain", "wrapped"))
    assert plain != records
    recipe = json.loads((tmp_path / "wrapped" / "config.json").read_text())["recipe"]
    assert recipe["wrappers"] == [{"name": "personal-head", "layers": 1}, {"name": "momentum", "beta": 0.5}]
    assert fedauc(capsys, "resume", str(tmp_path / "wrapped")).code == 0
