"""FedAvg with logits adjusted by each client's own class shares.

A client with n₊ positives and n₋ negatives minimizes the logistic loss of z + τ o_m, o_m = log((n₊ + 1) / (n₋ + 1)),
where z is the raw score. With τ = 1 the best z is the log ratio of the two classes' densities, which does not depend on
how rare the positives of the client are, so that clients with different shares of positives want the same model.

    w_m ← w;  repeat I times: w_m ← w_m - η ∇ℓ(z(w_m) + τ o_m; batch);  w ← Σ_m weight_m w_m

Adding the same number for all clients would change nothing but the model's bias, which no AUC depends on. Menon et al.,
Long-tail learning via logit adjustment, ICLR 2021; Zhang et al., Federated learning with label distribution skew via
logits calibration, ICML 2022, who adjust by the client's counts as well, with another function of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedauc.algorithms._local import Method, sgd_step
from fedauc.algorithms.fedavg import FedAvg
from fedauc.fields import option
from fedauc.interfaces import Batch, Cohort, Download, Model, Network, Phase, Server, Setting
from fedauc.trees import Tree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitAdjustedFedAvg(FedAvg):
    """FedAvg whose clients add the log of their own class odds to their raw scores; the server sends each its number.

    A class that a client lacks counts as one row, so that the number is finite.
    """

    name: ClassVar[str] = "logit-adjusted-fedavg"
    uploads_gradients_only: ClassVar[bool] = False  # Class counts enter the steps, too.
    tau: float = option(1.0, "Share of the log odds that is added; 0 is FedAvg.", at_least=0)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model, and to each client its adjustment τ o_m, the same for every local step, `[M, I]`."""
        counts = [side[list(cohort.clients)] for side in setting.census]
        odds = self.tau * np.log((counts[0] + 1) / (counts[1] + 1))
        weights: Tensor = server.shared.weights
        adjustments = torch.as_tensor(odds, dtype=weights.dtype, device=weights.device)
        return Download(phase, server.shared, per_client=adjustments[:, None].expand(-1, phase.local_steps))

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """w ← w - η ∇ℓ of the adjusted scores."""
        forward = network.forward_pass(local, batch.inputs)
        slopes = batch.weights * self.objective.example_slope(_adjust_scores(forward.outputs, batch), batch.labels)
        weights = sgd_step(local.weights, forward.pullback(slopes), download.phase.learning_rate, self.weight_decay)
        return Model(weights, forward.buffers), ()

    def monitored_loss(self, network: Network, download: Download, local: Model, batch: Batch) -> Tensor:
        """The loss of the batch, with adjusted scores."""
        scores = _adjust_scores(network.forward_pass(local, batch.inputs).outputs, batch)
        return (batch.weights * self.objective.example_loss(scores, batch.labels)).sum(-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.score != "identity":
            raise ValueError(
                f"objective.score is {self.objective.score!r}; logits are raw outputs: use score='identity'"
            )


def _adjust_scores(outputs: Tensor, batch: Batch) -> Tensor:
    """Raw outputs `[..., B]` plus the client's adjustment `[...]`."""
    adjustment: Tensor = batch.per_client
    return outputs + adjustment[..., None].to(outputs.dtype)


METHODS = (
    Method(
        "cycp-fedavg-logit-adjusted",
        LogitAdjustedFedAvg,
        "cyclic",
        0.1,
        reference="Menon et al. 2021; Zhang et al. 2022",
    ),
)
