"""NDCG for binary relevance: every positive gains by its rank among all rows, with a smooth count of the rows above."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from fedauc.fields import option
from fedauc.objectives.compositional import ClassCounts, CompositionalObjective, PairTerms, mean_by_class

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.trees import Tree


class _Discount(NamedTuple):
    """What a positive gains at a rank, D, and how fast that falls with the rank, -D'."""

    gain: Tensor
    falls: Tensor


@dataclass(frozen=True, kw_only=True)
class NDCGLoss(CompositionalObjective):
    """F = mean_i (n₊ / Z) (1 - D(r_i)) over positives i, with D(r) = s(r) / log₂(1 + r): n₊ / Z less the smooth NDCG.

    r_i = 1 - ψ(0) + n₊ a_i + n₋ b_i is the rank of positive i among all rows, where a_i is the mean of ψ_is over the
    positives s and b_i that of ψ_ij over the negatives j: ψ(h_i - h_j) stands for 1[h_j ≥ h_i], and positive i, which
    is compared with itself too, counts 1. Z is the sum of 1 / log₂(1 + r) over the best ranks that the positives could
    have. n₊ and n₋ are those of all clients, which the server knows.

    s(r) = 1 with `top=0`. With `top=k` only ranks up to about k count: s(r) = 1 / (1 + (r / (k + 1/2))^q), which is
    1[r ≤ k] for a steep cut q → ∞, and Z is over min(n₊, k) ranks.

    An anchor keeps a_i and b_i. A pair with a negative counts -(n₊ / Z) D'(r_i) n₋ times, and one with a positive
    -(n₊ / Z) D'(r_i) n₊ times. Below `smallest_rank`, or half of `top` if that is smaller, D is continued as a line: at
    the first ranks D' is tens of thousands of times what it is in the middle, and no estimate from some hundreds of
    rows knows a rank so well. Without this, a few positives saturate the scores before the others are learned.

    >>> anchors = torch.tensor([[0.25, 0.0]])  # Two positives, this one above the other: ψ is 1/2 with itself, 0 else.
    >>> summary = NDCGLoss().summarize_pool(anchors, ClassCounts(2, 9))
    >>> NDCGLoss(smallest_rank=1.0).anchor_losses(PairTerms(anchors, anchors), anchors, summary)
    tensor([0.])

    Reference: Qiu et al., Large-scale stochastic optimization of NDCG surrogates for deep learning with provable
    convergence, ICML 2022 (SONG; its K-SONG cuts at the k-th score, which is a second problem, where this one cuts at
    the rank that each positive has an estimate of).
    """

    name: ClassVar[str] = "ndcg"
    estimate_count: ClassVar[int] = 2
    summary_count: ClassVar[int] = 3
    compares_positives: ClassVar[bool] = True
    top: int = option(0, "Number of ranks that count, as in ndcg@k; 0 counts all.", at_least=0)
    smallest_rank: float = option(
        10.0,
        "Below this rank, or half of top if that is smaller, the gain is a line in the rank.",
        at_least=1,
    )
    steepness: float = option(2.0, "How sharply the gain ends after the last rank that counts.", above=0)

    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """(a_i, b_i)."""
        return mean_by_class(losses)

    def summarize_pool(self, estimates: Tensor, counts: ClassCounts) -> Tensor:
        """(n₊, n₋, Z)."""
        ranks = min(counts.positives, self.top) if self.top else counts.positives
        return estimates.new_tensor([counts.positives, counts.negatives, sum_best_gains(max(ranks, 1))])

    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """-(n₊ / Z) D'(r_i) n₊ for pairs with positives, -(n₊ / Z) D'(r_i) n₋ for pairs with negatives."""
        positives, negatives, best = summary[..., None, :].unbind(-1)
        _, falls = self._discount_ranks(self._raise_ranks(self._estimate_ranks(estimates, summary)))
        slopes = (positives / best * falls)[..., None]
        return PairTerms(slopes * positives[..., None], slopes * negatives[..., None])

    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """(n₊ / Z) (1 - D(r_i))."""
        ranks = self._estimate_ranks(estimates, summary)
        raised = self._raise_ranks(ranks)
        discounts, falls = self._discount_ranks(raised)
        weight: Tensor = summary[..., :1] / summary[..., 2:]
        return weight * (1 - discounts - falls * (raised - ranks))

    def _raise_ranks(self, ranks: Tensor) -> Tensor:
        """The ranks, none below the one from which D is a line to rank 1."""
        return ranks.clamp_min(min(self.smallest_rank, max(self.top / 2, 1)) if self.top else self.smallest_rank)

    def _estimate_ranks(self, estimates: Tensor, summary: Tree) -> Tensor:
        """r_i `[..., B]`; no rank is above the first, which estimates from few rows can suggest."""
        with_itself, counts = self.pair_loss(estimates.new_zeros(1)), summary[..., None, :2]
        ranks: Tensor = 1 - with_itself + (estimates * counts).sum(-1)
        return ranks.clamp_min(1)

    def _discount_ranks(self, ranks: Tensor) -> _Discount:
        """D(r) = s(r) / L(r), with L = log₂(1 + r), and -D'(r)."""
        logarithm = torch.log2(1 + ranks)
        share = torch.ones_like(ranks)
        if self.top:
            share = torch.sigmoid(-self.steepness * torch.log(ranks / (self.top + 0.5)))
        # D' = s' / L - s L' / L², with s' = -q s (1 - s) / r and L' = 1 / ((1 + r) ln 2).
        falls = share / ((1 + ranks) * math.log(2) * logarithm.square())
        if self.top:
            falls = falls + self.steepness * share * (1 - share) / (ranks * logarithm)
        return _Discount(share / logarithm, falls)


@lru_cache(maxsize=16)
def sum_best_gains(ranks: int) -> float:
    """Σ 1 / log₂(1 + r) over the ranks from 1 to so many.

    >>> round(sum_best_gains(3), 3)
    2.131
    """
    return float((1 / np.log2(np.arange(2, ranks + 2))).sum())
