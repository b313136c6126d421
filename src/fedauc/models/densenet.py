"""DenseNet-121."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedauc.models._layers import (
    Head,
    ImageMean,
    Norm,
    Stem,
    check_choices,
    check_images,
    norm_factory,
    stem_layers,
    unbiased_convolution,
)
from fedauc.models.model import ModelConfig, check_counts

BLOCKS = (6, 12, 24, 16)
"""Layers of the four dense blocks."""

GROWTH = 32
"""Channels that each layer adds."""


@dataclass(frozen=True)
class DenseNet121(ModelConfig):
    """DenseNet-121 for images `[C, H, W]` (Huang et al. 2017, https://arxiv.org/abs/1608.06993).

    Where a side is odd, pooling keeps its last row or column, so that 28x28 images, which torchvision's densenet121
    cannot take, have something left at the end. Otherwise norm='batch' with the ImageNet stem is that network,
    parameter by parameter in the same order.
    """

    name: ClassVar[str] = "densenet121"
    shift: ClassVar[float] = 0.5
    scale: ClassVar[float] = 0.25

    stem: Stem = "imagenet"
    norm: Norm = "group"
    norm_groups: int = 32
    outputs: int = 1

    def __post_init__(self) -> None:
        # Every layer's channels are a multiple of the growth.
        check_choices(self.stem, self.norm, self.norm_groups, GROWTH)
        check_counts("outputs", (self.outputs,))

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The stem, four dense blocks with a halving transition after each but the last, a mean and a linear layer."""
        check_images(self.name, input_shape)
        norm = norm_factory(self.norm, self.norm_groups)
        channels = 2 * GROWTH
        parts: list[nn.Module] = [stem_layers(self.stem, input_shape[0], channels, norm)]
        for place, count in enumerate(BLOCKS):
            parts += [DenseLayer(channels + GROWTH * layer, norm) for layer in range(count)]
            channels += GROWTH * count
            if place < len(BLOCKS) - 1:
                parts.append(_transition_layer(channels, norm))
                channels //= 2
        parts += [norm(channels), nn.ReLU(), ImageMean(), Head(channels, self.outputs)]
        return _initialize_weights(nn.Sequential(*parts))


class DenseLayer(nn.Module):
    """Puts new channels, made from all that came before, next to them."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        narrow = 4 * GROWTH
        first = (norm(channels), nn.ReLU(), unbiased_convolution(channels, narrow, 1))
        self.body = nn.Sequential(*first, norm(narrow), nn.ReLU(), unbiased_convolution(narrow, GROWTH, 3))

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C + 32, H, W]`."""
        return torch.cat([images, self.body(images)], dim=-3)


def _transition_layer(channels: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    pool = nn.AvgPool2d(2, ceil_mode=True)
    return nn.Sequential(norm(channels), nn.ReLU(), unbiased_convolution(channels, channels // 2, 1), pool)


def _initialize_weights(network: nn.Sequential) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return network
