"""What a model configuration is: frozen parameters that build a network, with random weights keyed by a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc import keys
from fedauc.fields import check_fields

if TYPE_CHECKING:
    from torch import Tensor, nn


MAX_WIDTH = 1 << 20
"""The widest layer of a model."""

MAX_WEIGHTS = 1 << 31
"""The most weights between two layers, 8 GiB of them."""


def check_layer_widths(name: str, widths: Sequence[int]) -> None:
    """Refuse neighbouring layers with so many weights between them that no machine would train them here.

    >>> check_layer_widths("hidden", (20_000, 64))
    """
    for width, next_width in pairwise(widths):
        weights = width * next_width
        if weights > MAX_WEIGHTS:
            raise ValueError(
                f"{name} gives layers of {width:,} and {next_width:,} units, with {weights:,} weights between them; "
                f"there may be {MAX_WEIGHTS:,} at most: lower {name}"
            )


@dataclass(frozen=True)
class ModelConfig(ABC):
    """A model before it is built. A subclass defines `build_layers`; random weights are drawn inside `build` only."""

    name: ClassVar[str]
    shift: ClassVar[float] = 0.0
    scale: ClassVar[float] = 1.0
    """Images of uint8 become (x / 255 - shift) / scale."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The network for float inputs `[B, *input_shape]`, with outputs `[B, 1]`, or `[B, E]` for embeddings."""

    def check_inputs(self, inputs: Tensor) -> None:
        """Refuse rows `[n, ...]` of which the model cannot score any; most models need no such check."""
        return

    def build(self, input_shape: tuple[int, ...], seed: int) -> nn.Module:
        """The network on the CPU, the same for the same seed; global generators keep their state."""
        from fedauc.models._layers import InputScaling

        if not input_shape or min(input_shape) < 1:
            raise ValueError(f"input_shape is {input_shape}; it must name at least one feature, without the batch size")
        # torch.manual_seed would also seed the accelerators, and fork_rng without devices does not restore those.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(keys.random_integer(seed, "model", self.name))
            return InputScaling(self.build_layers(tuple(input_shape)), self.shift, self.scale)
