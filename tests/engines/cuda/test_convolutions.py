"""Layers for a stack of clients: each client's own layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from fedauc.engines.cuda import convolutions
from fedauc.engines.cuda.convolutions import (
    ChannelsLastBatchNorm2d,
    ChannelsLastGroupNorm,
    StackedConv2d,
    make_stackable,
)


@pytest.mark.parametrize("columns", [0, 1 << 30], ids=["streams", "product"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (8, 5)], ids=str)
@pytest.mark.parametrize("kernel", [(1, 1, 0, 1), (1, 2, 0, 1), (3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 2), (7, 2, 3, 1)])
def test_a_stacked_convolution_is_each_clients_convolution(
    kernel: tuple[int, int, int, int], shape: tuple[int, int], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and both derivatives; (size, stride, padding, dilation). On images of one pixel most taps meet nothing."""
    monkeypatch.setattr(convolutions, "MAX_COLUMN_BYTES", columns)
    layer = nn.Conv2d(2, 4, *kernel).double()
    assert type(make_stackable(layer)) is StackedConv2d
    _same(layer, make_stackable(layer), torch.randn(3, 2, 2, *shape, dtype=torch.float64, generator=_generator()))


@pytest.mark.parametrize("affine", [True, False])
def test_the_norms_are_torchs_norms(affine: bool) -> None:
    inputs = 3 + 2 * torch.randn(3, 5, 4, 3, 2, dtype=torch.float64, generator=_generator())
    for layer, kind in (
        (nn.GroupNorm(2, 4, affine=affine), ChannelsLastGroupNorm),
        (nn.BatchNorm2d(4, affine=affine, momentum=0.2), ChannelsLastBatchNorm2d),
    ):
        for parameter in layer.parameters():
            nn.init.normal_(parameter, 1, generator=_generator())
        made = make_stackable(layer.double())
        assert type(made) is kind
        _same(layer, made, inputs)


def test_images_without_contrast_stay_finite() -> None:
    """In float32 the mean square less the squared mean of level images is rounding alone, below nothing for some."""
    level = torch.linspace(5, 20, 64)[:, None, None, None].expand(64, 8, 4, 4)
    stacked = make_stackable(nn.GroupNorm(2, 8))(level)
    assert torch.isfinite(stacked).all()


def test_what_has_no_stacked_form_stays_as_it_is() -> None:
    for layer in (
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.BatchNorm2d(2, momentum=None),
        nn.BatchNorm2d(2, track_running_stats=False),
    ):
        assert type(make_stackable(layer)) is type(layer)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _same(layer: nn.Module, made: nn.Module, inputs: Tensor) -> None:
    """Mapped over three clients with weights of their own, against one client after another."""
    stacked_parameters = {n: torch.stack([(k + 1) * p.detach() for k in range(3)]) for n, p in layer.named_parameters()}

    def one(module: nn.Module) -> Callable[..., Any]:
        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], rows: Tensor) -> Any:
            client_buffers = {name: value.clone() for name, value in buffers.items()}
            return functional_call(module, {**parameters, **client_buffers}, (rows,)), client_buffers

        return call

    buffers = {n: torch.stack([b.clone() for _ in range(3)]) for n, b in layer.named_buffers()}
    made.train()
    stacked: Any = vjp(lambda p, x: vmap(one(made))(p, buffers, x), stacked_parameters, inputs, has_aux=True)
    outputs, pull, after = stacked
    slopes = torch.randn(outputs.shape, dtype=outputs.dtype, generator=_generator())
    gradients, left = pull(slopes)
    for client in range(3):
        alone = {name: value[client] for name, value in stacked_parameters.items()}
        client_buffers = {name: value[client] for name, value in buffers.items()}
        single: Any = vjp(lambda p, x, k=client_buffers: one(layer)(p, k, x), alone, inputs[client], has_aux=True)
        wanted, back, state = single
        expected, right = back(slopes[client])
        torch.testing.assert_close(outputs[client], wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(left[client], right, rtol=1e-9, atol=1e-9)
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name][client], value, rtol=1e-9, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(after[name][client], value, rtol=1e-10, atol=1e-10)
