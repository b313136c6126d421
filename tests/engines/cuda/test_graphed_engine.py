"""The graphed engine: every way to take a step gives the loop's result, alone and together, here and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc import Clients, split_vectors
from fedauc.algorithms._local import point_gradient
from fedauc.algorithms.fedavg import FedAvg
from fedauc.engines.cuda import engine as graphed
from fedauc.engines.cuda import lanes
from fedauc.engines.cuda.capture import prepare_stepper
from fedauc.engines.cuda.engine import GraphedEngine, SharedGraph
from fedauc.engines.kernels import Unsupported
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Batch, Download, Model, Network
from fedauc.models import find_models
from fedauc.models._layers import InputScaling
from fedauc.network import Compute, ModuleNetwork
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.training import Round
from fedauc.trees import Tree
from graphed_runs import (
    WAYS,
    force_step_variant,
    largest_difference,
    make_plain_recipe,
    make_recipe,
    run_all_rounds,
    small_table,
    tiny_network,
)

METHODS = ["cycp-pairwise", "cycp-minimax", "a-scaffold", "codasca", "cycp-fedavg"]


def image_clients() -> Clients:
    """Five clients of 12 small colour images, one of them without positives."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(5), 12)
    labels = (np.arange(60) % 3 == 0) & (owner != 2)
    return Clients.from_arrays(rng.integers(0, 256, (60, 3, 9, 7)).astype(np.uint8), labels, client=owner)


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Convolutions with stride, padding, a bias and without, both norms, pooling."""
    torch.default_generator.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3, padding=1),
        norm(4),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 1),
    )
    return InputScaling(body)


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("norm", [group_norm, nn.BatchNorm2d], ids=["group", "batch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_every_way_gives_the_loops_result(
    method: str, way: str, norm: Callable[[int], nn.Module], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs with client memory, duals, passive scores and running statistics; some parameters are large."""
    force_step_variant(monkeypatch, way)
    monkeypatch.setattr(split_vectors, "OWN_PART_FROM", 20)
    loop = run_all_rounds(assemble_training(make_recipe(method, engine="loop"), network(norm), image_clients()))
    recipe = make_recipe(method, engine="graphed")
    # The same choice that assemble makes on a GPU, whose order of weights must be undone to compare.
    monkeypatch.setattr(
        "fedauc.experiments.assembly.Compute", lambda device, mixed, channels_last: Compute(device, mixed, last)
    )
    assembly = assemble_training(recipe, network(norm), image_clients())
    graphed = run_all_rounds(assembly)
    final_state = _read_state(graphed, recipe, assembly.network)
    wanted = _read_state(loop, recipe, ModuleNetwork(network(norm), torch.float64))
    np.testing.assert_allclose(final_state, wanted, rtol=1e-9, atol=1e-11)
    for one, two in zip(graphed, loop, strict=True):
        assert (one.loss_value is None) == (two.loss_value is None)
        assert one.loss_value is None or one.loss_value == pytest.approx(two.loss_value, rel=1e-9)
    assert graphed[-1].traffic == loop[-1].traffic


def _read_state(rounds: list[Round], recipe: Recipe, made: ModuleNetwork) -> np.ndarray:
    """The trained module's state, whatever the order of the flat vector."""
    module = made.build_module(recipe.algorithm.extract_model(rounds[-1].state.server.shared))
    return np.concatenate([value.detach().double().flatten().numpy() for value in module.state_dict().values()])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_step_gives_the_loops_result(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Duals have no dimension of their own in one lane, which compiled code once lost."""
    force_step_variant(monkeypatch, way, compiled=True)
    loop, graphed = (
        run_all_rounds(assemble_training(make_plain_recipe("cycp-minimax", engine=e), tiny_network(), small_table()))
        for e in ("loop", "graphed")
    )
    assert largest_difference(loop[-1], graphed[-1]) < 1e-11


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_rules_and_data_that_differ_in_numbers_alone_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decay, the surrogate's scale and the rows are inputs of compiled code; results are each run's own."""
    force_step_variant(monkeypatch, "stacked", compiled=True)
    compiled: list[object] = []
    plain = torch.compile

    def count_compilation(*given: Any, **more: Any) -> Any:
        compiled.append(given)
        return plain(*given, **more)

    monkeypatch.setattr(torch, "compile", count_compilation)
    rules = [PairwiseSigmoid(scale=0.7), PairwiseSigmoid(scale=0.2)]
    for decay, rule, clients in zip((1e-3, 3e-2), rules, (7, 8), strict=True):
        change = {"objective": rule, "weight_decay": decay}
        runs = (make_plain_recipe("cycp-pairwise", engine=engine, **change) for engine in ("loop", "graphed"))
        loop, graphed = (run_all_rounds(assemble_training(run, tiny_network(), small_table(clients))) for run in runs)
        assert largest_difference(loop[-1], graphed[-1]) < 1e-11
    assert len(compiled) == 1


@pytest.mark.parametrize("way", WAYS)
def test_weights_kept_in_bfloat16_are_the_weights_that_casting_gives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision, with client memory: the same bits with and without the copies, which three convolutions have."""
    force_step_variant(monkeypatch, way)
    monkeypatch.setattr(split_vectors, "OWN_PART_FROM", 20)
    recipe = make_recipe("scaffold", engine="graphed", dtype="float32", precision="mixed")
    capture_sizes: list[int] = []

    def count_bf16_copies(made: lanes.Lanes, kind: ModuleNetwork) -> lanes.Lanes:
        capture_sizes.append(len(plain(made, kind).bf16_copies))
        return plain(made, kind)

    plain = lanes._add_bf16_copies
    monkeypatch.setattr(lanes, "_add_bf16_copies", count_bf16_copies)
    graphed = run_all_rounds(assemble_training(recipe, network(group_norm), image_clients()))
    monkeypatch.setattr(lanes, "_add_bf16_copies", lambda made, kind: made)
    other = run_all_rounds(assemble_training(recipe, network(group_norm), image_clients()))
    assert largest_difference(graphed[-1], other[-1]) == 0
    assert capture_sizes[0] > 1


@dataclass(frozen=True, kw_only=True)
class Clipped(FedAvg):
    """Clipping takes a norm over all parameters, which pieces do not have."""

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        gradient = point_gradient(self.objective, network, local, batch)
        short = gradient.weights / gradient.weights.norm(dim=-1, keepdim=True).clamp(min=0.1)
        return Model(local.weights - 0.1 * short, gradient.buffers), ()


def test_a_rule_that_needs_the_whole_vector_gets_it() -> None:
    recipes = [make_plain_recipe("cycp-fedavg", engine=engine) for engine in ("loop", "graphed")]
    clipped = [replace(recipe, algorithm=Clipped(weight_decay=1e-3)) for recipe in recipes]
    loop, graphed = (run_all_rounds(assemble_training(recipe, tiny_network(), small_table())) for recipe in clipped)
    assert largest_difference(loop[-1], graphed[-1]) < 1e-11
    plain = run_all_rounds(assemble_training(recipes[0], tiny_network(), small_table()))
    assert largest_difference(loop[-1], plain[-1]) > 1e-3


def test_cohorts_larger_than_the_lanes_come_in_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven clients in lanes for three: waves of three, three and one."""
    monkeypatch.setattr(graphed, "MAX_LANES", 3)
    for method in ("cycp-pairwise", "scaffold"):
        changes = {"groups": 1, "per_round": 7}
        loop = run_all_rounds(
            assemble_training(make_plain_recipe(method, engine="loop", **changes), tiny_network(), small_table())
        )
        graphed_rounds = run_all_rounds(
            assemble_training(make_plain_recipe(method, engine="graphed", **changes), tiny_network(), small_table())
        )
        assert largest_difference(loop[-1], graphed_rounds[-1]) < 1e-11


def test_an_interrupted_first_visit_leaves_nothing_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while compiling: the next visit starts again, and trains."""

    def interrupt_capture(*_: Any) -> Any:
        raise KeyboardInterrupt

    assembly = assemble_training(make_plain_recipe("cycp-fedavg", engine="graphed"), tiny_network(), small_table())
    with monkeypatch.context() as patch:
        patch.setattr(graphed, "prepare_stepper", interrupt_capture)
        with pytest.raises(KeyboardInterrupt):
            run_all_rounds(assembly)
    loop = run_all_rounds(
        assemble_training(make_plain_recipe("cycp-fedavg", engine="loop"), tiny_network(), small_table())
    )
    assert largest_difference(loop[-1], run_all_rounds(assembly)[-1]) < 1e-11


def test_lanes_are_as_wide_as_the_largest_cohort_of_a_cycle() -> None:
    """Seven clients in two groups, in the order 3 and 4: the first visit makes four lanes."""
    assembly = assemble_training(
        make_plain_recipe("cycp-fedavg", engine="graphed", groups=2), tiny_network(), small_table()
    )
    engine, training = assembly.training.engine, assembly.training
    assert isinstance(engine, GraphedEngine)
    sizes = [len(training.schedule.cohort(number).clients) for number in range(2)]
    assert engine.largest_cohort == max(sizes) == 4
    smallest = sizes.index(3)
    opened = training.open_round(assembly.start._replace(round=smallest))
    assert opened.download is not None
    engine.visit(opened.download, opened.cohort)
    assert len(engine._own_graph._lane_stacks[0].losses) == 4


@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise", "a-scaffold", "clipped"])
@pytest.mark.parametrize("way", WAYS)
def test_runs_together_give_each_runs_own_result(way: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, data, learning rates and schedules differ; one run waits for a round. Clipped runs get their own lanes."""
    force_step_variant(monkeypatch, way)
    settings: list[dict[str, Any]] = [
        {"learning_rate": 0.1},
        {"learning_rate": 0.02, "per_round": 1},
        {"learning_rate": 0.3},
    ]
    recipes = [_make_named_recipe(method, seed=seed, **change) for seed, change in enumerate(settings)]
    alone = [
        run_all_rounds(assemble_training(recipe, tiny_network(), small_table(7 + run)))[-1]
        for run, recipe in enumerate(recipes)
    ]
    parts = [assemble_training(recipe, tiny_network(), small_table(7 + run)) for run, recipe in enumerate(recipes)]
    engines = [part.training.engine for part in parts]
    shared_graph = SharedGraph([engine for engine in engines if isinstance(engine, GraphedEngine)])
    states = [part.start for part in parts]
    last: list[Round | None] = [None] * 3
    for turn in range(1 + max(part.training.plan.total_rounds for part in parts)):
        opened = [
            part.training.open_round(state)
            if state.round < part.training.plan.total_rounds and (turn, run) != (1, 2)
            else None
            for run, (part, state) in enumerate(zip(parts, states, strict=True))
        ]
        visits = shared_graph.visit(
            [None if o is None or o.download is None else (o.download, o.cohort) for o in opened]
        )
        assert len(shared_graph._lane_stacks) == (3 if method == "clipped" else 1)
        for run, (part, pending, visit) in enumerate(zip(parts, opened, visits, strict=True)):
            if pending is not None:
                last[run] = finished = part.training.close_round(pending, visit)
                states[run] = finished.state
    for one, other in zip(alone, last, strict=True):
        assert other is not None
        assert largest_difference(one, other) < 1e-13


def _make_named_recipe(method: str, **changes: Any) -> Recipe:
    if method != "clipped":
        return make_plain_recipe(method, engine="graphed", **changes)
    return replace(make_plain_recipe("cycp-fedavg", engine="graphed", **changes), algorithm=Clipped(weight_decay=1e-3))


def test_runs_of_another_shape_are_refused() -> None:
    recipes = [make_plain_recipe("cycp-minimax", engine="graphed"), make_plain_recipe("cycp-fedavg", engine="graphed")]
    engines = [assemble_training(recipe, tiny_network(), small_table()).training.engine for recipe in recipes]
    with pytest.raises(ValueError, match="need one local step, model and shape of rows"):
        SharedGraph([engine for engine in engines if isinstance(engine, GraphedEngine)])


def test_a_module_with_dropout_is_refused_and_runs_in_the_loop() -> None:
    shaky = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    with pytest.raises(Unsupported, match="it draws random numbers"):
        assemble_training(make_plain_recipe("cycp-fedavg", engine="graphed"), shaky, small_table())
    still = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    assemble_training(make_plain_recipe("cycp-fedavg", engine="graphed"), still, small_table())


@pytest.mark.parametrize(("name", "norm"), [("resnet18", "group"), ("resnet18", "batch"), ("densenet121", "batch")])
def test_the_papers_networks_give_the_loops_result(name: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of two clients on two positives and two negatives, all clients stacked, channels last."""
    force_step_variant(monkeypatch, "stacked")
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (16, 3, 32, 32)).astype(np.uint8)
    data = Clients.from_arrays(pictures, np.arange(16) % 2 == 0, client=np.arange(16) // 8)
    kind: Any = find_models()[name]
    module = kind(norm=norm).build((3, 32, 32), 0)
    size: dict[str, Any] = {"positives": 2, "negatives": 2, "local_steps": 1, "cycles": 1, "groups": 1, "per_round": 2}
    loop, graphed = (
        assemble_training(make_recipe("cycp-fedavg", engine=e, **size), module, data) for e in ("loop", "graphed")
    )
    # A BatchNorm over four images of one pixel magnifies rounding a thousandfold.
    assert largest_difference(run_all_rounds(loop)[-1], run_all_rounds(graphed)[-1]) < 1e-10


def test_compiled_steps_are_shared_by_modules_that_compute_the_same() -> None:
    """A setting that no repr shows tells two modules apart."""

    class Hidden(nn.Linear):
        def __init__(self, factor: float) -> None:
            super().__init__(3, 1)
            self.factor = factor

        def forward(self, inputs: Tensor) -> Tensor:
            return self.factor * super().forward(inputs)

    def graph_signature(module: nn.Module) -> object:
        engine = assemble_training(
            make_plain_recipe("cycp-fedavg", engine="graphed"), module, small_table()
        ).training.engine
        assert isinstance(engine, GraphedEngine)
        return engine.graph_signature

    assert graph_signature(Hidden(2.0)) == graph_signature(Hidden(2.0))
    assert graph_signature(Hidden(2.0)) != graph_signature(Hidden(3.0))
    frozen = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1))
    assert graph_signature(frozen) != graph_signature(frozen)


# -------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", ["compiled", "stacked", "single"])
@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax"])
def test_graphs_on_cuda_give_the_cpus_result(method: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with running statistics; 1e-9 leaves room for sums in another order."""
    force_step_variant(monkeypatch, "single" if way == "single" else "stacked", compiled=way == "compiled")
    captured: list[Any] = []

    def watch_capture(*given: Any) -> Any:
        captured.append(prepare_stepper(*given))
        return captured[-1]

    monkeypatch.setattr(graphed, "prepare_stepper", watch_capture)
    recipe = make_recipe(method, engine="loop")
    cpu = run_all_rounds(assemble_training(recipe, network(nn.BatchNorm2d), image_clients()))
    part = assemble_training(
        make_recipe(method, engine="graphed", device="cuda"), network(nn.BatchNorm2d), image_clients()
    )
    gpu = run_all_rounds(part)
    model = recipe.algorithm.extract_model(gpu[-1].state.server.shared)
    wanted = ModuleNetwork(network(nn.BatchNorm2d), torch.float64)
    expected = wanted.build_module(recipe.algorithm.extract_model(cpu[-1].state.server.shared)).state_dict()
    for name, value in part.network.build_module(model).state_dict().items():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-9, atol=1e-9)
    # A graph's replay, not the fallback that takes lanes one by one.
    assert [type(take.run_step.__self__).__name__ for take in captured] == ["CUDAGraph"] * len(captured)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax", "a-scaffold"])
def test_no_round_waits_for_the_device(method: str) -> None:
    """Once lanes are captured, torch finds no call that waits, whole cycles long; reading a result still waits."""
    recipe = make_recipe(method, engine="graphed", device="cuda", dtype="float32", precision="mixed", cycles=4)
    training, _, state = assemble_training(recipe, network(group_norm), image_clients())
    warm = 2 * training.setting.cycle_length
    try:
        for number in range(training.plan.total_rounds):
            if number == warm:
                torch.cuda.set_sync_debug_mode("error")
            opened = training.open_round(state)
            assert opened.download is not None
            finished = training.close_round(opened, training.engine.visit(opened.download, opened.cohort))
            state = finished.state
        with pytest.raises(RuntimeError, match="synchroniz"):
            float(training.algorithm.extract_model(state.server.shared).weights[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
