"""A linear model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedauc.fields import option
from fedauc.models.model import ModelConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Linear(ModelConfig):
    """h(x) = w . x + b on flattened inputs. The AUC does not depend on b, but losses of single rows do."""

    name: ClassVar[str] = "linear"

    bias: bool = option(True, "Whether the model has a bias.")
    init: Literal["zeros", "default"] = option("zeros", "Initial weights: zeros, or torch's random ones.")

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """One linear layer."""
        from torch import nn

        layer = nn.Linear(math.prod(input_shape), 1, bias=self.bias)
        if self.init == "zeros":
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), layer)
