"""CyCp-Pairwise for several classes: the one-vs-rest AUC of every class, by one model with an output per class.

    first: one cycle of scoring visits fills the pools, without learning
    for each cycle e, for each group: send w, the shares π of the classes, and to each client passive rows of every
    class, drawn from its pool of cycle e-1: the C scores of each;
    each client repeats I times: the scores h^1 ... h^C of active rows, as many of every class; for every class c,
        G1 = mean over active rows of class c and passive rows of the rest of ψ'(h^c - h'^c) ∇h^c
        G2 = mean over passive rows of class c and active rows of the rest of -ψ'(h'^c - h^c) ∇h^c
        w ← w - η · mean_c (G1 + G2), and the active scores join the pools of cycle e
    server: the mean of w.

A score h^c is the log-odds of class c against the rest, from the softmax of the C outputs, and a mean over the rest
weighs the other classes by their shares. With two classes and outputs (0, h), both problems are that of CyCp-Pairwise.
The method is the paper's Algorithms 3-4 for each class, on shared batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.algorithms._local import apply_mean_change, check_objective, sgd_step
from fedauc.algorithms._pool import RoundScores, draw_passive_scores, rebuild_pool
from fedauc.data.classes import ClassCensus, divide_rows, list_counts
from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.one_vs_rest import ClassRows, OneVsRestLoss
from fedauc.trees import Tree, is_empty, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class ClassPools(NamedTuple):
    """A pool `[n, C]` for each class, and the scores that were uploaded since they were rebuilt."""

    pools: tuple[Tensor, ...]
    recent: tuple[RoundScores, ...]


class ClassDraw(NamedTuple):
    """What a client is sent for each local step: passive rows `[P_c, C]` of every class, and the shares `[C]`."""

    passive: tuple[Tensor, ...]
    shares: Tensor


@dataclass(frozen=True, kw_only=True)
class OneVsRestPairwise(Algorithm):
    """Local SGD on pairs of an active and a passive row, for all classes at once; the server averages the models.

    With `pool="cycle"` passive rows are drawn from the whole previous cycle, with "window" from the last K rounds.
    """

    name: ClassVar[str] = "one-vs-rest-pairwise"
    scoring_pass: ClassVar[bool] = True
    objective: OneVsRestLoss = OneVsRestLoss()
    pool: Literal["cycle", "window"] = option("cycle", "Passive scores of the previous cycle, or of the last K rounds.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self, OneVsRestLoss)

    def without_server_settings(self) -> OneVsRestPairwise:
        """Only the server tells a cycle from a window."""
        return replace(self, pool="cycle")

    def init(self, setting: Setting, model: Model) -> Server:
        """The pools are empty; the scoring rounds fill them."""
        classes = len(list_counts(setting.census))
        pools = tuple(model.weights.new_zeros(0, classes) for _ in range(classes))
        return Server(shared=model, anchor=model, private=ClassPools(pools, ()))

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model, the shares of the classes, and to each client passive rows drawn for it."""
        if phase.scoring:
            return Download(phase, server.shared)
        assert isinstance(setting.census, ClassCensus)
        passive = draw_passive_scores(setting, server.private.pools, cohort, phase)
        shares = server.shared.weights.new_tensor(setting.census.shares)
        repeated = shares.expand(len(cohort.clients), phase.local_steps, len(shares)).contiguous()
        return Download(phase, server.shared, per_client=ClassDraw(passive, repeated))

    def begin(self, download: Download, client_state: Tree) -> Model:
        """Start from the model that was sent."""
        model: Model = download.shared
        return model

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """w ← w - η · mean_c (G1 + G2); the step also emits the active scores of every class."""
        forward = network.forward_pass(local, batch.inputs)
        rows = self._read_rows(download, forward.outputs)
        emitted = torch.split(rows.scores, list(rows.sizes), dim=-2)
        if download.phase.scoring:
            return local, emitted
        passive, shares = _read_passive(batch.per_client)
        slopes = self.objective.active_slopes(rows, batch.weights, passive, shares)
        gradient = forward.pullback(self.objective.to_output_slopes(rows.scores, slopes))
        weights = sgd_step(local.weights, gradient, download.phase.learning_rate, self.weight_decay)
        return Model(weights, forward.buffers), emitted

    def monitored_loss(self, network: Network, download: Download, local: Model, batch: Batch) -> Tensor:
        """The loss of the pairs of the step."""
        rows = self._read_rows(download, network.forward_pass(local, batch.inputs).outputs)
        return self.objective.monitored_loss(rows, batch.weights, *_read_passive(batch.per_client))

    def finish(self, download: Download, client_state: Tree, local: Model, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload the scores and, unless this is a scoring round, the change; the client keeps nothing."""
        return Upload(mean=() if download.phase.scoring else tree_sub(local, download.shared), pool=emitted), ()

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change; rebuild the pools at the end of the cycle, or in every round from the last K rounds."""
        pools, recent = server.private
        if not is_empty(reduced.pool):
            recent = (*recent, RoundScores(torch.tensor(cohort.clients), reduced.pool))
        if self.pool == "window":
            recent = recent[-setting.cycle_length :]
            pools = rebuild_pool(setting, recent, phase, pools)
        elif phase.ends_cycle:
            pools, recent = rebuild_pool(setting, recent, phase, pools), ()
        return server._replace(shared=apply_mean_change(server.shared, reduced), private=ClassPools(pools, recent))

    def extract_model(self, shared: Tree) -> Model:
        """The shared state is the model."""
        model: Model = shared
        return model

    def _read_rows(self, download: Download, outputs: Tensor) -> ClassRows:
        """The scores of a batch, whose rows are in the order of their classes."""
        sizes = divide_rows(download.phase.batch, outputs.shape[-1])
        return ClassRows(self.objective.to_scores(outputs), sizes)


def _read_passive(draw: ClassDraw) -> tuple[ClassRows, Tensor]:
    """The passive rows that a step was sent, and the shares of the classes."""
    sizes = tuple(scores.shape[-2] for scores in draw.passive)
    return ClassRows(torch.cat(draw.passive, dim=-2), sizes), draw.shares
