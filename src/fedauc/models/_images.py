"""The options that the image models share, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedauc.fields import option
from fedauc.models.model import MAX_WIDTH, ModelConfig

Norm = Literal["group", "batch"]
"""GroupNorm keeps no statistics; BatchNorm keeps running ones, which are sent and averaged with the weights."""

Stem = Literal["imagenet", "cifar"]
"""A 7x7 convolution and a max-pool that leave a quarter of each side, or a 3x3 convolution that keeps the size."""


@dataclass(frozen=True)
class DeepImageModel(ModelConfig):
    """Stem, norm and outputs of a deep image model for photographs."""

    shift: ClassVar[float] = 0.5
    scale: ClassVar[float] = 0.25
    fewest_channels: ClassVar[int]
    """The smallest number of channels of a layer, which the groups of GroupNorm must divide."""

    stem: Stem = option("imagenet", "First layers: for large images, or for images of 32x32 pixels.")
    norm: Norm = option("group", "GroupNorm, or BatchNorm with statistics that are averaged over clients.")
    norm_groups: int = option(32, "Groups of GroupNorm.", at_least=1)
    outputs: int = option(1, "Numbers per row: 1 for a score, more for an embedding.", at_least=1, at_most=MAX_WIDTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "group" and self.fewest_channels % self.norm_groups:
            bound = f"it must divide {self.fewest_channels}, the fewest channels of a layer"
            raise ValueError(f"norm_groups is {self.norm_groups}; {bound}")


def check_images(name: str, input_shape: tuple[int, ...]) -> None:
    """Refuse inputs that are not images."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape is {input_shape}; {name} needs images [C, H, W]: use linear or mlp")
