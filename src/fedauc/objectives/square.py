"""The squared pairwise loss, whose saddle form is the minimax objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairwiseSquare(GapObjective):
    """ψ(t) = (m - t)², with margin m > 0. Smooth and convex, but it also penalizes gaps beyond the margin.

    >>> import torch
    >>> PairwiseSquare(margin=1.0).pair_loss(torch.tensor([0.0, 1.0, 3.0]))
    tensor([1., 0., 4.])

    Reference: Gao et al., One-pass AUC optimization, ICML 2013.
    """

    name: ClassVar[str] = "square"
    margin: float = option(1.0, "Gap between a positive and a negative score that the loss asks for.", above=0)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)²."""
        return (self.margin - gap).square()

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-2(m - t)."""
        return 2 * (gap - self.margin)
