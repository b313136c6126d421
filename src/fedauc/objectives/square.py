"""The squared surrogate: the pairwise twin of minimax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedauc.objectives._checks import check_positive
from fedauc.objectives.kinds import GapObjective


@dataclass(frozen=True, kw_only=True)
class PairwiseSquare(GapObjective):
    """ψ(t) = (m - t)², with margin m > 0. Smooth and convex, but it also punishes gaps beyond the margin.

    >>> import torch
    >>> PairwiseSquare(margin=1.0).pair_loss(torch.tensor([0.0, 1.0, 3.0]))
    tensor([1., 0., 4.])

    Reference: Gao et al., One-pass AUC optimization, ICML 2013.
    """

    name: ClassVar[str] = "square"
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("margin", self.margin)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)²."""
        return (self.margin - gap).square()

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-2(m - t)."""
        return 2 * (gap - self.margin)
