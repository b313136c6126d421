"""Adaptive server optimizers (FedAdam, FedYogi): every weight has a step size of its own.

    m ← β₁ m + (1 - β₁) Δ
    v ← β₂ v + (1 - β₂) Δ²                     (Adam)
    v ← v - (1 - β₂) Δ² sign(v - Δ²)           (Yogi)
    w ← w + η m / (√v + τ)

Reddi et al., Adaptive federated optimization, ICLR 2021: no bias correction, and v starts at τ².
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import ServerOptimizer

if TYPE_CHECKING:
    from torch import Tensor


class Moments(NamedTuple):
    """The running means of the change and of its square, `[d]` each."""

    first: Tensor
    second: Tensor


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptimizer(ServerOptimizer):
    """What Adam and Yogi share."""

    learning_rate: float = option(0.01, "Server learning rate: about the largest step of a weight in a round.", above=0)
    beta1: float = option(0.9, "Share of the running mean of changes that stays.", at_least=0, below=1)
    beta2: float = option(0.99, "Share of the running mean of squared changes that stays.", at_least=0, below=1)
    tau: float = option(0.001, "Added to the root of the mean square; larger values adapt less.", above=0)

    @abstractmethod
    def update_second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        """The new running mean of the squared changes."""

    def init(self, weights: Tensor) -> Moments:
        """m = 0, v = τ²."""
        return Moments(torch.zeros_like(weights), torch.full_like(weights, self.tau**2))

    def update(self, change: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        """η m / (√v + τ)."""
        first = self.beta1 * state.first + (1 - self.beta1) * change
        second = self.update_second_moment(state.second, change.square())
        return self.learning_rate * first / (torch.sqrt(second) + self.tau), Moments(first, second)


@dataclass(frozen=True, kw_only=True)
class Adam(AdaptiveOptimizer):
    """Divides the mean change of each weight by the root of its mean square, which forgets exponentially."""

    name: ClassVar[str] = "adam"

    def update_second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        """β₂ v + (1 - β₂) Δ²."""
        return self.beta2 * second + (1 - self.beta2) * squares


@dataclass(frozen=True, kw_only=True)
class Yogi(AdaptiveOptimizer):
    """As Adam, but the mean square forgets large changes slowly: it changes by at most (1 - β₂) Δ² in a round."""

    name: ClassVar[str] = "yogi"

    def update_second_moment(self, second: Tensor, squares: Tensor) -> Tensor:
        """v - (1 - β₂) Δ² sign(v - Δ²)."""
        return second - (1 - self.beta2) * squares * torch.sign(second - squares)
