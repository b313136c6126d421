"""The squared hinge: the squared loss without its penalty on gaps beyond the margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SquaredHinge(GapObjective):
    """ψ(t) = (m - t)₊², with margin m > 0. Smooth and convex; zero for gaps of at least the margin.

    >>> import torch
    >>> SquaredHinge(margin=1.0).pair_loss(torch.tensor([0.0, 1.0, 3.0]))
    tensor([1., 0., 0.])

    Reference: Zhao et al., Online AUC maximization, ICML 2011.
    """

    name: ClassVar[str] = "squared-hinge"
    margin: float = option(1.0, "Gap between scores beyond which a pair has no loss.", above=0)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)₊²."""
        return (self.margin - gap).clamp_min(0).square()

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-2(m - t)₊."""
        return -2 * (self.margin - gap).clamp_min(0)
