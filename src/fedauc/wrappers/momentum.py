"""Local momentum (heavy ball): every local step repeats a part of the one before it.

    w_{t+1} = w' + β (w_t - w_{t-1})      where w' = w_t - η (direction of the inner step), and w_{-1} = w_0

This is v ← β v + direction, w ← w - η v with v = 0 at the start of every visit. Duals take the plain inner step, and
control variates are those of the inner algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Download, Network, Wrapper
from fedauc.trees import Tree


@final
@dataclass(frozen=True, kw_only=True)
class Momentum(Wrapper):
    """Carries the last change of the weights from step to step, and forgets it at the end of the visit."""

    name: ClassVar[str] = "momentum"
    uploads_gradients_only: ClassVar[bool] = True
    beta: float = option(0.9, "Share of the last step that the next one repeats.", at_least=0, below=1)

    def begin(self, inner: Algorithm, download: Download, local: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        """The weights have not changed yet."""
        return local, torch.zeros_like(inner.local_model(local).weights)

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Tree, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """The inner step, and β times the last change of the weights."""
        old_weights = inner.local_model(local).weights
        local, emitted = inner.step(network, download, local, batch)
        if download.phase.scoring:
            return local, carried, emitted
        model = inner.local_model(local)
        weights = model.weights + self.beta * carried
        return inner.replace_local_model(local, model._replace(weights=weights)), weights - old_weights, emitted
