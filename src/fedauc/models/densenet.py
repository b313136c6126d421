"""DenseNet-121."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.models._images import DeepImageModel, check_images

if TYPE_CHECKING:
    from torch import nn

BLOCKS = (6, 12, 24, 16)
"""Layers of the four dense blocks."""

GROWTH = 32
"""Channels that each layer adds; the channels of every layer are a multiple of it."""


@dataclass(frozen=True)
class DenseNet121(DeepImageModel):
    """DenseNet-121 for images `[C, H, W]` (Huang et al. 2017, https://arxiv.org/abs/1608.06993).

    Where a side is odd, pooling keeps its last row or column. Images of 28x28 pixels, which torchvision's densenet121
    cannot take, therefore have something left at the end. Otherwise norm='batch' with the ImageNet stem is that
    network, with the same parameters in the same order.
    """

    name: ClassVar[str] = "densenet121"
    fewest_channels: ClassVar[int] = GROWTH

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The stem, four dense blocks with a halving transition between them, a mean and a linear layer."""
        from torch import nn

        from fedauc.models._layers import DenseLayer, Head, ImageMean, norm_factory, stem_layers, unbiased_convolution

        check_images(self.name, input_shape)
        norm = norm_factory(self.norm, self.norm_groups)
        channels = 2 * GROWTH
        parts: list[nn.Module] = [stem_layers(self.stem, input_shape[0], channels, norm)]
        for index, count in enumerate(BLOCKS):
            parts += [DenseLayer(channels + GROWTH * layer, GROWTH, norm) for layer in range(count)]
            channels += GROWTH * count
            if index < len(BLOCKS) - 1:
                narrowing, pool = unbiased_convolution(channels, channels // 2, 1), nn.AvgPool2d(2, ceil_mode=True)
                parts.append(nn.Sequential(norm(channels), nn.ReLU(), narrowing, pool))
                channels //= 2
        network = nn.Sequential(*parts, norm(channels), nn.ReLU(), ImageMean(), Head(channels, self.outputs))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        return network
