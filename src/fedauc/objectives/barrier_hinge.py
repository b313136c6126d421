"""The barrier hinge: a loss that is symmetric up to the margin and steep beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BarrierHinge(GapObjective):
    """ψ(t) = max(m - τ(m + t), max(τ(t - m), m - t)), with margin m > 0 and steepness τ > 1. Convex, not smooth.

    It is symmetric for |t| ≤ m: there ψ(t) = m - t, so ψ(t) + ψ(-t) = 2m. The steep parts of slope ±τ start at the
    kinks t = m and t = -mτ/(τ - 1); at both kinks `pair_slope` is -1 as between them, which is a subgradient.

    >>> BarrierHinge(margin=1.0, steepness=2.0).pair_loss(torch.tensor([-3.0, -1.0, 1.0, 3.0]))
    tensor([5., 2., 0., 4.])

    Reference: Charoenphakdee et al., On symmetric losses for learning from corrupted labels, ICML 2019.
    """

    name: ClassVar[str] = "barrier-hinge"
    symmetric: ClassVar[bool] = True
    margin: float = option(1.0, "Gap between scores at which the loss is zero.", above=0)
    steepness: float = option(2.0, "Slope of the loss outside the symmetric range.", above=1)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """max(m - τ(m + t), max(τ(t - m), m - t))."""
        left = self.margin - self.steepness * (self.margin + gap)
        right = self.steepness * (gap - self.margin)
        return torch.maximum(left, torch.maximum(right, self.margin - gap))

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-τ left of the first kink, τ right of the second, -1 between them."""
        left_kink = -self.margin * self.steepness / (self.steepness - 1)
        middle = torch.full_like(gap, -1)
        outer = torch.full_like(gap, self.steepness)
        return torch.where(gap > self.margin, outer, torch.where(gap < left_kink, -outer, middle))
