"""The kinds of objective: of single examples, of pairs, and of the gap between the scores of a pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import BatchKind, Objective

if TYPE_CHECKING:
    from torch import Tensor

MAX_PAIRS_AT_ONCE = 1 << 18
"""A CPU computes up to this many pairs at once: small problems are limited by the number of operations."""

PAIRS_PER_BLOCK = 1 << 16
"""Larger problems are computed in blocks of about this many pairs, so that temporary results stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class PointObjective(Objective):
    """A loss of single examples, `example_loss(scores, labels)`, as the baselines use it.

    With `draw="classes"` batches are balanced: the loss is the sum of the mean over positives and the mean over
    negatives, however rare the positives are.
    """

    draw: BatchKind = option("rows", "Batches of rows of any label, or of given numbers of positives and negatives.")

    @property
    def batch_kind(self) -> BatchKind:
        """Rows of any label, unless `draw` asks for both classes in fixed numbers."""
        return self.draw

    @abstractmethod
    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, never negative, in the shape of `scores`."""

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The derivative of `example_loss` with respect to `scores`, by autograd unless a subclass overrides it."""
        return _autograd_slope(lambda values: self.example_loss(values, labels), scores)


class Active(NamedTuple):
    """The scores of a local step by class, `[..., B1]` and `[..., B2]`, and their weights.

    Embeddings have one more dimension than scores.
    """

    positives: Tensor
    negatives: Tensor
    positive_weights: Tensor
    negative_weights: Tensor


def split_by_class(scores: Tensor, weights: Tensor, positives: int) -> Active:
    """The scores and weights of a batch whose first rows are the positives."""
    dim = weights.ndim - 1
    positive, negative = torch.split(scores, [positives, scores.shape[dim] - positives], dim=dim)
    return Active(positive, negative, weights[..., :positives], weights[..., positives:])


class Passive(NamedTuple):
    """Scores of other clients from an earlier cycle, `[..., P1]` and `[..., P2]`: constants in every gradient."""

    positives: Tensor
    negatives: Tensor


class PassiveDistribution(NamedTuple):
    """The distribution of passive scores: equally spaced scores `[..., bins]`, and the mass of each class at them."""

    scores: Tensor
    positive_masses: Tensor
    negative_masses: Tensor


class PairObjective(Objective):
    """A loss of pairs of an active and a passive score."""

    @abstractmethod
    def active_slopes(self, active: Active, passive: Passive) -> Active:
        """The derivative with respect to the active scores, in their places; the weights are passed on."""

    @abstractmethod
    def monitored_loss(self, active: Active, passive: Passive) -> Tensor:
        """The loss `[...]`, never negative: half the sum over both sides, because each pair has two sides."""


class GapObjective(PairObjective):
    """A loss of the gap t = h - h' between a positive's and a negative's score, given by `pair_loss`.

    Passive scores are drawn from a pool, or known by their distribution, over which the mean is then exact.
    """

    @abstractmethod
    def pair_loss(self, gap: Tensor) -> Tensor:
        """The surrogate ψ(t), elementwise, never negative."""

    def pair_slope(self, gap: Tensor) -> Tensor:
        """ψ'(t), by autograd unless a subclass overrides it."""
        return _autograd_slope(self.pair_loss, gap)

    def active_slopes(self, active: Active, passive: Passive | PassiveDistribution) -> Active:
        """G1 pairs active positives with passive negatives, G2 passive positives with active negatives (no 1/2)."""
        positive_means, negative_means = _mean_over_pairs(self.pair_slope, active, passive)
        positives, negatives = active.positive_weights * positive_means, -active.negative_weights * negative_means
        return active._replace(positives=positives, negatives=negatives)

    def monitored_loss(self, active: Active, passive: Passive | PassiveDistribution) -> Tensor:
        """Half the weighted mean of ψ over the pairs of G1 and of G2."""
        positive_means, negative_means = _mean_over_pairs(self.pair_loss, active, passive)
        positive_sum = (active.positive_weights * positive_means).sum(-1)
        return (positive_sum + (active.negative_weights * negative_means).sum(-1)) / 2


def _mean_over_pairs(
    function: Callable[[Tensor], Tensor], active: Active, passive: Passive | PassiveDistribution
) -> tuple[Tensor, Tensor]:
    """The mean of a function of each active score's gaps: `[..., B1]` for positives, `[..., B2]` for negatives."""
    if isinstance(passive, PassiveDistribution):
        positives = negatives = passive.scores
    else:
        positives, negatives = passive

    def positive_means(scores: Tensor) -> Tensor:
        values = function(scores[..., :, None] - negatives[..., None, :])
        return _mean_partners(values, passive, "negative")

    def negative_means(scores: Tensor) -> Tensor:
        values = function(positives[..., None, :] - scores[..., :, None])
        return _mean_partners(values, passive, "positive")

    return (
        apply_in_blocks(positive_means, active.positives, -1, negatives.shape[-1]),
        apply_in_blocks(negative_means, active.negatives, -1, positives.shape[-1]),
    )


def _mean_partners(
    values: Tensor, passive: Passive | PassiveDistribution, side: Literal["positive", "negative"]
) -> Tensor:
    """The mean of `[..., B, P]` over the passive scores of a class; by their masses where these are given."""
    if isinstance(passive, Passive):
        return mean_last(values)
    masses = passive.positive_masses if side == "positive" else passive.negative_masses
    return (values * masses[..., None, :]).sum(-1)


def apply_in_blocks(function: Callable[[Tensor], Tensor], active: Tensor, rows: int, partners: int) -> Tensor:
    """`function(active)`, computed for blocks of rows where all pairs at once would take much memory.

    `rows` is the dimension of `active`, counted from its end, that `function` keeps and treats entry by entry; each
    number of `active` is paired with `partners` others. Blocks are used on the CPU only: a compiler fuses the pairs
    away, and a GPU is faster with all of them at once.
    """
    pairs, dim = active.numel() * partners, active.ndim + rows
    if pairs <= MAX_PAIRS_AT_ONCE or not active.is_cpu or torch.compiler.is_compiling():
        return function(active)
    blocks = torch.split(active, max(1, PAIRS_PER_BLOCK * active.shape[dim] // pairs), dim=dim)
    return torch.cat([function(block) for block in blocks], dim=dim)


def mean_last(values: Tensor) -> Tensor:
    """The mean over the last dimension; zero when it is empty (a pool without a class contributes nothing)."""
    return values.sum(-1) / max(values.shape[-1], 1)


def check_raw_outputs(objective: Objective) -> None:
    """Refuse a sigmoid score where the objective is defined on raw outputs only."""
    if objective.score != "identity":
        reason = f"the {objective.name} objective needs raw outputs: use score='identity'"
        raise ValueError(f"score is {objective.score!r}; {reason}")


def _autograd_slope(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """The derivative of an elementwise function, in a form that torch.func and torch.compile can trace."""
    slope: Tensor = torch.func.grad(lambda x: function(x).sum())(values)
    return slope
