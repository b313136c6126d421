"""Weights that no pixel meets: kept apart, moved once a visit, with the loop's result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc import Clients, split_vectors
from fedauc.engines.cuda import capture, convolutions
from fedauc.engines.cuda.engine import GraphedEngine, SharedGraph
from fedauc.engines.cuda.padding_weights import extract_padding_updates
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.models._layers import InputScaling
from fedauc.network import Compute
from fedauc.split_vectors import KernelWindow, VectorSplit
from graphed_runs import WAYS, force_step_variant, largest_difference, make_recipe, run_all_rounds

METHODS = ["cycp-pairwise", "cycp-minimax", "a-scaffold", "codasca", "cycp-fedavg"]


def image_clients() -> Clients:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), 8)
    return Clients.from_arrays(rng.integers(0, 256, (32, 3, 5, 4)).astype(np.uint8), np.arange(32) % 3 == 0, owner)


def network() -> nn.Module:
    """The third convolution sees two pixels side by side (three taps count), the fourth one (its middle tap does)."""
    torch.default_generator.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=(2, 1), padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.AvgPool2d((1, 2)),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )
    return InputScaling(body)


def assemble_with_layout(
    method: str, engine: str, last: bool, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Assembly:
    with monkeypatch.context() as patch:
        patch.setattr(
            "fedauc.experiments.assembly.Compute", lambda device, mixed, channels_last: Compute(device, mixed, last)
        )
        return assemble_training(make_recipe(method, engine=engine, **more), network(), image_clients())


def values(assembly: Assembly, shared: Any) -> np.ndarray:
    module = assembly.network.build_module(assembly.training.algorithm.extract_model(shared))
    return np.concatenate([value.detach().double().flatten().numpy() for value in module.state_dict().values()])


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_vectors, "OWN_PART_FROM", 20)


@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_kernels_with_windows_give_the_loops_result(
    method: str, way: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_step_variant(monkeypatch, way)
    loop, graphed = (assemble_with_layout(method, engine, last, monkeypatch) for engine in ("loop", "graphed"))
    actual, wanted = (
        values(assembly, run_all_rounds(assembly)[-1].state.server.shared) for assembly in (graphed, loop)
    )
    np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)
    assert isinstance(graphed.training.engine, GraphedEngine)
    windows = dict(graphed.training.engine._own_graph._lane_stacks[0].split.windows)
    assert [(w.rows, w.columns) for w in windows.values()] == [((1, 1), (0, 3)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(("method", "apart"), [("cycp-minimax", 2), ("a-scaffold", 4)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_no_pixel_meets_is_moved_once_a_visit(method: str, apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs with their own learning rates share the lanes; each has the loop's result."""
    force_step_variant(monkeypatch, "stacked", compiled=True)
    sizes = list[int]()

    def record_updates(*given: Any) -> Any:
        aside = extract_padding_updates(*given)
        sizes.append(0 if aside is None else len([n for n in aside.module.graph.nodes if "copy_" in str(n.target)]))
        return aside

    monkeypatch.setattr(capture, "extract_padding_updates", record_updates)
    monkeypatch.setattr(capture, "MAX_STEPS_AT_ONCE", 2)
    more = [{"learning_rate": 0.1, "seed": 0, "local_steps": 4}, {"learning_rate": 0.02, "seed": 1, "local_steps": 4}]
    loops = [assemble_with_layout(method, "loop", True, monkeypatch, **assembly) for assembly in more]
    graphed = [assemble_with_layout(method, "graphed", True, monkeypatch, **assembly) for assembly in more]
    shared_graph = SharedGraph([assembly.training.engine for assembly in graphed])  # type: ignore[misc]
    states = [assembly.start for assembly in graphed]
    for _ in range(graphed[0].training.plan.total_rounds):
        opened = [assembly.training.open_round(state) for assembly, state in zip(graphed, states, strict=True)]
        visits = shared_graph.visit([None if o.download is None else (o.download, o.cohort) for o in opened])
        closed = zip(graphed, opened, visits, strict=True)
        states = [assembly.training.close_round(one, visit).state for assembly, one, visit in closed]
    for assembly, loop, state in zip(graphed, loops, states, strict=True):
        wanted = values(loop, run_all_rounds(loop)[-1].state.server.shared)
        np.testing.assert_allclose(values(assembly, state.server.shared), wanted, rtol=1e-9, atol=1e-12)
    assert sizes == [apart]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_kernels_with_windows_on_cuda_give_the_cpus_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and captured, with the updates that are set aside."""
    force_step_variant(monkeypatch, "stacked", compiled=True)
    loop = assemble_with_layout("a-scaffold", "loop", False, monkeypatch)
    graphed = assemble_with_layout("a-scaffold", "graphed", True, monkeypatch, device="cuda")
    wanted, state = values(loop, run_all_rounds(loop)[-1].state.server.shared), run_all_rounds(graphed)[-1].state
    module = graphed.network.build_module(graphed.training.algorithm.extract_model(state.server.shared)).cpu()
    trained = np.concatenate([value.detach().double().flatten().numpy() for value in module.state_dict().values()])
    np.testing.assert_allclose(trained, wanted, rtol=1e-9, atol=1e-9)
    assert isinstance(graphed.training.engine, GraphedEngine)
    assert len(graphed.training.engine._own_graph._lane_stacks[0].split.windows) == 2


def trace_step(step: Any, *given: Tensor) -> torch.fx.GraphModule:
    return make_fx(step)(*map(torch.clone, given))


def test_only_what_stands_alone_is_set_aside() -> None:
    """`a` decays towards `b`, which stays. `c` is read by `d`'s update, `e` reads the step's rows."""

    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, rows: Tensor) -> None:
        after = [a - 0.1 * (a - b), 0.5 * c, d + c, e + rows]
        for old, new in zip((a, c, d, e), after, strict=True):
            old.copy_(new)

    given = [torch.randn(3, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    graph = trace_step(step, *given)
    aside = extract_padding_updates(graph, [5], 4)
    assert aside is not None
    assert aside.inputs == [0, 1]
    plain, skipping = [[tensor.clone() for tensor in given] for _ in range(2)]
    aside.module(*skipping[:2])
    for _ in range(4):
        step(*plain)
        graph(*skipping)
    for one, two in zip(skipping, plain, strict=True):
        torch.testing.assert_close(one, two)
    assert extract_padding_updates(graph, [5], 4) is None


def test_a_window_is_taken_out_and_put_back() -> None:
    """Channels last: out 2, kernel 3 x 4, channels 5."""
    window, vector = KernelWindow((2, 3, 4, 5), 1, (1, 1), (0, 2)), torch.arange(3 * 130.0).view(3, 130)
    split = VectorSplit((120, 10), ((0, window),))
    parts = split.split_vector(vector)
    assert [part.shape[-1] for part in parts] == [20, 10, 120]
    assert torch.equal(next(iter(parts)), vector[:, :120].view(3, 2, 3, 4, 5)[:, :, 1:2, :2].reshape(3, -1))
    assert torch.equal(split.join_tree(parts), vector)
    doubled = split.join_tree(parts + split.split_gradient([torch.ones(3, 120), torch.ones(3, 10)]))
    inside = torch.zeros(2, 3, 4, 5)
    inside[:, 1:2, :2] = 1
    assert torch.equal(doubled - vector, torch.cat([inside.flatten(), torch.ones(10)]).expand(3, -1))


class Base(nn.Module):
    """A convolution of one pixel, whose rim would be outside its window; `kind` reads its weights elsewhere too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.convolve, self.head = kind, nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 1)
        self.same = nn.Conv2d(3, 8, 3, padding="same")
        self.norm = nn.GroupNorm(2, 8)
        if kind == "tied":
            self.same.weight = self.convolve.weight

    def forward(self, inputs: Tensor) -> Tensor:
        image_clients = inputs.to(self.head.weight) / 255
        if self.kind == "by the rows" and image_clients[0, 0, 0, 0] > 0.5:
            return self.head(self.convolve(image_clients).mean((2, 3)))  # type: ignore[no-any-return]
        pixel = image_clients.mean((2, 3), keepdim=True)
        once = self.convolve(input=pixel) if self.kind == "by name" else self.convolve(pixel)
        outputs: Tensor = once.flatten(1)
        if self.kind == "twice":
            outputs = outputs + self.convolve(image_clients).mean((2, 3))
        if self.kind == "tied":
            outputs = outputs + self.same(image_clients).mean((2, 3))
        if self.kind == "past the hooks":
            outputs = outputs + self.convolve.forward(image_clients).mean((2, 3))
        if self.kind == "a norm of vectors":
            outputs = self.norm(outputs)
        scores: Tensor = self.head(outputs)
        return scores * self.convolve.weight.square().mean() if self.kind == "read" else scores


KINDS = {"twice": 0, "tied": 0, "read": 0, "past the hooks": 0, "by the rows": 0, "by name": 0, "a norm of vectors": 0}


@pytest.mark.parametrize(("kind", "count"), {**KINDS, "once": 1}.items())
def test_a_weight_that_anything_else_reads_has_no_window(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the way that always works; results are the loop's whatever a module does with its weights."""
    force_step_variant(monkeypatch, "single")
    torch.default_generator.manual_seed(0)
    module = Base(kind)
    recipes = [make_recipe("cycp-fedavg", engine=engine, augment="none") for engine in ("loop", "graphed")]
    loop, graphed = (assemble_training(recipe, module, image_clients()) for recipe in recipes)
    assert largest_difference(run_all_rounds(loop)[-1], run_all_rounds(graphed)[-1]) < 1e-11
    assert isinstance(graphed.training.engine, GraphedEngine)
    assert len(graphed.training.engine._own_graph._lane_stacks[0].split.windows) == count


def test_writes_into_views_and_lost_digits_stay_in_the_step() -> None:
    """What a step writes into part of a fresh tensor counts; so does rounding to fewer bits, and to whole numbers."""

    def fresh(a: Tensor, rows: Tensor) -> None:
        now = torch.zeros(2)
        now[0] = rows.sum()
        a.copy_(0.9 * a + now)

    def decay(a: Tensor) -> None:
        a.copy_(a - 0.4)

    assert extract_padding_updates(trace_step(fresh, torch.ones(2), torch.ones(3)), [1], 2) is None
    assert extract_padding_updates(trace_step(decay, torch.ones(2).bfloat16()), [], 2) is None
    assert extract_padding_updates(trace_step(decay, torch.tensor([7])), [], 2) is None
    assert extract_padding_updates(trace_step(decay, torch.ones(2)), [], 2) is not None


def test_weights_inside_a_window_are_a_product_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule may score more rows than a batch has; cuDNN would take the window for a smaller kernel."""
    monkeypatch.setattr(convolutions, "MAX_COLUMN_BYTES", 1)
    plain, rows = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        torch.randn(4, 3, 1, 1, generator=torch.Generator().manual_seed(0)),
    )
    layer = convolutions.make_stackable(plain)
    inside = {"weight": plain.weight[:, :, 1:2, 1:2]}
    torch.testing.assert_close(torch.func.functional_call(layer, inside, (rows,)), plain(rows))
