"""The logistic surrogate of a gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedauc.objectives._checks import check_positive
from fedauc.objectives.kinds import GapObjective


@dataclass(frozen=True, kw_only=True)
class PairwiseLogistic(GapObjective):
    """ψ(t) = log(1 + e^{-st}), with steepness s > 0. Smooth, convex, consistent with AUC.

    >>> PairwiseLogistic().pair_loss(torch.tensor([-1e4, 0.0, 1e4]))
    tensor([1.0000e+04, 6.9315e-01, 0.0000e+00])

    Reference: Gao and Zhou, On the consistency of AUC pairwise optimization, IJCAI 2015.
    """

    name: ClassVar[str] = "pairwise-logistic"
    steepness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("steepness", self.steepness)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """log(1 + e^{-st})."""
        # Not softplus: it turns linear at 20, where float64 still resolves the rest, 1e-10 of the value.
        return torch.logaddexp(-self.steepness * gap, gap.new_zeros(()))

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-s / (1 + e^{st})."""
        return -self.steepness * torch.sigmoid(-self.steepness * gap)
