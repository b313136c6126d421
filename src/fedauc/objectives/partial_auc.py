"""One-way partial AUC with soft weights: negatives near or above a positive count more, by a KL-regularized maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.compositional import LARGEST_WEIGHT, CompositionalObjective, PairTerms

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.objectives.compositional import PassiveAnchors
    from fedauc.objectives.kinds import Active
    from fedauc.trees import Tree


@dataclass(frozen=True, kw_only=True)
class PartialAUCLoss(CompositionalObjective):
    """F = mean_i λ log mean_j exp(ψ_ij / λ) over positives i and negatives j, with temperature λ > 0.

    It is the largest mean loss over weights p of the negatives, less λ KL(p, uniform): max_p Σ_j p_j ψ_ij - λ KL.
    As λ → ∞ all negatives count the same, which is the pairwise loss; as λ → 0 the highest one alone counts.

    An anchor keeps u_i, the logarithm of its inner mean, so that nothing overflows. A pair counts
    c = exp(ψ_ij / λ - u_i) times, with mean 1 over the negatives.

    >>> losses = PairTerms(torch.zeros(1, 0), torch.tensor([[0.0, 1.0]]))
    >>> PartialAUCLoss(temperature=1.0).estimate_inner(losses).exp()  # (1 + e) / 2
    tensor([[1.8591]])

    Reference: Zhu et al., When AUC meets DRO: optimizing partial AUC for deep learning with non-convex convergence
    guarantee, ICML 2022 (SOPA-s).
    """

    name: ClassVar[str] = "partial-auc"
    temperature: float = option(
        0.1, "The smaller, the more the highest-scored negatives count; large is the pairwise loss.", above=0
    )

    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """u = log mean_j exp(ψ_ij / λ)."""
        return log_mean_exp(losses.negatives / self.temperature)[..., None]

    def update_inner(self, old: Tensor, fresh: Tensor, rate: float) -> Tensor:
        """log((1 - γ) e^old + γ e^fresh): the moving average of the inner mean, not of its logarithm."""
        return average_exponents(old, fresh, rate)

    def refresh_rate(self, rate: float, active: Active, passive: PassiveAnchors) -> float:
        """The whole rate: no pair of G2 counts more than B₂/γ times then, otherwise it could be I + 1 times as many."""
        return rate

    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """exp(ψ_ij / λ - u_i)."""
        exponents = losses.negatives / self.temperature - estimates
        return PairTerms(losses.positives, bounded_exp(exponents))

    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """λ u_i."""
        return self.temperature * estimates[..., 0].clamp_min(0)


def log_mean_exp(values: Tensor) -> Tensor:
    """The logarithm of the mean of exponentials over the last dimension."""
    # Counted as a tensor: a length in a number would make compiled code hold for this length alone.
    count = torch.ones_like(values, dtype=torch.float64).sum(-1)
    return torch.logsumexp(values, -1) - count.log().to(values.dtype)


def average_exponents(old: Tensor, fresh: Tensor, rate: float) -> Tensor:
    """log((1 - γ) e^old + γ e^fresh), for numbers whose exponentials may overflow."""
    return fresh if rate == 1 else torch.logaddexp(old + math.log1p(-rate), fresh + math.log(rate))


def bounded_exp(exponents: Tensor) -> Tensor:
    """e^x, and at most `LARGEST_WEIGHT`."""
    return exponents.clamp_max(math.log(LARGEST_WEIGHT)).exp()
