"""The q-norm hinge: between the hinge (q → 1) and steeper penalties on misordered pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedauc.objectives._checks import check_between, check_positive
from fedauc.objectives.kinds import GapObjective

POWER_LIMIT = 9.0
"""Below it, a gap of 1e4 keeps its value and its slope inside float32's range."""


@dataclass(frozen=True, kw_only=True)
class QNormHinge(GapObjective):
    """ψ(t) = (m - t)₊^q, with margin m > 0 and power 1 < q < 9. Convex; for q < 2 not smooth at t = m.

    The paper's table drops the plus; without it ψ is undefined beyond the margin for most q.

    >>> import torch
    >>> QNormHinge(power=3.0).pair_loss(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([8., 1., 0.])
    """

    name: ClassVar[str] = "qnorm-hinge"
    margin: float = 1.0
    power: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("margin", self.margin)
        check_between("power", self.power, 1, POWER_LIMIT)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)₊^q."""
        return (self.margin - gap).clamp_min(0).pow(self.power)

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-q (m - t)₊^{q-1}."""
        return -self.power * (self.margin - gap).clamp_min(0).pow(self.power - 1)
