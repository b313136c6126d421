"""A multi-layer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.models.model import MAX_WIDTH, ModelConfig, check_layer_widths

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class MLP(ModelConfig):
    """Hidden layers with rectifiers on flattened inputs; more than one output makes an embedding."""

    name: ClassVar[str] = "mlp"

    hidden: tuple[int, ...] = option((64,), "Width of each hidden layer.", at_least=1, at_most=MAX_WIDTH)
    outputs: int = option(1, "Numbers per row: 1 for a score, more for an embedding.", at_least=1, at_most=MAX_WIDTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_widths("hidden", (*self.hidden, self.outputs))

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """Linear layers with a rectifier between each two."""
        from torch import nn

        widths = (math.prod(input_shape), *self.hidden)
        blocks = [
            layer for width, next_width in pairwise(widths) for layer in (nn.Linear(width, next_width), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *blocks, nn.Linear(widths[-1], self.outputs))
