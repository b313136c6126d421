"""The squared hinge: the square without its penalty on gaps beyond the margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedauc.objectives._checks import check_positive
from fedauc.objectives.kinds import GapObjective


@dataclass(frozen=True, kw_only=True)
class SquaredHinge(GapObjective):
    """ψ(t) = (m - t)₊², with margin m > 0. Smooth and convex; zero once a pair is apart by the margin.

    >>> import torch
    >>> SquaredHinge(margin=1.0).pair_loss(torch.tensor([0.0, 1.0, 3.0]))
    tensor([1., 0., 0.])

    Reference: Zhao et al., Online AUC maximization, ICML 2011.
    """

    name: ClassVar[str] = "squared-hinge"
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("margin", self.margin)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)₊²."""
        return (self.margin - gap).clamp_min(0).square()

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-2(m - t)₊."""
        return -2 * (self.margin - gap).clamp_min(0)
