"""ResNet-18."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from fedauc.models._images import DeepImageModel, check_images

if TYPE_CHECKING:
    from torch import nn

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages; each stage has two blocks, and all but the first halve the image."""


@dataclass(frozen=True)
class ResNet18(DeepImageModel):
    """ResNet-18 for images `[C, H, W]` (He et al. 2016, https://arxiv.org/abs/1512.03385).

    GroupNorm with 32 groups is the default (Wu and He 2018, https://arxiv.org/abs/1803.08494), because the statistics
    of BatchNorm suffer when clients differ (Hsieh et al. 2020, https://arxiv.org/abs/1910.00189). With norm='batch' and
    the ImageNet stem it is torchvision's resnet18, with the same parameters in the same order.
    """

    name: ClassVar[str] = "resnet18"
    fewest_channels: ClassVar[int] = WIDTHS[0]

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The stem, eight blocks, the mean over the image and a linear layer."""
        from torch import nn

        from fedauc.models._layers import Head, ImageMean, ResidualBlock, norm_factory, stem_layers

        check_images(self.name, input_shape)
        norm = norm_factory(self.norm, self.norm_groups)
        parts: list[nn.Module] = [stem_layers(self.stem, input_shape[0], WIDTHS[0], norm)]
        for channels, width in pairwise((WIDTHS[0], *WIDTHS)):
            stride = 1 if channels == width else 2
            first, second = ResidualBlock(channels, width, stride, norm), ResidualBlock(width, width, 1, norm)
            parts.append(nn.Sequential(first, second))
        network = nn.Sequential(*parts, ImageMean(), Head(WIDTHS[-1], self.outputs))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return network
