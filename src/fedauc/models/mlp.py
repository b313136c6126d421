"""A multi-layer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from fedauc.models.model import ModelConfig, check_counts


@dataclass(frozen=True)
class MLP(ModelConfig):
    """Rectified hidden layers on flattened inputs; more than one output makes an embedding."""

    name: ClassVar[str] = "mlp"

    hidden: tuple[int, ...] = (64,)
    outputs: int = 1

    def __post_init__(self) -> None:
        check_counts("hidden", self.hidden)
        check_counts("outputs", (self.outputs,))

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """Linear layers with a rectifier between each two."""
        widths = (math.prod(input_shape), *self.hidden)
        blocks = [layer for wide, next_wide in pairwise(widths) for layer in (nn.Linear(wide, next_wide), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(widths[-1], self.outputs))
