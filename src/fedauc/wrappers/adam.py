"""Local Adam: the direction of the inner step is scaled entry by entry.

    d = (w - w') / η                                        where w' is the result of the inner step
    m ← β₁ m + (1 - β₁) d,   v ← β₂ v + (1 - β₂) d²
    w ← w - η (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε)      m = v = 0 at the start of every visit

Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015. Every entry moves by about η, so learning rates
around 0.001 are usual. A direction whose step is lost to rounding in w' counts as zero. Duals take the plain inner
step, and control variates are those of the inner algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch

from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Download, Network, Wrapper
from fedauc.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor


class Moments(NamedTuple):
    """The moving means m and v of a visit `[..., d]`, and β₁ᵗ and β₂ᵗ `[..., 1]` for the correction of their bias."""

    first: Tensor
    second: Tensor
    first_power: Tensor
    second_power: Tensor


@final
@dataclass(frozen=True, kw_only=True)
class Adam(Wrapper):
    """Takes Adam's local steps along the directions of the inner algorithm; the moments are forgotten after a visit."""

    name: ClassVar[str] = "adam"
    uploads_gradients_only: ClassVar[bool] = True
    beta1: float = option(0.9, "Decay of the mean of directions.", at_least=0, below=1)
    beta2: float = option(0.999, "Decay of the mean of squared directions.", at_least=0, below=1)
    epsilon: float = option(1e-8, "Added to the root of the mean square.", above=0)

    def begin(self, inner: Algorithm, download: Download, local: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """The moments of no steps."""
        weights = inner.local_model(local).weights
        initial_power = torch.ones_like(weights[..., :1])
        return local, Moments(torch.zeros_like(weights), torch.zeros_like(weights), initial_power, initial_power)

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Moments, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """Adam's step along the direction of the inner step."""
        old_weights = inner.local_model(local).weights
        local, emitted = inner.step(network, download, local, batch)
        if download.phase.scoring:
            return local, carried, emitted
        model, learning_rate = inner.local_model(local), download.phase.learning_rate
        direction = (old_weights - model.weights) / learning_rate
        moments = Moments(
            self.beta1 * carried.first + (1 - self.beta1) * direction,
            self.beta2 * carried.second + (1 - self.beta2) * direction * direction,
            self.beta1 * carried.first_power,
            self.beta2 * carried.second_power,
        )
        scale = torch.sqrt(moments.second / (1 - moments.second_power)) + self.epsilon
        weights = old_weights - learning_rate * (moments.first / (1 - moments.first_power) / scale)
        return inner.replace_local_model(local, model._replace(weights=weights)), moments, emitted
