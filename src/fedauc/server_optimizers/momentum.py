"""Server momentum (FedAvgM): the server keeps a velocity across rounds.

    v ← β v + Δ,   w ← w + η v

Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for federated visual classification, 2019.
A constant change Δ moves the model by η Δ / (1 - β) per round in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.interfaces import ServerOptimizer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Momentum(ServerOptimizer):
    """Moves the model by a velocity, a decaying sum of the rounds' changes. The state is that velocity."""

    name: ClassVar[str] = "momentum"
    learning_rate: float = option(1.0, "Server learning rate, on the velocity.", above=0)
    beta: float = option(0.5, "Share of the velocity that stays from round to round.", at_least=0, below=1)

    def init(self, weights: Tensor) -> Tensor:
        """v = 0."""
        return torch.zeros_like(weights)

    def update(self, change: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """η v, with the new velocity."""
        velocity = self.beta * state + change
        return self.learning_rate * velocity, velocity
