"""A small convolutional network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.models._images import check_images
from fedauc.models.model import MAX_WIDTH, ModelConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class SmallCNN(ModelConfig):
    """Strided 3x3 convolutions with GroupNorm for images `[C, H, W]`, then a mean over the image and a linear layer.

    GroupNorm keeps no running statistics that would have to be averaged over clients. Strides and a plain mean, unlike
    pooling layers, have gradients with the same bits on every run.
    """

    name: ClassVar[str] = "small-cnn"

    channels: tuple[int, ...] = option((16, 32), "Channels of each convolution.", at_least=1)
    norm_groups: int = option(8, "Groups of GroupNorm.", at_least=1)
    outputs: int = option(1, "Numbers per row: 1 for a score, more for an embedding.", at_least=1, at_most=MAX_WIDTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise ValueError("channels is empty; give at least one number of channels")
        for count in self.channels:
            if count % self.norm_groups:
                raise ValueError(f"channels is {count}; it must be a multiple of norm_groups, {self.norm_groups}")

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """One halving block per entry of `channels`."""
        from torch import nn

        from fedauc.models._layers import ImageMean

        check_images(self.name, input_shape)
        blocks: list[nn.Module] = []
        for channels, out in pairwise((input_shape[0], *self.channels)):
            convolution = nn.Conv2d(channels, out, kernel_size=3, stride=2, padding=1, bias=False)
            blocks.append(nn.Sequential(convolution, nn.GroupNorm(self.norm_groups, out), nn.ReLU()))
        return nn.Sequential(*blocks, ImageMean(), nn.Linear(self.channels[-1], self.outputs))
