"""A module as a function of flat vectors: what travels, what stays, and what the caller's things look like after."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import assemble_training
from fedauc.interfaces import Model
from fedauc.models.resnet import ResNet18
from fedauc.network import Compute, ModuleNetwork
from small_federations import (
    FEATURES,
    held_out,
    linear_scorer,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)

ROWS = held_out().inputs[:6]


def seed_weights(module: nn.Module) -> nn.Module:
    """The module in float64 with keyed parameters."""
    rng = np.random.default_rng(11)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.from_numpy(0.5 * rng.normal(size=parameter.shape)))
    return module


def normed_network() -> nn.Module:
    """BatchNorm: 4 + 4 float statistics and one integer count; 8 + 5 parameters."""
    return seed_weights(nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)))


# ------------------------------------------------------------------------------------------------- flat vectors


@pytest.mark.parametrize(
    "module",
    [linear_scorer(), normed_network(), seed_weights(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)))],
)
def test_state_and_module_are_inverse(module: nn.Module) -> None:
    network = ModuleNetwork(module)
    model = network.initial_model()
    assert len(model.weights) == sum(p.numel() for p in module.parameters())
    assert len(model.buffers) == sum(b.numel() for b in module.buffers())
    back = network.build_module(model)
    assert not back.training
    assert all(torch.equal(back.state_dict()[name], value) for name, value in module.state_dict().items())
    moved = network.build_module(Model(model.weights + 1, model.buffers + 1)).state_dict()
    assert all(torch.equal(moved[name], value + 1) for name, value in module.state_dict().items())


def test_the_network_is_a_copy() -> None:
    module = linear_scorer()
    network = ModuleNetwork(module)
    before = network.initial_model()
    with torch.no_grad():
        module.weight.add_(1)
    assert same_bits(network.initial_model(), before)
    network.build_module(before).get_parameter("weight").data.add_(1)
    network.initial_model().weights.add_(1)
    assert same_bits(network.initial_model(), before)


@pytest.mark.parametrize("module", [linear_scorer(), normed_network()])
def test_score_is_the_training_forward_and_its_pullback_the_gradient(module: nn.Module) -> None:
    network = ModuleNetwork(module)
    model = network.initial_model()
    scored = network.forward_pass(model, ROWS)
    twin = copy.deepcopy(module).train()
    outputs = twin(ROWS)[:, 0]
    cotangent = torch.arange(6, dtype=torch.float64) - 2
    expected = torch.autograd.grad(outputs, list(twin.parameters()), cotangent)
    torch.testing.assert_close(scored.outputs, outputs.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        scored.pullback(cotangent), torch.cat([g.flatten() for g in expected]), rtol=1e-12, atol=1e-12
    )
    buffers = [b.double().flatten() for b in twin.buffers()]
    torch.testing.assert_close(scored.buffers, torch.cat([torch.zeros(0).double(), *buffers]), rtol=1e-12, atol=1e-12)
    assert not scored.outputs.requires_grad
    assert same_bits(model, network.initial_model())


def test_predict_is_the_module_in_evaluation_mode_whatever_the_parts() -> None:
    network = ModuleNetwork(nn.Sequential(normed_network(), nn.Dropout(0.9)))
    model = network.forward_pass(network.initial_model(), ROWS)
    trained = Model(network.initial_model().weights, model.buffers)
    with torch.no_grad():
        expected = network.build_module(trained)(ROWS)[:, 0]
    assert torch.equal(network.predict(trained, ROWS), expected)
    torch.testing.assert_close(network.predict(trained, ROWS, rows=4), expected, rtol=1e-12, atol=1e-12)


def test_predict_leaves_its_inputs_alone_even_if_the_module_writes_in_place() -> None:
    network = ModuleNetwork(seed_weights(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(FEATURES, 1))))
    rows = ROWS.clone()
    network.predict(network.initial_model(), rows)
    assert torch.equal(rows, ROWS)


# --------------------------------------------------------------------------------------- buffers, frozen, tied


def batchnorm_twin(mean: np.ndarray, var: np.ndarray, batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The running statistics after some batches, with momentum 0.1 and the unbiased variance."""
    for rows in batches:
        mean = 0.9 * mean + 0.1 * rows.mean(axis=0)
        var = 0.9 * var + 0.1 * rows.var(axis=0, ddof=1)
    return mean, var


def test_batchnorm_statistics_travel_and_are_averaged_over_the_cohort() -> None:
    clients, module, recipe = small_federation(), normed_network(), small_recipe("cycp-fedavg", cycles=1)
    training, network, state = assemble_training(recipe, module, clients)
    draws = Draws(clients, training.setting, "rows")
    statistics = np.zeros(FEATURES), np.ones(FEATURES)
    for finished in training.rounds(state):
        visited = []
        for client in finished.cohort.clients:
            batches = [clients.inputs.numpy()[rows] for rows in draws.draw_visit(client, finished.phase).rows]
            visited.append(batchnorm_twin(*statistics, batches))
        mean, var = np.mean([m for m, _ in visited], axis=0), np.mean([v for _, v in visited], axis=0)
        statistics = mean, var
        shared: Model = finished.state.server.shared
        # Buffers in the module's order: running mean, running variance, number of batches (2 per round).
        expected = np.concatenate([mean, var, [2.0 * (finished.phase.round + 1)]])
        np.testing.assert_allclose(shared.buffers.numpy(), expected, rtol=0, atol=1e-12)
    counted = network.build_module(shared).get_buffer("0.num_batches_tracked")
    assert counted.dtype == torch.int64
    assert int(counted) == 6


def test_integer_buffers_are_rounded_when_put_back() -> None:
    network = ModuleNetwork(normed_network())
    model = network.initial_model()
    filled = network.build_module(Model(model.weights, torch.full_like(model.buffers, 2.6)))
    counted, mean = filled.get_buffer("0.num_batches_tracked"), filled.get_buffer("0.running_mean")
    assert (int(counted), counted.dtype) == (3, torch.int64)
    assert mean.tolist() == [2.6] * FEATURES


def test_scoring_rounds_leave_the_statistics_alone() -> None:
    rounds = run_rounds(small_recipe("cycp-pairwise", cycles=1), normed_network())
    start = ModuleNetwork(normed_network()).initial_model().buffers
    assert all(torch.equal(r.state.server.shared.buffers, start) for r in rounds if r.phase.scoring)
    assert not torch.equal(rounds[-1].state.server.shared.buffers, start)


class Counting(nn.Module):
    """Replaces its buffer instead of writing into it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen = self.seen + len(rows)
        outputs: Tensor = self.layer(rows)
        return outputs


def test_a_buffer_that_is_replaced_travels_too() -> None:
    # 2 cycles of 3 rounds of 2 steps of 5 rows, averaged over clients that all count alike.
    rounds = run_rounds(small_recipe("cycp-fedavg"), seed_weights(Counting()))
    assert rounds[-1].state.server.shared.buffers.tolist() == [60.0]


def test_frozen_parameters_never_move_and_never_travel() -> None:
    module = seed_weights(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)))
    module.get_parameter("0.weight").requires_grad_(False)
    rounds, exchanges = record_exchanges(small_recipe("cycp-fedavg"), module)
    # 3 + 3 + 1 of the 19 parameters are trainable.
    assert all(e.download.shared.weights.shape == (7,) for e in exchanges)
    assert all(e.upload.mean.weights.shape == (7,) for e in exchanges)
    trained = ModuleNetwork(module, torch.float64).build_module(rounds[-1].state.server.shared)
    moved = {n for n, p in trained.named_parameters() if not torch.equal(p, module.get_parameter(n))}
    assert moved == {"0.bias", "2.weight", "2.bias"}
    assert {n for n, p in trained.named_parameters() if not p.requires_grad} == {"0.weight"}


class Tied(nn.Module):
    """h = tanh(tanh(x W) W) summed: one matrix used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, FEATURES, bias=False)
        self.two = nn.Linear(FEATURES, FEATURES, bias=False)
        self.two.weight = self.one.weight

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(rows)))).sum(1)


def test_tied_parameters_travel_once_and_stay_tied() -> None:
    module = seed_weights(Tied())
    network = ModuleNetwork(module)
    model = network.initial_model()
    assert model.weights.shape == (FEATURES * FEATURES,)
    cotangent = torch.ones(6, dtype=torch.float64)
    gradient = network.forward_pass(model, ROWS).pullback(cotangent)
    (expected,) = torch.autograd.grad(module(ROWS).sum(), list(module.parameters()))
    torch.testing.assert_close(gradient, expected.flatten(), rtol=1e-12, atol=1e-12)
    trained = network.build_module(run_rounds(small_recipe("cycp-pairwise"), module)[-1].state.server.shared)
    assert trained.get_parameter("one.weight") is trained.get_parameter("two.weight")
    assert not torch.equal(trained.get_parameter("one.weight"), module.get_parameter("one.weight"))


class OnlyFirst(nn.Module):
    """A spare layer that the output does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, 1)
        self.spare = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.used(rows)
        return outputs


def test_a_parameter_that_the_output_ignores_gets_no_gradient() -> None:
    network = ModuleNetwork(seed_weights(OnlyFirst()))
    gradient = network.forward_pass(network.initial_model(), ROWS).pullback(torch.ones(6, dtype=torch.float64))
    assert gradient.shape == (5 + 6,)
    assert bool((gradient[5:] == 0).all())
    assert bool((gradient[:5] != 0).all())


def test_dropout_is_keyed_by_the_seed_and_not_by_the_callers_generator() -> None:
    module = seed_weights(nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 1)))
    states = []
    for caller in (1, 2):
        torch.manual_seed(caller)
        before = torch.get_rng_state()
        states.append(run_rounds(small_recipe("cycp-fedavg"), module)[-1].state.server)
        assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(states[0], states[1])
    plain = run_rounds(small_recipe("cycp-fedavg"), nn.Sequential(nn.Identity(), module[1]))  # type: ignore[index]
    assert not torch.equal(plain[-1].state.server.shared.weights, states[0].shared.weights)


# ------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_is_the_one_asked_for(dtype: torch.dtype) -> None:
    network = ModuleNetwork(normed_network(), dtype)
    # Statistics are kept in float32 at least.
    assert network.initial_model().weights.dtype == dtype
    assert network.initial_model().buffers.dtype == torch.promote_types(dtype, torch.float32)
    assert network.cast_inputs(ROWS).dtype == dtype
    assert network.predict(network.initial_model(), ROWS).dtype == dtype


def test_integer_inputs_stay_integers() -> None:
    images = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
    assert ModuleNetwork(linear_scorer()).cast_inputs(images).dtype == torch.uint8


# ---------------------------------------------------------------------------------------------------------- errors


class Wrong(nn.Module):
    """Returns a fixed shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        return self.scale * torch.ones(self.shape)


@pytest.mark.parametrize("shape", [(), (5,), (5, 1), (1, 6), (6, 2, 2), (6, 1, 1)])
def test_a_wrong_output_shape_is_named(shape: tuple[int, ...]) -> None:
    network = ModuleNetwork(Wrong(shape))
    message = f"the model's output has shape {shape} for 6 rows; it must be"
    for call in (network.forward_pass, network.predict):
        with pytest.raises(ValueError) as caught:
            call(network.initial_model(), ROWS.float())
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("shape", "expected"), [((6,), (6,)), ((6, 1), (6,)), ((6, 3), (6, 3))])
def test_right_output_shapes_pass(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    network = ModuleNetwork(Wrong(shape))
    assert network.forward_pass(network.initial_model(), ROWS.float()).outputs.shape == expected
    assert network.predict(network.initial_model(), ROWS.float()).shape == expected


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 trainable parameters; .*requires_grad"):
        ModuleNetwork(linear_scorer().requires_grad_(False))


def test_mixed_precision_parameters_are_refused_unless_a_dtype_is_asked_for() -> None:
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1).double())
    with pytest.raises(ValueError, match=r"dtypes \['torch.float32', 'torch.float64'\]; use one: model.to\(dtype\)"):
        ModuleNetwork(module)
    assert ModuleNetwork(module, torch.float32).dtype == torch.float32


def test_mixed_precision_gives_scores_that_still_tell_rows_apart() -> None:
    """A last layer in bfloat16, with its 8 bits, would give several of 64 rows one score."""
    module = ResNet18().build((3, 16, 16), 0)
    network = ModuleNetwork(module, torch.float32, Compute(mixed=True))
    rows = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for outputs in (
        network.predict(network.initial_model(), rows),
        network.forward_pass(network.initial_model(), rows).outputs,
    ):
        assert outputs.dtype == torch.float32
        assert len(set(outputs.tolist())) == 64
    plain = ModuleNetwork(module, torch.float32)
    assert torch.equal(network.predict(network.initial_model(), rows), plain.predict(plain.initial_model(), rows))


# ------------------------------------------------------------------------------------------------- the copy that scores


class Merging(nn.Linear):
    """Keeps what it first computes in evaluation mode, as adapters that merge do."""

    merged: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            return nn.functional.linear(inputs, 2 * self.weight, self.bias)
        if self.merged is None:
            self.merged = 2 * self.weight
        return nn.functional.linear(inputs, self.merged, self.bias)


@pytest.mark.parametrize("module", [linear_scorer(), seed_weights(Merging(FEATURES, 1))], ids=["plain", "merging"])
def test_every_prediction_is_the_models_own(module: nn.Module) -> None:
    """A copy of the module is kept for the next; one in which evaluation leaves traces is not."""
    network = ModuleNetwork(module)
    models = [Model(network.initial_model().weights + shift, network.initial_model().buffers) for shift in range(8)]
    wanted = [network.build_module(model)(ROWS.to(network.dtype))[:, 0] for model in models]
    with torch.inference_mode():
        network.predict(models[0], ROWS)
    with ThreadPoolExecutor(4) as pool:
        predictions = list(pool.map(lambda model: network.predict(model, ROWS), models * 8))
    for index, scores in enumerate(predictions):
        torch.testing.assert_close(scores, wanted[index % 8])
