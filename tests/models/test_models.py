"""One suite for every model, then what each promises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedauc.models import ModelConfig, find_models
from fedauc.models.cnn import SmallCNN
from fedauc.models.linear import Linear
from fedauc.models.mlp import MLP

SHAPE = (3, 8, 8)
MEMBERS = sorted(find_models())


def flat_weights(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def random_images(count: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MEMBERS)
def test_one_score_per_row_and_gradients_for_every_weight(name: str) -> None:
    module = find_models()[name]().build(SHAPE, 0)
    outputs = module(random_images().float() / 255)
    assert outputs.shape == (5, 1)
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_scaled_as_the_model_says(name: str, dtype: torch.dtype) -> None:
    """To [0, 1] by default; the deep image networks centre them too."""
    config = find_models()[name]()
    module = config.build(SHAPE, 0).to(dtype)
    torch.nn.init.normal_(next(module.parameters()), generator=torch.Generator().manual_seed(0))
    unit = random_images().to(dtype) / 255
    assert (config.shift, config.scale) == ((0.5, 0.25) if name in ("resnet18", "densenet121") else (0, 1))
    assert torch.equal(module(random_images()), module((unit - config.shift) / config.scale))
    assert module(random_images()).dtype == dtype


@pytest.mark.parametrize("config", [Linear(init="default"), MLP(), SmallCNN()])
def test_weights_follow_the_seed(config: ModelConfig) -> None:
    first, again, different = (flat_weights(config.build(SHAPE, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


@pytest.mark.parametrize("name", MEMBERS)
def test_global_generators_are_left_alone(name: str) -> None:
    numpy_before, torch_before = np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    find_models()[name]().build(SHAPE, 7)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert str(np.random.get_state(legacy=False)) == str(numpy_before)  # noqa: NPY002


@pytest.mark.parametrize("name", MEMBERS)
def test_rows_do_not_see_each_other_and_nothing_is_buffered(name: str) -> None:
    module = find_models()[name]().build(SHAPE, 0)
    together, alone = module(random_images()), torch.cat([module(image[None]) for image in random_images()])
    assert torch.allclose(together, alone, atol=1e-6)
    assert not list(module.buffers())


@pytest.mark.parametrize("name", MEMBERS)
def test_stacked_models_run_under_vmap(name: str) -> None:
    config = find_models()[name]()
    modules = [config.build(SHAPE, seed) for seed in (0, 1)]
    stacked, _ = torch.func.stack_module_state(modules)

    def run_model(state: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.func.functional_call(modules[0], state, (inputs,))
        return outputs

    together = torch.func.vmap(run_model)(stacked, torch.stack([random_images(), random_images().flip(0)]))
    assert torch.allclose(together[1], modules[1](random_images().flip(0)), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (Linear(), 192 + 1),  # 3 * 8 * 8 inputs and a bias
        (Linear(bias=False), 192),
        (MLP((5, 4), outputs=2), 192 * 5 + 5 + 5 * 4 + 4 + 4 * 2 + 2),
        (MLP(()), 192 + 1),
        (SmallCNN((8,), norm_groups=2, outputs=3), 3 * 8 * 9 + 2 * 8 + 8 * 3 + 3),  # 3x3 kernels, scale and shift, head
    ],
)
def test_weights_are_counted(config: ModelConfig, count: int) -> None:
    assert len(flat_weights(config.build(SHAPE, 0))) == count


def test_linear_starts_at_zero_and_is_linear() -> None:
    module = Linear().build((4,), 0)
    assert not flat_weights(module).any()
    started = Linear(init="default").build((4,), 0)
    inputs = torch.eye(4)
    assert torch.allclose(started(2 * inputs) - started(inputs), started(inputs) - started(0 * inputs), atol=1e-6)
    assert flat_weights(started).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(init="ones"), "init is 'ones'; use 'zeros' or 'default'"),  # type: ignore[arg-type]
        (lambda: MLP((0,)), "hidden is 0; it must be a whole number of at least 1"),
        (lambda: MLP(outputs=-1), "outputs is -1; it must be a whole number of at least 1"),
        (lambda: SmallCNN(()), "channels is empty; give at least one number of channels"),
        (lambda: SmallCNN((12,)), "channels is 12; it must be a multiple of norm_groups, 8"),
        (lambda: SmallCNN().build((29,), 0), "small-cnn needs images"),
        (lambda: Linear().build((), 0), "input_shape is \\(\\); it must name at least one feature"),
        (lambda: Linear().build((3, 0), 0), "input_shape is \\(3, 0\\)"),
    ],
)
def test_parameters_are_bounded(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
