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
from fedauc.models.tabular import Tabular
from fedauc.testing.model import check_model, check_outputs, flat_weights, random_images

SHAPE = (3, 8, 8)
MEMBERS = sorted(set(find_models()) - {"transformer"})
"""The models of numbers and images; tests/models/test_transformer.py has the one of token ids."""


@pytest.mark.parametrize("name", MEMBERS)
def test_one_score_per_row_keyed_weights_with_gradients_and_stacks_of_models(name: str) -> None:
    config = find_models()[name]()
    check_model(config)
    check_outputs(config, random_images().double() / 255)
    assert config.build(SHAPE, 0)(random_images()).shape == (5, 1)


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


@pytest.mark.parametrize("config", [Linear(init="default"), MLP(), SmallCNN(), Tabular()])
def test_weights_follow_the_seed(config: ModelConfig) -> None:
    first, again, different = (flat_weights(config.build(SHAPE, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, different)


@pytest.mark.parametrize("name", MEMBERS)
def test_nothing_is_buffered(name: str) -> None:
    assert not list(find_models()[name]().build(SHAPE, 0).buffers())


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (Linear(), 192 + 1),  # 3 * 8 * 8 inputs and a bias
        (Linear(bias=False), 192),
        (MLP((5, 4), outputs=2), 192 * 5 + 5 + 5 * 4 + 4 + 4 * 2 + 2),
        (MLP(()), 192 + 1),
        # The linear model, the first layer, two layers of each of the two blocks, and the head.
        (Tabular(width=5, blocks=2, hidden=3), 192 + 192 * 5 + 5 + 2 * (5 * 3 + 3 + 3 * 5 + 5) + 5 + 1),
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


def test_the_tabular_network_is_its_equation() -> None:
    """h(x) = a . x + w . z_L + b, with residual blocks between, once all weights are random."""
    module = Tabular(width=5, blocks=2, hidden=3).build((4,), 0).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    linear, first, shift, *blocks, head, bias = [parameter.detach().numpy() for parameter in module.parameters()]
    rows = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    states = np.maximum(rows.numpy() @ first.T + shift, 0)
    for number in range(0, len(blocks), 4):
        inner, inner_shift, outer, outer_shift = blocks[number : number + 4]
        states = states + np.maximum(states @ inner.T + inner_shift, 0) @ outer.T + outer_shift
    expected = rows.numpy() @ linear.T + states @ head.T + bias
    np.testing.assert_allclose(module(rows).detach().numpy(), expected, rtol=1e-12)


def test_the_tabular_network_starts_as_a_shallow_one() -> None:
    """The linear model and the residual blocks add nothing before the first step."""
    module = Tabular(width=5, blocks=3).build((4,), 0).double()
    _, first, shift, *_, head, bias = [parameter.detach() for parameter in module.parameters()]
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(module(rows), (rows @ first.T + shift).relu() @ head.T + bias)
    assert module(rows).std() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(init="ones"), "init is 'ones'; use 'zeros' or 'default'"),  # type: ignore[arg-type]
        (lambda: MLP((0,)), "hidden is 0; it must be a whole number of at least 1"),
        (lambda: Tabular(width=0), "width is 0; it must be a whole number of at least 1"),
        (lambda: Tabular(blocks=-1), "blocks is -1; it must be a whole number of at least 0"),
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
