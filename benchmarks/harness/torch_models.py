"""The workloads' models in torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build_module(workload: str) -> nn.Module:
    """The module with its default start, the same every time; outputs `[B, 1]`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*_LAYERS[workload]())


def flatten_weights(module: nn.Module) -> Tensor:
    """A copy of all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@torch.no_grad()
def load_weights(module: nn.Module, weights: Tensor) -> None:
    """Write a flat vector into the parameters."""
    parameters = list(module.parameters())
    for parameter, part in zip(parameters, torch.split(weights, [p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def _linear() -> list[nn.Module]:
    return [nn.Linear(64, 1)]


def _mlp() -> list[nn.Module]:
    return [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)]


def _cnn() -> list[nn.Module]:
    # Average pooling: at a tie, frameworks send a maximum's gradient to different places.
    body = [layer for pair in ((3, 32), (32, 64)) for layer in (*_convolution(*pair), nn.AvgPool2d(2))]
    head = [nn.AvgPool2d(8), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1)]
    return [*body, *_convolution(64, 128), *head]


def _convolution(channels: int, next_channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, next_channels, kernel_size=3, padding=1), nn.ReLU()]


_LAYERS = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}
