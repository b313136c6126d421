"""No optimizer: the mean change is added as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.interfaces import ServerOptimizer
from fedauc.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plain(ServerOptimizer):
    """Adds the mean change to the model: w ← w + Δ."""

    name: ClassVar[str] = "plain"

    def update(self, change: Tensor, state: Tree) -> tuple[Tensor, Tree]:
        """The change itself."""
        return change, state
