"""A small convolutional network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from fedauc.models._layers import ImageMean, check_images
from fedauc.models.model import ModelConfig, check_counts


@dataclass(frozen=True)
class SmallCNN(ModelConfig):
    """Strided 3x3 convolutions with GroupNorm for images `[C, H, W]`, then a mean over the image and a linear layer.

    GroupNorm keeps no running statistics to average over clients; strides and a plain mean, unlike pooling layers, have
    gradients that are the same bits on every run.
    """

    name: ClassVar[str] = "small-cnn"

    channels: tuple[int, ...] = (16, 32)
    norm_groups: int = 8
    outputs: int = 1

    def __post_init__(self) -> None:
        check_counts("channels", self.channels)
        check_counts("norm_groups", (self.norm_groups,))
        check_counts("outputs", (self.outputs,))
        if not self.channels:
            raise ValueError("channels is empty; give at least one number of channels")
        for count in self.channels:
            if count % self.norm_groups:
                raise ValueError(f"channels is {count}; it must be a multiple of norm_groups, {self.norm_groups}")

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """One halving block per entry of `channels`."""
        check_images(self.name, input_shape)
        blocks = [self._strided_block(*pair) for pair in pairwise((input_shape[0], *self.channels))]
        return nn.Sequential(*blocks, ImageMean(), nn.Linear(self.channels[-1], self.outputs))

    def _strided_block(self, channels: int, next_channels: int) -> nn.Module:
        convolution = nn.Conv2d(channels, next_channels, kernel_size=3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(self.norm_groups, next_channels), nn.ReLU())
