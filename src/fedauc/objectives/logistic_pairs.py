"""The logistic pairwise loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairwiseLogistic(GapObjective):
    """ψ(t) = log(1 + e^{-st}), with steepness s > 0. Smooth, convex, consistent with AUC.

    >>> PairwiseLogistic().pair_loss(torch.tensor([-1e4, 0.0, 1e4]))
    tensor([1.0000e+04, 6.9315e-01, 0.0000e+00])

    Reference: Gao and Zhou, On the consistency of AUC pairwise optimization, IJCAI 2015.
    """

    name: ClassVar[str] = "pairwise-logistic"
    steepness: float = option(1.0, "Factor of the gap between two scores.", above=0)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """log(1 + e^{-st})."""
        # softplus turns linear at 20, where float64 still resolves the difference, so we use logaddexp.
        return torch.logaddexp(-self.steepness * gap, gap.new_zeros(()))

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-s / (1 + e^{st})."""
        return -self.steepness * torch.sigmoid(-self.steepness * gap)
