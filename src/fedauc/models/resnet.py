"""ResNet-18."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

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

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages; each stage is two blocks, and all but the first halve the image."""


@dataclass(frozen=True)
class ResNet18(ModelConfig):
    """ResNet-18 for images `[C, H, W]` (He et al. 2016, https://arxiv.org/abs/1512.03385).

    GroupNorm by default, in 32 groups (Wu and He 2018, https://arxiv.org/abs/1803.08494): BatchNorm's statistics suffer
    when clients differ (Hsieh et al. 2020, https://arxiv.org/abs/1910.00189). With norm='batch' and the ImageNet stem
    it is torchvision's resnet18, parameter by parameter in the same order.
    """

    name: ClassVar[str] = "resnet18"
    shift: ClassVar[float] = 0.5
    scale: ClassVar[float] = 0.25

    stem: Stem = "imagenet"
    norm: Norm = "group"
    norm_groups: int = 32
    outputs: int = 1

    def __post_init__(self) -> None:
        check_choices(self.stem, self.norm, self.norm_groups, WIDTHS[0])
        check_counts("outputs", (self.outputs,))

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The stem, eight blocks, the mean over the image and a linear layer."""
        check_images(self.name, input_shape)
        norm = norm_factory(self.norm, self.norm_groups)
        stem = stem_layers(self.stem, input_shape[0], WIDTHS[0], norm)
        stages = [_residual_stage(*pair, norm) for pair in pairwise((WIDTHS[0], *WIDTHS))]
        network = nn.Sequential(stem, *stages, ImageMean(), Head(WIDTHS[-1], self.outputs))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return network


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + body(x)), where the shortcut is x itself unless the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        first = (unbiased_convolution(channels, out, 3, stride), norm(out), nn.ReLU())
        self.body = nn.Sequential(*first, unbiased_convolution(out, out, 3), norm(out))
        same = stride == 1 and channels == out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(unbiased_convolution(channels, out, 1, stride), norm(out))
        )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C', H', W']`."""
        outputs: Tensor = self.activation(self.body(images) + self.shortcut(images))
        return outputs


def _residual_stage(channels: int, out: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    stride = 1 if channels == out else 2
    return nn.Sequential(ResidualBlock(channels, out, stride, norm), ResidualBlock(out, out, 1, norm))
