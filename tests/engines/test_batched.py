"""The batched engine: kernels against autograd, whole runs against the loop, and what it cannot run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc import Clients, Recipe, fit
from fedauc.algorithms import find_methods
from fedauc.engines import batched, engines
from fedauc.engines.batched import BatchedEngine, CohortRows, VisitBatches, VmapNetwork
from fedauc.engines.kernels import KernelNetwork, Unsupported, build_kernels
from fedauc.experiments.assembly import assemble_training
from fedauc.interfaces import Model, Network
from fedauc.models._layers import AddedBranches, ImageMean, InputScaling
from fedauc.models.tabular import Tabular
from fedauc.network import ModuleNetwork
from fedauc.objectives.contrastive import Contrastive
from fedauc.trees import Tree, tree_leaves

CLIENTS, ROWS, FEATURES = 3, 5, 4


def seed_module(make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose weights do not depend on other tests."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make().double()


CHAINS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, 1),
    "linear without bias": lambda: nn.Linear(FEATURES, 1, bias=False),
    "embedding": lambda: nn.Linear(FEATURES, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 1)),
    "deep": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(FEATURES, 6, bias=False), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 2)
    ),
    "skip connection": lambda: nn.Sequential(
        AddedBranches(nn.Linear(FEATURES, 3), nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, 3, bias=False))),
        AddedBranches(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Linear(3, 3))),
        nn.Linear(3, 1),
    ),
    "tabular": lambda: Tabular(width=5, blocks=2, hidden=3).build((FEATURES,), 0),
    "wrapped": lambda: InputScaling(nn.Sequential(nn.Identity(), nn.Linear(FEATURES, 3), nn.ReLU(), nn.Linear(3, 1))),
}


def reuse_activation() -> nn.Module:
    """One activation object in two places, as is often written."""
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(FEATURES, 6), act, nn.Linear(6, 5), act, nn.Linear(5, 1))


def share_layer() -> nn.Module:
    """One layer in two places: its weights count once."""
    layer = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(FEATURES, 1))


CHAINS["reused activation"] = reuse_activation

MAPPED: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 1)),
    "shared layer": share_layer,
    "subclass": lambda: nn.Sequential(nn.Linear(FEATURES, 2), nn.Softplus(), nn.Linear(2, 1)),
}


def image_block(*head: nn.Module) -> nn.Module:
    """Images 2x7x5 through a strided, padded convolution without bias and a norm: 4 channels of 4x3."""
    body = [nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 4), nn.Tanh()]
    return nn.Sequential(*body, *head)


IMAGE = (2, 7, 5)
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "strided": lambda: image_block(ImageMean(), nn.Linear(4, 1)),
    "pooled": lambda: image_block(nn.AvgPool2d((2, 3), 1, (1, 0)), nn.Flatten(), nn.Linear(20, 2)),
    "grouped": lambda: image_block(nn.Conv2d(4, 6, 2, groups=2), nn.ReLU(), ImageMean(), nn.Linear(6, 1)),
    "dilated": lambda: nn.Sequential(nn.Conv2d(2, 3, (2, 1), dilation=(2, 1)), nn.Flatten(), nn.Linear(75, 1)),
    "normed images": lambda: nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(70, 1)),
    "bare norm": lambda: image_block(nn.GroupNorm(4, 4, affine=False), nn.Flatten(), nn.Linear(48, 1)),
}


def stack_clients(network: ModuleNetwork, shape: tuple[int, ...]) -> tuple[Model, Tensor]:
    """Three clients' weights around the module's, and rows of their own."""
    rng = np.random.default_rng(0)
    start = network.initial_model()
    weights = start.weights + torch.from_numpy(rng.normal(scale=0.3, size=(CLIENTS, len(start.weights))))
    rows = torch.from_numpy(rng.normal(size=(CLIENTS, ROWS, *shape)))
    return Model(weights, start.buffers.expand(CLIENTS, 0)), rows


def check_agreement(network: ModuleNetwork, stacked_network: Network, shape: tuple[int, ...] = (FEATURES,)) -> None:
    """Outputs and pullback of the stack are each client's own."""
    model, inputs = stack_clients(network, shape)
    scored = stacked_network.forward_pass(model, inputs)
    cotangent = torch.from_numpy(np.random.default_rng(1).normal(size=scored.outputs.shape))
    gradient = scored.pullback(cotangent)
    for client in range(CLIENTS):
        alone = network.forward_pass(Model(model.weights[client], model.buffers[client]), inputs[client])
        torch.testing.assert_close(scored.outputs[client], alone.outputs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient[client], alone.pullback(cotangent[client]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chain", CHAINS)
def test_kernels_give_autograds_numbers(chain: str) -> None:
    network = ModuleNetwork(seed_module(CHAINS[chain]))
    check_agreement(network, KernelNetwork(network.plain_module))


@pytest.mark.parametrize("chain", IMAGES)
def test_image_kernels_give_autograds_numbers(chain: str) -> None:
    network = ModuleNetwork(seed_module(IMAGES[chain]))
    check_agreement(network, KernelNetwork(network.plain_module), IMAGE)


@pytest.mark.parametrize("chain", [*CHAINS, *MAPPED])
def test_mapped_networks_give_autograds_numbers(chain: str) -> None:
    network = ModuleNetwork(seed_module((CHAINS | MAPPED)[chain]))
    check_agreement(network, VmapNetwork(network))


@pytest.mark.parametrize("how", [(0.0, 1.0), (0.5, 0.25)], ids=["plain", "centred"])
def test_kernels_take_images_of_bytes(how: tuple[float, float]) -> None:
    network = ModuleNetwork(seed_module(lambda: InputScaling(nn.Sequential(nn.Flatten(), nn.Linear(12, 1)), *how)))
    images = torch.arange(CLIENTS * ROWS * 12, dtype=torch.uint8).view(CLIENTS, ROWS, 3, 2, 2)
    model = Model(network.initial_model().weights.expand(CLIENTS, -1), torch.zeros(CLIENTS, 0))
    stacked_network = KernelNetwork(network.plain_module).forward_pass(model, images)
    alone = network.forward_pass(network.initial_model(), images[1])
    torch.testing.assert_close(stacked_network.outputs[1], alone.outputs, rtol=1e-12, atol=1e-12)


def six_clients() -> Clients:
    """Six clients of unequal size, one without positives and one without negatives."""
    rng = np.random.default_rng(2)
    client = np.repeat(np.arange(6), [4, 30, 9, 14, 6, 17])
    labels = (rng.random(80) < 0.4) & (client != 0) | (client == 4)
    return Clients.from_arrays(rng.normal(size=(80, FEATURES)) + labels[:, None], labels, client=client)


def run_server_states(engine: str, module: nn.Module, method: str, **settings: Any) -> list[Tree]:
    chosen = {"cycles": 3, "local_steps": 3, "positives": 3, "negatives": 4, "dtype": "float64", "groups": 2}
    if find_methods()[method].participation == "full":
        del chosen["groups"]
    recipe = Recipe.of(method, engine=engine, **{**chosen, **settings})
    assembly = assemble_training(recipe, module, six_clients())
    return [finished.state.server for finished in assembly.training.rounds(assembly.start)]


@pytest.mark.parametrize("method", find_methods())
@pytest.mark.parametrize("chain", ["mlp", "layer norm", "shared layer", "reused activation"])
def test_whole_runs_equal_the_loops(method: str, chain: str) -> None:
    """To 1e-9 in float64, over stages, single-class clients and memories, by kernels and by vmap."""
    module = seed_module((CHAINS | MAPPED)[chain])
    loop, other = (
        run_server_states(engine, module, method, stage_output="cycle_mean") for engine in ("loop", "batched")
    )
    for one, two in zip(loop, other, strict=True):
        for left, right in zip(tree_leaves(one), tree_leaves(two), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_embeddings_run_stacked() -> None:
    loop, other = (
        run_server_states(engine, seed_module(CHAINS["embedding"]), "cycp-pairwise", objective=Contrastive())
        for engine in ("loop", "batched")
    )
    torch.testing.assert_close(other[-1].shared.weights, loop[-1].shared.weights, rtol=1e-9, atol=1e-9)


def test_rows_gathered_step_by_step_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = seed_module(CHAINS["mlp"])
    uninterrupted = run_server_states("batched", module, "cycp-pairwise")
    monkeypatch.setattr(batched, "GATHER_AT_ONCE", 0)
    parts = run_server_states("batched", module, "cycp-pairwise")
    assert torch.equal(uninterrupted[-1].shared.weights, parts[-1].shared.weights)


def test_a_large_visits_steps_share_one_place_for_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, index = torch.arange(24.0).view(12, 2), torch.tensor([[[3, 1], [0, 5]], [[7, 7], [2, 11]]])
    for bound, places in ((1 << 24, 2), (0, 1)):
        monkeypatch.setattr(batched, "GATHER_AT_ONCE", bound)
        batches = VisitBatches(inputs, inputs[:, 0], CohortRows(index, torch.ones(2, 2), (), ()))
        losses = []
        for step in range(2):
            batch = batches.select_steps(step, step + 1)
            # Client by client the rows of the step, in order.
            assert torch.equal(batch.inputs[0], inputs[index[:, step]])
            losses.append(batch.inputs.data_ptr())
        assert len(set(losses)) == places


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Conv2d(2, 1, 3, padding="same"), "Conv2d with padding 'same' of zeros"),
        (lambda: nn.Conv2d(2, 1, 3, padding=1, padding_mode="circular"), "Conv2d with padding .* of circular"),
        (lambda: nn.Flatten(0), "Flatten from 0 to -1"),
        (lambda: nn.Softplus(), "Softplus"),
    ],
    ids=["same", "circular", "flatten", "unknown"],
)
def test_layers_that_would_run_otherwise_have_no_kernel(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(Unsupported, match=f"{reason}.* has no batched kernel"):
        build_kernels(nn.Sequential(nn.Linear(FEATURES, FEATURES), make()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), "buffers"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, 1)), "random operation"),
    ],
    ids=["BatchNorm", "Dropout"],
)
def test_a_module_that_resists_runs_in_the_loop_and_that_is_said_once(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = seed_module(make)
    with pytest.raises(Unsupported, match=f"cannot run this model.*{reason}.*use engine='auto' or 'loop'"):
        run_server_states("batched", module, "fedavg")
    with caplog.at_level(logging.INFO, logger="fedauc"):
        auto, loop = (run_server_states(engine, module, "fedavg") for engine in ("auto", "loop"))
        run_server_states("auto", module, "fedavg")
    assert torch.equal(auto[-1].shared.weights, loop[-1].shared.weights)
    assert sum(reason in record.getMessage() for record in caplog.records) <= 1


def test_auto_stacks_what_can_be_stacked_and_leaves_convolutions_to_the_loop() -> None:
    def chosen(module: nn.Module, shape: tuple[int, ...]) -> type:
        rows = np.random.default_rng(0).normal(size=(40, *shape))
        clients = Clients.from_arrays(rows, np.arange(40) % 4 == 0, client=np.arange(40) // 10)
        return type(assemble_training(Recipe.of("fedavg"), module, clients).training.engine)

    assert chosen(nn.Linear(FEATURES, 1), (FEATURES,)) is BatchedEngine
    assert chosen(seed_module(MAPPED["layer norm"]), (FEATURES,)) is BatchedEngine
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    assert chosen(image, (1, 4, 4)) is engines()["loop"]


def test_frozen_weights_have_no_kernel_but_can_be_mapped() -> None:
    module = seed_module(CHAINS["mlp"])
    module.get_parameter("0.weight").requires_grad_(False)
    with pytest.raises(Unsupported, match=r"0\.weight is frozen"):
        build_kernels(module)
    loop, other = (run_server_states(engine, module, "cycp-minimax") for engine in ("loop", "batched"))
    torch.testing.assert_close(other[-1].shared.model.weights, loop[-1].shared.model.weights, rtol=1e-9, atol=1e-9)


def test_the_result_can_be_trained_on_with_autograd() -> None:
    """Tensors of a batched run are ordinary ones: the loop can go on from them."""
    fitted = fit(seed_module(CHAINS["mlp"]), six_clients(), "cycp-pairwise", engine="batched", cycles=1, groups=2)
    again = fit(fitted.module, six_clients(), "cycp-pairwise", engine="loop", cycles=1, groups=2)
    assert all(parameter.isfinite().all() for parameter in again.module.parameters())


def test_what_a_kernel_would_not_see_has_no_kernel() -> None:
    hooked = seed_module(CHAINS["mlp"])
    hooked.get_submodule("1").register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    with pytest.raises(Unsupported, match="ReLU has hooks"):
        build_kernels(hooked)
    with pytest.raises(Unsupported, match="share weights"):
        build_kernels(share_layer())
    loop, other = (run_server_states(engine, hooked, "cycp-fedavg") for engine in ("loop", "batched"))
    torch.testing.assert_close(other[-1].shared.weights, loop[-1].shared.weights, rtol=1e-9, atol=1e-9)
