"""Partial AUC, average precision and NDCG by cyclic clients: the active-passive form with an estimate per positive.

The objective is F(w) = mean over positives i of f(g_i(w)), where g_i is a mean over the partners j of i of a function
of ψ(h_i - h_j) (`objectives/compositional.py`). Its gradient, with h and ∇h at the same w, is

    ∇F = mean_i mean_j c(ψ_ij, g_i) ψ'(h_i - h_j) (∇h_i - ∇h_j).

Neither all partners nor g_i are at hand in a local step. As in FeDXL2, the sum is split by whose gradient is taken:
the active row is the client's own, and the other end of the pair is passive, from the pool of the previous cycle.
The client that holds positive i keeps a moving average u_i of g_i, which travels with the score of i into the pool:

    first: one cycle of scoring visits fills the pool, without learning; the server adds estimates to its positives
    for each cycle e, for each group: send w, and to each client a draw from the pool of cycle e-1: passive positives
    (h'_i, u'_i) and passive negatives h'_j, I B₁ and I B₂ of them, and what the objective needs of all positives;
    each client: v'_i = (1 - γ) u'_i + γ (the inner mean over passive partners), for every passive positive i
    it repeats I times, with B₁ active positives and B₂ active negatives, and all of its passive ones:
        u_i ← (1 - γ) u_i + γ (the inner mean over passive partners), for every active positive i
        G1 = mean over active positives i and passive partners j of  c(ψ(h_i - h'_j), u_i) ψ'(h_i - h'_j) ∇h_i
        v_i = (1 - ρ) v'_i + ρ (the inner mean over active partners), for every passive positive i
        G2 = mean over passive positives i and active partners j of -c(ψ(h'_i - h_j), v_i) ψ'(h'_i - h_j) ∇h_j
        w ← w - η (G1 + G2); the active scores, and the estimates of the positives, join the pool of cycle e
    server: the mean of w.

G1 needs the estimates of active positives, which are the client's own state; G2 needs those of passive positives, which
only the pool can bring. Active partners refresh them (v_i): otherwise an active negative that is higher than all that i
was compared with counts thousands of times in G2, and training diverges (docs/objectives.md). They count by their share
of all partners, ρ = γ / (I + 1), because B₂ partners alone say little of a mean that is near zero. In the KL forms
ρ = γ, so that no pair of G2 counts more than B₂/γ times in the one-way form.

A step compares with all passive scores of the visit, not with the ones that were drawn for it as CyCp-Pairwise does:
they are at the client anyway, and an inner mean over I times as many partners has a smaller bias after f. It also
compares I times as many pairs of scores, which is little beside the steps of any model but a small one.

With full batches, the whole pool at the same w and γ = 1, all estimates are exact, the pairs of G1 and G2 are all
pairs, and G1 + G2 = ∇F. Where positives are partners too (average precision, NDCG), an active positive gets a part of
G1 as an anchor and a part of G2 as a partner.

Reference of the estimators: Wang and Yang, Finite-sum coupled compositional stochastic optimization, ICML 2022 (SOX);
of the active-passive form: Guo et al., FeDXL, ICML 2023 (FeDXL2, with all clients in every round).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.algorithms._local import Method, apply_mean_change, check_objective, sgd_step
from fedauc.algorithms._pool import RoundScores, draw_passive_scores, rebuild_pool
from fedauc.fields import option
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Model, Network, Phase, Server, Setting, Upload
from fedauc.objectives.average_precision import AveragePrecisionLoss
from fedauc.objectives.compositional import (
    Anchors,
    ClassCounts,
    CompositionalObjective,
    PassiveAnchors,
    pack_anchors,
    unpack_anchors,
)
from fedauc.objectives.kinds import Active, Passive, split_by_class
from fedauc.objectives.ndcg import NDCGLoss
from fedauc.objectives.partial_auc import PartialAUCLoss
from fedauc.objectives.two_way_partial_auc import TwoWayPartialAUCLoss
from fedauc.trees import Tree, is_empty, tree_sub

if TYPE_CHECKING:
    from torch import Tensor

FIRST_PARTNERS = 256
"""The server estimates the inner means of a positive that has none with up to so many scores of each class."""


class AnchorPool(NamedTuple):
    """The pool that passive scores are drawn from, the uploads since it was rebuilt, and what clients are told of it.

    `pool.positives` `[n, E + 2]` holds packed anchors, `pool.negatives` `[n]` scores.
    """

    pool: Passive
    recent: tuple[RoundScores, ...]
    summary: Tensor


class PassiveDraw(NamedTuple):
    """What a client is sent, in parts of one local step: packed anchors, scores of negatives, the summary or `()`."""

    positives: Tensor
    negatives: Tensor
    summary: Tree


class AnchorLocal(NamedTuple):
    """The local model, for each positive its estimates and 1 if they are known `[..., n, E + 1]`, and passive scores.

    `passive` holds those of the whole visit, `PassiveAnchors`, and is `()` in a scoring round.
    """

    model: Model
    estimates: Tensor
    passive: Tree = ()


@dataclass(frozen=True, kw_only=True)
class CompositionalPairwise(Algorithm):
    """Local SGD on pairs of an active and a passive score, weighted by an estimate per positive that clients keep.

    With `pool="cycle"` passive scores are drawn from the whole previous cycle, with "window" from the last K rounds.
    """

    name: ClassVar[str] = "compositional-pairwise"
    scoring_pass: ClassVar[bool] = True
    needs_places: ClassVar[bool] = True
    objective: CompositionalObjective = PartialAUCLoss()
    estimate_rate: float = option(
        0.5, "Weight of the newest batch in the estimate that is kept for each positive.", above=0, at_most=1
    )
    most_positives: int = option(
        4096, "Length of a client's list of estimates: no client may hold more positives.", at_least=1
    )
    pool: Literal["cycle", "window"] = option("cycle", "Passive scores of the previous cycle, or of the last K rounds.")

    def __post_init__(self) -> None:
        if str(self.pool) == "histogram":
            raise ValueError(
                "pool is 'histogram', but a pair counts by the estimate of its positive, which a histogram of scores "
                "does not hold; use pool='cycle', or cycp-pairwise with its histogram pool"
            )
        super().__post_init__()
        check_objective(self, CompositionalObjective)

    def without_server_settings(self) -> CompositionalPairwise:
        """Only the server tells a cycle from a window."""
        return replace(self, pool="cycle")

    def init(self, setting: Setting, model: Model) -> Server:
        """The pool is empty; the scoring rounds fill it."""
        largest = int(setting.census.positives.max())
        if largest > self.most_positives:
            raise ValueError(
                f"most_positives is {self.most_positives}, but a client holds {largest} positives, for each of which "
                f"it keeps an estimate; set most_positives to at least {largest}"
            )
        no_scores = torch.zeros(0, dtype=model.weights.dtype, device=model.weights.device)
        no_anchors = no_scores.new_zeros(0, self.objective.estimate_count + 2)
        summary = self._summarize(setting, no_anchors)
        return Server(shared=model, anchor=model, private=AnchorPool(Passive(no_anchors, no_scores), (), summary))

    def dispatch(self, setting: Setting, server: Server, cohort: Cohort, phase: Phase) -> Download:
        """Send the model, and to each client passive scores drawn for it, with estimates and the summary."""
        if phase.scoring:
            return Download(phase, server.shared)
        pool, _, summary = server.private
        positives, negatives = draw_passive_scores(setting, pool, cohort, phase)
        repeated: Tree = ()
        if self.objective.summary_count:
            repeated = summary.expand(len(cohort.clients), phase.local_steps, len(summary)).contiguous()
        return Download(phase, server.shared, per_client=PassiveDraw(positives, negatives, repeated))

    def initial_client_state(self, download: Download) -> Tensor:
        """No positive has an estimate."""
        weights: Tensor = download.shared.weights
        return weights.new_zeros(*weights.shape[:-1], self.most_positives, self.objective.estimate_count + 1)

    def begin(self, download: Download, client_state: Tensor) -> AnchorLocal:
        """Start from what was sent and from the estimates of the last visit; update those of passive positives."""
        if is_empty(download.per_client):
            return AnchorLocal(download.shared, client_state)
        passive = _join_steps(download.per_client)
        anchors = self.objective.update_anchors(passive.anchors, passive.partners, self.estimate_rate)
        return AnchorLocal(download.shared, client_state, passive._replace(anchors=anchors))

    def step(self, network: Network, download: Download, local: AnchorLocal, batch: Batch) -> tuple[AnchorLocal, Tree]:
        """Update the estimates, then w ← w - η (G1 + G2); emit scores, and the estimates of positives."""
        forward = network.forward_pass(local.model, batch.inputs)
        scores = self.objective.to_scores(forward.outputs)
        count = download.phase.batch.positives
        active = split_by_class(scores, batch.weights, count)
        index = self._find_rows(batch, count)
        anchors = _read_anchors(active, local.estimates, index)
        if download.phase.scoring:
            return local, Passive(pack_anchors(anchors), active.negatives)
        passive: PassiveAnchors = local.passive
        anchors = self.objective.update_anchors(anchors, passive.partners, self.estimate_rate)
        refresh_rate = self.objective.refresh_rate(self.estimate_rate, active, passive)
        by_class = self.objective.active_slopes(active, anchors, passive, refresh_rate)
        slopes = torch.cat([by_class.positives, by_class.negatives], dim=-1)
        gradient = forward.pullback(self.objective.to_output_slopes(scores, slopes))
        weights = sgd_step(local.model.weights, gradient, download.phase.learning_rate, self.weight_decay)
        packed = pack_anchors(anchors)
        estimates = local.estimates.scatter(-2, index, packed[..., 1:])
        new_local = AnchorLocal(Model(weights, forward.buffers), estimates, passive)
        return new_local, Passive(packed, active.negatives)

    def monitored_loss(self, network: Network, download: Download, local: AnchorLocal, batch: Batch) -> Tensor:
        """The loss of the active positives, with the estimates that the step would use."""
        scores = self.objective.to_scores(network.forward_pass(local.model, batch.inputs).outputs)
        count = download.phase.batch.positives
        active = split_by_class(scores, batch.weights, count)
        anchors = _read_anchors(active, local.estimates, self._find_rows(batch, count))
        anchors = self.objective.update_anchors(anchors, local.passive.partners, self.estimate_rate)
        return self.objective.monitored_loss(active, anchors, local.passive)

    def finish(self, download: Download, client_state: Tree, local: AnchorLocal, emitted: Tree) -> tuple[Upload, Tree]:
        """Upload scores and estimates and, unless this is a scoring round, the change; the client keeps estimates."""
        mean = () if download.phase.scoring else tree_sub(local.model, download.shared)
        return Upload(mean=mean, pool=emitted), local.estimates

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """Add the mean change; rebuild the pool at the end of the cycle, or in every round from the last K rounds."""
        pool, recent, summary = server.private
        if not is_empty(reduced.pool):
            recent = (*recent, RoundScores(torch.tensor(cohort.clients), reduced.pool))
        if self.pool == "window":
            recent = recent[-setting.cycle_length :]
        if self.pool == "window" or phase.ends_cycle:
            pool = self._complete_estimates(rebuild_pool(setting, recent, phase, pool))
            summary = self._summarize(setting, pool.positives)
            recent = recent if self.pool == "window" else ()
        return server._replace(
            shared=apply_mean_change(server.shared, reduced), private=AnchorPool(pool, recent, summary)
        )

    def extract_model(self, shared: Tree) -> Model:
        """The shared state is the model."""
        model: Model = shared
        return model

    def _find_rows(self, batch: Batch, count: int) -> Tensor:
        """Where the estimates of the batch's positives are, `[..., B₁, E + 1]`, as `gather` and `scatter` want it."""
        # A client without positives fills their places with negatives, whose numbers may be beyond the list; such rows
        # have weight zero, and what they write is never read.
        rows: Tensor = batch.places[..., :count].clamp_max(self.most_positives - 1)
        return rows[..., None].expand(*rows.shape, self.objective.estimate_count + 1)

    def _complete_estimates(self, pool: Passive) -> Passive:
        """The pool, with estimates for positives that have none: those that no learning visit has seen."""
        anchors = unpack_anchors(pool.positives)
        partners = Passive(_thin_out(anchors.scores), _thin_out(pool.negatives))
        unknown = torch.nonzero(anchors.known == 0)[:, 0]
        if len(unknown) == 0 or self.objective.lacks_partners(partners):
            return pool
        first = self.objective.update_anchors(Anchors(*(part[unknown] for part in anchors)), partners, 1.0)
        return pool._replace(positives=pool.positives.index_copy(0, unknown, pack_anchors(first)))

    def _summarize(self, setting: Setting, positives: Tensor) -> Tensor:
        """What clients must know of all positives, from packed anchors `[n, E + 2]`."""
        anchors = unpack_anchors(positives)
        estimates = anchors.estimates[anchors.known > 0]
        if len(estimates) == 0:
            estimates = positives.new_zeros(1, self.objective.estimate_count)
        counts = ClassCounts(*(int(side.sum()) for side in setting.census))
        return self.objective.summarize_pool(estimates, counts)


def _read_anchors(active: Active, estimates: Tensor, index: Tensor) -> Anchors:
    """The active positives with the estimates that the client has of them."""
    rows = estimates.gather(-2, index)
    return Anchors(active.positives, rows[..., :-1], rows[..., -1])


def _join_steps(draw: PassiveDraw) -> PassiveAnchors:
    """The passive scores of all local steps as one set, of which the summary has one copy."""
    summary = () if is_empty(draw.summary) else draw.summary[..., 0, :]
    return PassiveAnchors(unpack_anchors(draw.positives.flatten(-3, -2)), draw.negatives.flatten(-2), summary)


def _thin_out(scores: Tensor) -> Tensor:
    """Up to `FIRST_PARTNERS` scores, evenly from the whole list, which is in the order of the clients."""
    return scores[:: max(1, -(-len(scores) // FIRST_PARTNERS))]


METHODS = (
    Method(
        "cycp-partial-auc",
        CompositionalPairwise,
        "cyclic",
        0.1,
        reference="Zhu et al. 2022 (SOPA-s), cyclic",
    ),
    Method(
        "cycp-two-way-partial-auc",
        CompositionalPairwise,
        "cyclic",
        0.1,
        (("objective", TwoWayPartialAUCLoss()),),
        "Zhu et al. 2022 (SOTA-s), cyclic",
    ),
    Method(
        "cycp-average-precision",
        CompositionalPairwise,
        "cyclic",
        0.1,
        (("objective", AveragePrecisionLoss()),),
        "Qi et al. 2021 (SOAP), cyclic",
    ),
    Method(
        "cycp-ndcg",
        CompositionalPairwise,
        "cyclic",
        0.1,
        (("objective", NDCGLoss()),),
        "Qiu et al. 2022 (SONG), cyclic",
    ),
)
