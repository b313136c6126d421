"""The q-norm hinge, which lies between the hinge (q → 1) and steeper penalties on misordered pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.objectives.kinds import GapObjective

if TYPE_CHECKING:
    from torch import Tensor

POWER_LIMIT = 9.0
"""For smaller powers the loss and the slope of a gap of 1e4 stay within the range of float32."""


@dataclass(frozen=True, kw_only=True)
class QNormHinge(GapObjective):
    """ψ(t) = (m - t)₊^q, with margin m > 0 and power 1 < q < 9. Convex; for q < 2 not smooth at t = m.

    The paper's table omits the positive part; without it ψ is undefined beyond the margin for most q.

    >>> import torch
    >>> QNormHinge(power=3.0).pair_loss(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([8., 1., 0.])
    """

    name: ClassVar[str] = "qnorm-hinge"
    margin: float = option(1.0, "Gap between scores beyond which a pair has no loss.", above=0)
    power: float = option(1.5, "Exponent of the hinge.", above=1, below=POWER_LIMIT)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """(m - t)₊^q."""
        return (self.margin - gap).clamp_min(0).pow(self.power)

    def pair_slope(self, gap: Tensor) -> Tensor:
        """-q (m - t)₊^{q-1}."""
        return -self.power * (self.margin - gap).clamp_min(0).pow(self.power - 1)
