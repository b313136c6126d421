"""The kind of objective that is a mean over positives of a function of inner means, as partial AUC and AP are.

    F(w) = mean over positives i of f(g_i(w)),   g_i(w) = mean over the partners j of i of φ(ψ(h_i - h_j))

A positive i is an *anchor*: its score is compared with those of its partners, which are all negatives and, where the
objective says so, all positives. ψ is a surrogate of the gap. Because f is not linear, a sample of partners gives a
biased gradient; so every anchor keeps an estimate u_i of its inner means from visit to visit, and

    ∇F = mean_i mean_j c(ψ_ij, u_i) ψ'(h_i - h_j) (∇h_i - ∇h_j)

with a weight c of each pair that the objective defines: c = ∂f(g_i)/∂ψ_ij times the number of partners, at g_i = u_i.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import Objective
from fedauc.objectives.kinds import Active, GapObjective, Passive, apply_in_blocks, mean_last
from fedauc.objectives.logistic_pairs import PairwiseLogistic
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.squared_hinge import SquaredHinge

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.trees import Tree

SurrogateName = Literal["sigmoid", "squared-hinge", "pairwise-logistic"]

SURROGATES: dict[SurrogateName, GapObjective] = {
    "sigmoid": PairwiseSigmoid(),
    "squared-hinge": SquaredHinge(),
    "pairwise-logistic": PairwiseLogistic(),
}
"""The surrogates of a gap of 1; `scale` stretches them."""

LARGEST_WEIGHT = 1e4
"""A pair counts at most this often, so that nothing overflows where an estimate is far too small."""


class ClassCounts(NamedTuple):
    """The positives and the negatives of all clients together, which the server knows."""

    positives: int
    negatives: int


class Anchors(NamedTuple):
    """Positives: scores `[..., B]`, estimates `[..., B, E]`, and 1 where there is an estimate, else 0, `[..., B]`."""

    scores: Tensor
    estimates: Tensor
    known: Tensor


class PassiveAnchors(NamedTuple):
    """What active scores are compared with: passive positives with their estimates, passive negatives, and a summary.

    `summary` `[..., C]` holds what the objective needs of all positives, and is `()` where it needs nothing.
    """

    anchors: Anchors
    negatives: Tensor
    summary: Tree = ()

    @property
    def partners(self) -> Passive:
        """The scores of both classes."""
        return Passive(self.anchors.scores, self.negatives)


class PairTerms(NamedTuple):
    """A number for every pair of an anchor: with positives `[..., B, P1]`, and with negatives `[..., B, P2]`."""

    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True, kw_only=True)
class CompositionalObjective(Objective):
    """A mean over anchors of a function of their inner means, given by five small methods."""

    estimate_count: ClassVar[int] = 1
    """Numbers that an anchor keeps from visit to visit, E."""

    summary_count: ClassVar[int] = 0
    """Numbers that the server derives from all positives of a cycle and sends to every client, C."""

    compares_positives: ClassVar[bool] = False
    """Whether the partners of an anchor are the rows of both classes; otherwise they are the negatives."""

    surrogate: SurrogateName = option("sigmoid", "Loss of the gap between the scores of a pair.")
    scale: float = option(1.0, "Gap between scores that the surrogate counts as 1.", above=0)

    @abstractmethod
    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """The estimates `[..., B, E]` of anchors from the losses of their pairs; exact for the pairs of all rows."""

    def update_inner(self, old: Tensor, fresh: Tensor, rate: float) -> Tensor:
        """The new estimates from the old ones and those of the batch: a moving average."""
        return (1 - rate) * old + rate * fresh

    @abstractmethod
    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """The weight c of each pair, or one that fits all pairs of an anchor, `[..., B, 1]`."""

    @abstractmethod
    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """f `[..., B]` of every anchor, never negative."""

    def combine_losses(self, anchor_losses: Tensor, weights: Tensor) -> Tensor:
        """The loss `[...]` of all anchors: the sum of their weighted losses."""
        return (weights * anchor_losses).sum(-1)

    def summarize_pool(self, estimates: Tensor, counts: ClassCounts) -> Tensor:
        """What clients must know of all positives `[C]`: from their estimates `[n, E]`, and the rows of all clients."""
        return estimates.new_zeros(0)

    def pair_loss(self, gap: Tensor) -> Tensor:
        """ψ(t), elementwise."""
        # Half of the calls are for no pairs at all, and small models are limited by the number of operations.
        return SURROGATES[self.surrogate].pair_loss(gap / self.scale) if gap.shape[-1] else gap

    def pair_slope(self, gap: Tensor) -> Tensor:
        """ψ'(t), elementwise."""
        return SURROGATES[self.surrogate].pair_slope(gap / self.scale) / self.scale if gap.shape[-1] else gap

    def lacks_partners(self, partners: Passive) -> bool:
        """Whether a class is missing that anchors are compared with, so that nothing can be estimated."""
        return partners.negatives.shape[-1] == 0 or (self.compares_positives and partners.positives.shape[-1] == 0)

    def update_anchors(self, anchors: Anchors, partners: Passive, rate: float) -> Anchors:
        """Anchors with new estimates: the batch's own where there was none, otherwise an update by `rate`."""
        if self.lacks_partners(partners):
            return anchors

        def update_block(block: Tensor) -> Tensor:
            scores, old, known = unpack_anchors(block)
            fresh = self.estimate_inner(self._compare(scores, partners))
            return torch.where(known[..., None] > 0, self.update_inner(old, fresh, rate), fresh)

        estimates = apply_in_blocks(update_block, pack_anchors(anchors), -2, _count_scores(partners))
        return anchors._replace(estimates=estimates, known=torch.ones_like(anchors.known))

    def refresh_anchors(self, active: Active, passive: PassiveAnchors, rate: float) -> Anchors:
        """The passive anchors, with estimates that are updated by `rate` with the active partners.

        An estimate that has not seen a high negative would make it count thousands of times.
        """
        return self.update_anchors(passive.anchors, _replace_absent(active, passive.partners), rate)

    def refresh_rate(self, rate: float, active: Active, passive: PassiveAnchors) -> float:
        """The rate at which active partners update passive anchors: they count by their share of all partners."""
        rows = active.negatives.shape[-1]
        return rate * rows / (rows + passive.negatives.shape[-1])

    def active_slopes(self, active: Active, anchors: Anchors, passive: PassiveAnchors, rate: float) -> Active:
        """The derivative with respect to active scores, in their places; `anchors` are the active positives.

        G1 takes active anchors and passive partners, G2 passive anchors and active partners.
        """
        partners = passive.partners
        if self.lacks_partners(partners):
            zeros = torch.zeros_like(active.positives), torch.zeros_like(active.negatives)
            return active._replace(positives=zeros[0], negatives=zeros[1])
        seen = self.refresh_anchors(active, passive, rate)

        def anchor_slopes(block: Tensor) -> Tensor:
            scores, estimates, _ = unpack_anchors(block)
            terms = self._pair_derivatives(scores, estimates, partners, passive.summary)
            slopes = mean_last(terms.negatives)
            return slopes + mean_last(terms.positives) if self.compares_positives else slopes

        def partner_slopes(scores: Tensor, is_positive: bool) -> Tensor:
            none = scores[..., :0]
            active_partners = Passive(scores, none) if is_positive else Passive(none, scores)
            terms = self._pair_derivatives(seen.scores, seen.estimates, active_partners, passive.summary)
            # A passive anchor without an estimate takes no part.
            derivatives = passive.anchors.known[..., None] * (terms.positives if is_positive else terms.negatives)
            return -mean_last(derivatives.transpose(-1, -2))

        count = passive.anchors.scores.shape[-1]
        positives = apply_in_blocks(anchor_slopes, pack_anchors(anchors), -2, _count_scores(partners))
        negatives = apply_in_blocks(lambda block: partner_slopes(block, False), active.negatives, -1, count)
        if self.compares_positives:
            as_partners = apply_in_blocks(lambda block: partner_slopes(block, True), active.positives, -1, count)
            positives = positives + as_partners
        return active._replace(
            positives=active.positive_weights * positives, negatives=active.negative_weights * negatives
        )

    def monitored_loss(self, active: Active, anchors: Anchors, passive: PassiveAnchors) -> Tensor:
        """The loss `[...]` of the active positives, given their estimates; 0 where there are no partners."""
        if self.lacks_partners(passive.partners):
            return (0 * active.positives).sum(-1)

        def block_losses(block: Tensor) -> Tensor:
            scores, estimates, _ = unpack_anchors(block)
            return self.anchor_losses(self._compare(scores, passive.partners), estimates, passive.summary)

        count = _count_scores(passive.partners)
        return self.combine_losses(
            apply_in_blocks(block_losses, pack_anchors(anchors), -2, count), active.positive_weights
        )

    def _compare(self, anchors: Tensor, partners: Passive) -> PairTerms:
        """ψ of every pair."""
        return PairTerms(*map(self.pair_loss, self._measure_gaps(anchors, partners)))

    def _pair_derivatives(self, anchors: Tensor, estimates: Tensor, partners: Passive, summary: Tree) -> PairTerms:
        """c(ψ_ij, u_i) ψ'(h_i - h_j) of every pair."""
        gaps = self._measure_gaps(anchors, partners)
        weights = self.pair_weights(PairTerms(*map(self.pair_loss, gaps)), estimates, summary)
        return PairTerms(*(weight * self.pair_slope(gap) for weight, gap in zip(weights, gaps, strict=True)))

    def _measure_gaps(self, anchors: Tensor, partners: Passive) -> PairTerms:
        """h_i - h_j of every pair; there are no pairs with positives where the objective does not compare them."""
        positives = partners.positives if self.compares_positives else partners.positives[..., :0]
        return PairTerms(*(anchors[..., :, None] - side[..., None, :] for side in (positives, partners.negatives)))


def mean_by_class(losses: PairTerms) -> Tensor:
    """The mean over the pairs with positives, and that over the pairs with negatives, `[..., B, 2]`."""
    return torch.stack([mean_last(losses.positives), mean_last(losses.negatives)], dim=-1)


def pack_anchors(anchors: Anchors) -> Tensor:
    """Anchors as one tensor `[..., B, E + 2]`, as they travel: score, estimates, and whether these are known."""
    return torch.cat([anchors.scores[..., None], anchors.estimates, anchors.known[..., None]], dim=-1)


def unpack_anchors(packed: Tensor) -> Anchors:
    """The anchors that `pack_anchors` has packed."""
    return Anchors(packed[..., 0], packed[..., 1:-1], packed[..., -1])


def _replace_absent(active: Active, passive: Passive) -> Passive:
    """The active scores as partners; passive ones for a class that the client does not hold, whose weights are zero."""
    sides = []
    for scores, weights, others in zip(active[:2], active[2:], passive, strict=True):
        repeated = others[..., torch.arange(scores.shape[-1], device=others.device) % max(others.shape[-1], 1)]
        sides.append(torch.where(weights.sum(-1, keepdim=True) > 0, scores, repeated))
    return Passive(*sides)


def _count_scores(partners: Passive) -> int:
    return partners.positives.shape[-1] + partners.negatives.shape[-1]
