"""FedProx: local steps are pulled towards the model that was sent.

    w ← w' - η μ (w - w_sent)      where w' = w - η (direction of the inner step)

Li et al., Federated optimization in heterogeneous networks, MLSys 2020. Duals and control variates are those of the
inner step, without a proximal term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Download, Network, Wrapper
from fedauc.trees import Tree


@final
@dataclass(frozen=True, kw_only=True)
class FedProx(Wrapper):
    """Adds μ (w - w_sent) to the gradient of every local step."""

    name: ClassVar[str] = "fedprox"
    uploads_gradients_only: ClassVar[bool] = True
    mu: float = option(0.1, "Weight of the pull towards the model that was sent.", at_least=0)

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Tree, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """The inner step, then the pull at the weights before it."""
        old_weights, sent = inner.local_model(local).weights, inner.extract_model(download.shared).weights
        local, emitted = inner.step(network, download, local, batch)
        if download.phase.scoring:
            return local, carried, emitted
        model = inner.local_model(local)
        pulled = model.weights - download.phase.learning_rate * (self.mu * (old_weights - sent))
        return inner.replace_local_model(local, model._replace(weights=pulled)), carried, emitted
