"""CyCp-Pairwise (Algorithms 3 and 4): the active-passive form of any pairwise AUC loss.

    first: one cycle of scoring visits fills the pool, without learning
    for each cycle e, for each group: send w, and to each client a draw R₁, R₂ from the pool of cycle e-1;
    each client repeats I times: active scores h of B₁ positives and B₂ negatives, passive h' from R;
        G1 = mean over active positives × passive negatives of ψ'(h - h') ∇h
        G2 = mean over passive positives × active negatives of -ψ'(h - h') ∇h'
        w ← w - η (G1 + G2), and the active scores join the pool of cycle e
    server: the mean of w.

The paper's Eq. (G2) prints ∇₁ψ where ∇₂ψ is meant. Under uniform participation this is RS-Pairwise, whose pool is the
last K rounds; with all clients in every round it is FedXL1 (Guo et al., FeDXL: provable federated learning for deep
X-risk optimization, ICML 2023), whose pool is the last round.

With `pool="histogram"` clients send a histogram of their scores per class instead of the scores, and are sent the
histogram of the last cycle: G1 and G2 take the exact mean over it. There are no scoring visits: the first cycle pairs
with the score of a raw output of 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.algorithms._histogram_pool import (
    HistogramShared,
    bin_active_scores,
    initial_histogram,
    normalize_masses,
    read_distribution,
)
from fedauc.algorithms._local import Method, apply_mean_change, check_objective, sgd_step
from fedauc.algorithms._pool import RoundScores, draw_passive_scores, rebuild_pool
from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.kinds import GapObjective, PairObjective, Passive, split_by_class
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.trees import Tree, is_empty, tree_add, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


class PoolState(NamedTuple):
    """The pool that passive scores are drawn from, and the scores that were uploaded since it was rebuilt."""

    pool: Passive
    recent: tuple[RoundScores, ...]


@dataclass(frozen=True, kw_only=True)
class Pairwise(Algorithm):
    """Local SGD on pairs of an active and a passive score; the server averages the models.

    With `pool="cycle"` passive scores are drawn from the whole previous cycle, with "window" from the last K rounds.
    With "histogram" no score travels, only the distribution of the previous cycle's scores.
    """

    name: ClassVar[str] = "pairwise"
    scoring_pass: ClassVar[bool] = True
    objective: PairObjective = PairwiseSigmoid()
    pool: Literal["cycle", "window", "histogram"] = option(
        "cycle", "Passive scores of the previous cycle, of the last K rounds, or histograms instead of scores."
    )
    pool_reach: float | None = option(
        None,
        "How far scores of the pool may lie beyond the clients' usual range, in multiples of that range; others are "
        "moved there. By default scores stay as they are.",
        at_least=0,
    )
    pool_bins: int = option(24, "Bins of a histogram pool, per class.", at_least=2, at_most=65536)
    pool_range: float = option(
        8.0, "Largest score of a histogram pool, and minus its smallest; scores beyond count at the ends.", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_objective(self, PairObjective)
        if self.pool == "histogram" and not isinstance(self.objective, GapObjective):
            raise ValueError(
                f"pool is 'histogram', but the objective {self.objective.name!r} compares embeddings, which have no "
                "histogram; use pool='cycle'"
            )
        if self.pool_reach is not None and (self.pool == "histogram" or self.objective.takes_embeddings):
            reason = "a histogram has its range already" if self.pool == "histogram" else "embeddings have no range"
            raise ValueError(f"pool_reach is {self.pool_reach:g}, but {reason}: leave pool_reach out")
        object.__setattr__(self, "scoring_pass", self.pool != "histogram")
        object.__setattr__(self, "emits_histograms", self.pool == "histogram")

    def without_server_settings(self) -> Pairwise:
        """Only the server tells a cycle from a window."""
        return self if self.pool == "histogram" else replace(self, pool="cycle", pool_reach=None)

    def init(self, setting: Setting, model: Model) -> Server:
        """The pool is empty; the scoring rounds fill it. A histogram pool starts with the score of raw outputs of 0."""
        if self.pool == "histogram":
            is_raw = self.objective.score == "identity"
            low, high, start = (-self.pool_range, self.pool_range, 0.0) if is_raw else (0.0, 1.0, 0.5)
            shared = HistogramShared(model, initial_histogram(model, self.pool_bins, low, high, start))
            return Server(shared=shared, anchor=shared, private=torch.zeros_like(shared.pool.masses))
        no_scores = torch.zeros(0, dtype=model.weights.dtype, device=model.weights.device)
        return Server(shared=model, anchor=model, private=PoolState(Passive(no_scores, no_scores), ()))

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model, and to each client passive scores drawn for it, or the histogram."""
        if self.pool == "histogram":
            return Download(phase, server.shared)
        passive = () if phase.scoring else draw_passive_scores(setting, server.private.pool, cohort, phase)
        return Download(phase, server.shared, per_client=passive)

    def begin(self, download: Download, client_state: Tree) -> Model:
        """Start from the model that was sent."""
        model: Model = download.shared.model if self.pool == "histogram" else download.shared
        return model

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """w ← w - η (G1 + G2); the step also emits the active scores, or their histogram."""
        forward = network.forward_pass(local, batch.inputs)
        scores = self.objective.to_scores(forward.outputs)
        active = split_by_class(scores, batch.weights, download.phase.batch.positives)
        emitted: Tree = Passive(active.positives, active.negatives)
        if self.pool == "histogram":
            emitted = bin_active_scores(active, download.shared.pool)
        if download.phase.scoring:
            return local, emitted
        by_class = self.objective.active_slopes(active, self._passive_scores(download, batch))
        slopes = torch.cat([by_class.positives, by_class.negatives], dim=batch.weights.ndim - 1)
        gradient = forward.pullback(self.objective.to_output_slopes(scores, slopes))
        weights = sgd_step(local.weights, gradient, download.phase.learning_rate, self.weight_decay)
        return Model(weights, forward.buffers), emitted

    def monitored_loss(self, network: Network, download: Download, local: Model, batch: Batch) -> Tensor:
        """The loss of the pairs of the step."""
        scores = self.objective.to_scores(network.forward_pass(local, batch.inputs).outputs)
        active = split_by_class(scores, batch.weights, download.phase.batch.positives)
        return self.objective.monitored_loss(active, self._passive_scores(download, batch))

    def finish(self, download: Download, client_state: Tree, local: Model, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload the scores `[I, B]` and, unless this is a scoring round, the change; the client keeps nothing."""
        if self.pool == "histogram":
            model, pool = download.shared
            histogram = pool._replace(masses=emitted.mean(-3), ends=torch.zeros_like(pool.ends))
            return Upload(mean=HistogramShared(tree_sub(local, model), histogram)), ()
        return Upload(mean=() if download.phase.scoring else tree_sub(local, download.shared), pool=emitted), ()

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change; rebuild the pool at the end of the cycle, or in every round from the last K rounds."""
        if self.pool == "histogram":
            return _merge_histograms(server, reduced, cohort, phase)
        pool, recent = server.private
        if not is_empty(reduced.pool):
            recent = (*recent, RoundScores(torch.tensor(cohort.clients), reduced.pool))
        if self.pool == "window":
            recent = recent[-setting.cycle_length :]
            pool = rebuild_pool(setting, recent, phase, pool, self.pool_reach)
        elif phase.ends_cycle:
            pool, recent = rebuild_pool(setting, recent, phase, pool, self.pool_reach), ()
        return server._replace(shared=apply_mean_change(server.shared, reduced), private=PoolState(pool, recent))

    def extract_model(self, shared: Tree) -> Model:
        """The shared state is the model, with a histogram pool its first part."""
        model: Model = shared.model if self.pool == "histogram" else shared
        return model

    def stage_output(self, last: Tree, mean: Tree) -> Tree:
        """The mean model, with the last pool."""
        return last._replace(model=mean.model) if self.pool == "histogram" else mean

    def _passive_scores(self, download: Download, batch: Batch) -> Tree:
        """What the active scores are compared with: drawn scores, or their distribution."""
        return read_distribution(download.shared.pool) if self.pool == "histogram" else batch.per_client


def _merge_histograms(server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
    """Add the mean change and the clients' histograms; the sum of a cycle becomes the pool of the next one."""
    (model, pool), total = server.shared, server.private
    if not is_empty(reduced.mean):
        model = tree_add(model, reduced.mean.model)
        # A mean times its denominator is the sum, so that every client of the cycle counts the same.
        total = total + cohort.divisor * reduced.mean.pool.masses
    if phase.ends_cycle:
        pool = pool._replace(masses=normalize_masses(total, pool.masses))
        total = torch.zeros_like(total)
    return server._replace(shared=HistogramShared(model, pool), private=total)


METHODS = (
    Method("cycp-pairwise", Pairwise, "cyclic", 0.1, reference="the paper, Algorithms 3-4"),
    Method("rs-pairwise", Pairwise, "uniform", 0.1, (("pool", "window"),), "Guo et al. 2023, random sampling"),
    Method("fedxl1", Pairwise, "full", 0.1, reference="Guo et al. 2023"),
)
