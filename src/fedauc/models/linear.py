"""A linear scorer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fedauc.models.model import ModelConfig


@dataclass(frozen=True)
class Linear(ModelConfig):
    """h(x) = w . x + b on flattened inputs. An AUC ignores b; it matters to losses of single rows."""

    name: ClassVar[str] = "linear"

    bias: bool = True
    init: Literal["zeros", "default"] = "zeros"

    def __post_init__(self) -> None:
        if self.init not in ("zeros", "default"):
            raise ValueError(f"init is {self.init!r}; use 'zeros' or 'default'")

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """One layer."""
        layer = nn.Linear(math.prod(input_shape), 1, bias=self.bias)
        if self.init == "zeros":
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), layer)
