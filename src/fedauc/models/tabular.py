"""A network for tables: a linear model plus a residual network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.models.model import MAX_WIDTH, ModelConfig, check_layer_widths

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Tabular(ModelConfig):
    """A linear model plus a residual network on the same features.

    h(x) = a . x + w . z_L + b, with z_0 = relu(A x + c) and z_l = z_{l-1} + V_l relu(U_l z_{l-1} + u_l) + v_l.

    The weights a and V start at zero, so that training begins with a shallow network and adds what is not linear.
    There are no norms: in a federation with few positives per site, layers with them reached a lower AUC on held-out
    rows. Columns of numbers should come with their piecewise-linear encodings (`--data.numbers quantiles`), as in
    Gorishniy et al., On embeddings for numerical features in tabular deep learning, NeurIPS 2022.
    """

    name: ClassVar[str] = "tabular"

    width: int = option(64, "Length of the hidden vector z.", at_least=1, at_most=MAX_WIDTH)
    blocks: int = option(1, "Residual blocks.", at_least=0)
    hidden: int = option(64, "Width of the hidden layer of a block.", at_least=1, at_most=MAX_WIDTH)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_widths("width", (self.width, self.hidden))

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """The linear model and the residual network, side by side."""
        from torch import nn

        from fedauc.models._layers import AddedBranches

        features = math.prod(input_shape)
        linear = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(linear.weight)
        blocks = []
        for _ in range(self.blocks):
            last = nn.Linear(self.hidden, self.width)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            branch = nn.Sequential(nn.Linear(self.width, self.hidden), nn.ReLU(), last)
            blocks.append(AddedBranches(nn.Identity(), branch))
        deep = nn.Sequential(nn.Linear(features, self.width), nn.ReLU(), *blocks, nn.Linear(self.width, 1))
        return nn.Sequential(nn.Flatten(), AddedBranches(linear, deep))
