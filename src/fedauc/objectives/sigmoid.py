"""The sigmoid pairwise loss: a smooth step, and the default of the pairwise methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairwiseSigmoid(GapObjective):
    """ψ(t) = 1 / (1 + e^{t/λ}), with scale λ > 0; 1 - AUC as λ → 0.

    It is symmetric: ψ(t) + ψ(-t) = 1 for every t, so label noise changes its risk by an affine map.

    >>> PairwiseSigmoid().pair_loss(torch.tensor([-1e4, 0.0, 1e4]))
    tensor([1.0000, 0.5000, 0.0000])

    Reference: Calders and Jaroszewicz, Efficient AUC optimization for classification, PKDD 2007.
    """

    name: ClassVar[str] = "sigmoid"
    symmetric: ClassVar[bool] = True
    scale: float = option(1.0, "Gap between scores over which the loss falls; the paper's lambda.", above=0)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """1 / (1 + e^{t/λ})."""
        return torch.sigmoid(-gap / self.scale)

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-ψ(t) ψ(-t) / λ."""
        # ψ(t) ψ(-t) rather than ψ(1 - ψ), because the difference loses every digit once ψ rounds to 1.
        return -self.pair_loss(gap) * self.pair_loss(-gap) / self.scale
