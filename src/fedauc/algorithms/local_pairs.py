"""Local pairs: FedAvg on the pairwise AUC loss, where a client compares its own positives with its own negatives only.

    F(w) = mean over the N clients of  s_m f_m(w)
    f_m(w) = mean over the positives i and the negatives j of client m of ψ(h_i - h_j)
    w_m ← w;  repeat I times: w_m ← w_m - η s_m ∇f_m(w_m; batch);  w ← Σ_m weight_m w_m

The batch has B₁ positives and B₂ negatives of the client, and f_m of a batch is the mean over its B₁ · B₂ pairs. A
client that lacks a class has no pairs and contributes zero: the rows that fill its batches have weight zero. No score
leaves a client, and no pair is made of two clients. The difference to CyCp-Pairwise is therefore what pairs between
clients are worth, and the difference to balanced FedAvg what pairs are worth without them.

All pairs of a client have one weight s_m, so that both halves of the step belong to the same loss. It is the weight of
the client's positives: N / N₊ with the weighting `clients`, where N₊ clients hold positives, N n_m⁺ / n⁺ with `pooled`,
and 1 with `paper`. With `pooled` every positive then counts the same, as it does in CyCp-Pairwise, but its partners are
the negatives of its own client. With `clients` and `pooled` the mean of s_m over the clients is 1, less the share of
those that lack negatives, so that learning rates mean the same as in CyCp-Pairwise. A weight by the number of pairs,
n_m⁺ n_m⁻, would count a client of twice the size four times.

It is the baseline "Local Pair" of Guo, Jin, Luo and Yang, FeDXL: provable federated learning for deep X-risk
optimization, ICML 2023, under the cyclic schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.algorithms._local import Method, apply_mean_change, check_objective, sgd_step
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.kinds import Active, GapObjective, Passive, split_by_class
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.trees import Tree, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LocalPairs(Algorithm):
    """Local SGD on the pairs of a client's own batch; the server averages the models."""

    name: ClassVar[str] = "local-pairs"
    uploads_gradients_only: ClassVar[bool] = False  # The slope of a row depends on the other rows of its batch.
    objective: GapObjective = PairwiseSigmoid()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self, GapObjective)

    def init(self, setting: Setting, model: Model) -> Server:
        """The server holds the model and nothing else."""
        return Server(shared=model, anchor=model)

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model."""
        return Download(phase, server.shared)

    def begin(self, download: Download, client_state: Tree) -> Model:
        """Start from the model that was sent."""
        model: Model = download.shared
        return model

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """w ← w - η s_m ∇f_m: with the own scores as passive ones, both halves of the step are the exact gradient."""
        forward = network.forward_pass(local, batch.inputs)
        scores = self.objective.to_scores(forward.outputs)
        active = _weigh_pairs(split_by_class(scores, batch.weights, download.phase.batch.positives))
        by_class = self.objective.active_slopes(active, Passive(active.positives, active.negatives))
        slopes = torch.cat([by_class.positives, by_class.negatives], dim=-1)
        gradient = forward.pullback(self.objective.to_output_slopes(scores, slopes))
        weights = sgd_step(local.weights, gradient, download.phase.learning_rate, self.weight_decay)
        return Model(weights, forward.buffers), ()

    def monitored_loss(self, network: Network, download: Download, local: Model, batch: Batch) -> Tensor:
        """s_m f_m of the batch."""
        scores = self.objective.to_scores(network.forward_pass(local, batch.inputs).outputs)
        active = _weigh_pairs(split_by_class(scores, batch.weights, download.phase.batch.positives))
        return self.objective.monitored_loss(active, Passive(active.positives, active.negatives))

    def finish(self, download: Download, client_state: Tree, local: Model, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload the change of the model; the client keeps nothing."""
        return Upload(mean=tree_sub(local, download.shared)), ()

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change to the model."""
        return server._replace(shared=apply_mean_change(server.shared, reduced))

    def extract_model(self, shared: Model) -> Model:
        """The shared state is the model."""
        return shared


def _weigh_pairs(active: Active) -> Active:
    """The scores of a batch, with weights that add up to s_m in both classes, or to zero where a class is missing.

    Rows that fill the place of a missing class have weight zero; without negatives, positives must not count either.
    """
    has_negatives = (active.negative_weights > 0).any(dim=-1, keepdim=True)
    positive_weights = active.positive_weights * has_negatives
    per_negative = positive_weights.sum(-1, keepdim=True) / active.negative_weights.shape[-1]
    return active._replace(
        positive_weights=positive_weights, negative_weights=per_negative.expand_as(active.negative_weights)
    )


METHODS = (Method("cycp-local-pairs", LocalPairs, "cyclic", 0.1, reference="Guo et al. 2023 (Local Pair), cyclic"),)
