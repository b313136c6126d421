"""The kinds of objective: of single rows, of pairs, and of the gap between a pair's scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedauc.interfaces import BatchKind, Objective

WHOLE = 1 << 18
"""How many pairs a CPU works on at once: small problems are bound by the number of operations, not by arithmetic."""

BLOCK = 1 << 16
"""How many pairs are worked on at a time where there are more, so that temporaries stay small and in the cache."""


class PointObjective(Objective):
    """A loss of one example, `value(scores, labels)`: the baselines'."""

    @property
    def batch_kind(self) -> BatchKind:
        """Rows whatever their label."""
        return "rows"

    @abstractmethod
    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, non-negative, the shape of `scores`."""

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The derivative of `value` with respect to `scores`; by autograd unless a subclass knows it."""
        return _autograd_slope(lambda s: self.example_loss(s, labels), scores)


class Active(NamedTuple):
    """A step's own scores by class, `[..., B1]` and `[..., B2]` (embeddings: one dimension more), and their weights."""

    positives: Tensor
    negatives: Tensor
    positive_weights: Tensor
    negative_weights: Tensor


class Passive(NamedTuple):
    """Scores of other clients from an earlier cycle, constants in every gradient: `[..., P1]` and `[..., P2]`."""

    positives: Tensor
    negatives: Tensor


class PairObjective(Objective):
    """A loss that couples active with passive scores."""

    @abstractmethod
    def active_slopes(self, active: Active, passive: Passive) -> Active:
        """The derivative with respect to the active scores, in their places; the weights are passed on."""

    @abstractmethod
    def monitored_loss(self, active: Active, passive: Passive) -> Tensor:
        """The loss `[...]`, non-negative: half the sum of both sides, since each pair is met from two sides."""


class GapObjective(PairObjective):
    """A surrogate of the gap t = h - h' between a positive's and a negative's score: give `value`, perhaps `slope`."""

    @abstractmethod
    def pair_loss(self, gap: Tensor) -> Tensor:
        """The surrogate psi(t), elementwise, non-negative."""

    def pair_slope(self, gap: Tensor) -> Tensor:
        """psi'(t); by autograd unless a subclass knows it."""
        return _autograd_slope(self.pair_loss, gap)

    def active_slopes(self, active: Active, passive: Passive) -> Active:
        """G1 pairs active positives with passive negatives, G2 passive positives with active negatives (no 1/2)."""
        first, second = _mean_over_pairs(self.pair_slope, active, passive)
        return active._replace(
            positives=active.positive_weights * first,
            negatives=-active.negative_weights * second,
        )

    def monitored_loss(self, active: Active, passive: Passive) -> Tensor:
        """The weighted mean of psi over the pairs of G1 and of G2, halved."""
        first, second = _mean_over_pairs(self.pair_loss, active, passive)
        return ((active.positive_weights * first).sum(-1) + (active.negative_weights * second).sum(-1)) / 2


def _mean_over_pairs(function: Callable[[Tensor], Tensor], active: Active, passive: Passive) -> tuple[Tensor, Tensor]:
    """Each active score's mean of a function of its gaps: in G1 `[..., B1]` over P2, in G2 `[..., B2]` over P1."""

    def first(own: Tensor) -> Tensor:
        return mean_last(function(own[..., :, None] - passive.negatives[..., None, :]))

    def second(own: Tensor) -> Tensor:
        return mean_last(function(passive.positives[..., None, :] - own[..., :, None]))

    return (
        apply_in_blocks(first, active.positives, -1, passive.negatives.shape[-1]),
        apply_in_blocks(second, active.negatives, -1, passive.positives.shape[-1]),
    )


def apply_in_blocks(function: Callable[[Tensor], Tensor], own: Tensor, rows: int, partners: int) -> Tensor:
    """`function(own)`, some of the rows at a time where all their pairs at once would take much memory.

    `rows` is the dimension of `own`, counted from its end, that `function` keeps in place and treats entry by entry;
    each number of `own` meets so many partners. A compiler fuses pairs away, and a GPU is faster on all at once.
    """
    pairs, dim = own.numel() * partners, own.ndim + rows
    if pairs <= WHOLE or not own.is_cpu or torch.compiler.is_compiling():
        return function(own)
    parts = torch.split(own, max(1, BLOCK * own.shape[dim] // pairs), dim=dim)
    return torch.cat([function(part) for part in parts], dim=dim)


def mean_last(values: Tensor) -> Tensor:
    """Mean over the last dimension; zero when it is empty (a pool that lacks a class contributes nothing)."""
    return values.sum(-1) / max(values.shape[-1], 1)


def _autograd_slope(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """The derivative of an elementwise function, traceable by torch.func and torch.compile."""
    gradient: Tensor = torch.func.grad(lambda x: function(x).sum())(point)
    return gradient
