"""The sigmoid surrogate: a smooth step, and the pairwise methods' default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedauc.objectives._checks import check_positive
from fedauc.objectives.kinds import GapObjective


@dataclass(frozen=True, kw_only=True)
class PairwiseSigmoid(GapObjective):
    """ψ(t) = 1 / (1 + e^{t/λ}), with scale λ > 0; 1 - AUC as λ → 0.

    Symmetric: ψ(t) + ψ(-t) = 1 for every t, so label noise maps its risk affinely.

    >>> PairwiseSigmoid().pair_loss(torch.tensor([-1e4, 0.0, 1e4]))
    tensor([1.0000, 0.5000, 0.0000])

    Reference: Calders and Jaroszewicz, Efficient AUC optimization for classification, PKDD 2007.
    """

    name: ClassVar[str] = "sigmoid"
    symmetric: ClassVar[bool] = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("scale", self.scale)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """1 / (1 + e^{t/λ})."""
        return torch.sigmoid(-gap / self.scale)

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-ψ(t) ψ(-t) / λ."""
        # The product, not ψ(1 - ψ): the difference loses every digit once ψ rounds to 1.
        return -self.pair_loss(gap) * self.pair_loss(-gap) / self.scale
