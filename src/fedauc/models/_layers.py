"""What the image networks share: the norm, the stem, the mean over the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fedauc.models.model import check_counts

Norm = Literal["group", "batch"]
"""GroupNorm keeps no statistics; BatchNorm keeps running ones, which travel and are averaged with the weights."""

Stem = Literal["imagenet", "cifar"]
"""A 7x7 convolution and a max-pool that leave a quarter of each side, or a 3x3 convolution that leaves all of it."""


class ImageMean(nn.Module):
    """The mean of each channel over the image."""

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C]`."""
        return images.mean((-2, -1))


class Head(nn.Linear):
    """The last layer, in the weights' own type also in mixed precision: bfloat16 would give many rows one score."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[B, in]` to `[B, out]`."""
        with torch.autocast(inputs.device.type, enabled=False):
            return super().forward(inputs.to(self.weight.dtype))


def check_images(name: str, input_shape: tuple[int, ...]) -> None:
    """Refuse inputs that are not images."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape is {input_shape}; {name} needs images [C, H, W]: use linear or mlp")


def check_choices(stem: str, norm: str, norm_groups: int, channels: int) -> None:
    """Refuse what is no stem, no norm, or a number of groups that does not divide the channels."""
    if stem not in ("imagenet", "cifar"):
        raise ValueError(f"stem is {stem!r}; use 'imagenet' or 'cifar'")
    if norm not in ("group", "batch"):
        raise ValueError(f"norm is {norm!r}; use 'group' or 'batch'")
    check_counts("norm_groups", (norm_groups,))
    if norm == "group" and channels % norm_groups:
        raise ValueError(f"norm_groups is {norm_groups}; it must divide {channels}, the fewest channels of a layer")


def norm_factory(norm: Norm, norm_groups: int) -> Callable[[int], nn.Module]:
    """What makes the norm of a layer from its number of channels."""
    return nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(norm_groups, channels)


def unbiased_convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, since a norm follows, and padded so that stride 1 keeps the image's size."""
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


def stem_layers(kind: Stem, channels: int, out: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Convolution, norm, rectifier, and in the ImageNet stem a max-pool."""
    if kind == "cifar":
        return nn.Sequential(unbiased_convolution(channels, out, 3), norm(out), nn.ReLU())
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(unbiased_convolution(channels, out, 7, stride=2), norm(out), nn.ReLU(), pool)
