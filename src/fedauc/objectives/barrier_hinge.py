"""The barrier hinge: symmetric where scores live, walled off outside."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from fedauc.objectives._checks import check_between, check_positive
from fedauc.objectives.kinds import GapObjective


@dataclass(frozen=True, kw_only=True)
class BarrierHinge(GapObjective):
    """ψ(t) = max(m - τ(m + t), max(τ(t - m), m - t)), with margin m > 0 and steepness τ > 1. Convex, not smooth.

    Symmetric for |t| ≤ m: there ψ(t) = m - t, so ψ(t) + ψ(-t) = 2m. The walls of slope ±τ start at the kinks t = m and
    t = -mτ/(τ - 1); at both kinks `slope` is the middle piece's -1, a valid subgradient.

    >>> BarrierHinge(margin=1.0, steepness=2.0).pair_loss(torch.tensor([-3.0, -1.0, 1.0, 3.0]))
    tensor([5., 2., 0., 4.])

    Reference: Charoenphakdee et al., On symmetric losses for learning from corrupted labels, ICML 2019.
    """

    name: ClassVar[str] = "barrier-hinge"
    symmetric: ClassVar[bool] = True
    margin: float = 1.0
    steepness: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("margin", self.margin)
        check_between("steepness", self.steepness, 1, inf)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """max(m - τ(m + t), max(τ(t - m), m - t))."""
        left = self.margin - self.steepness * (self.margin + gap)
        right = self.steepness * (gap - self.margin)
        return torch.maximum(left, torch.maximum(right, self.margin - gap))

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-τ left of the first kink, τ right of the second, -1 between them."""
        wall = -self.margin * self.steepness / (self.steepness - 1)
        middle = torch.full_like(gap, -1)
        outer = torch.full_like(gap, self.steepness)
        return torch.where(gap > self.margin, outer, torch.where(gap < wall, -outer, middle))
