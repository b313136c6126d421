"""Average precision: the precision at each positive, with smooth counts of the rows that are ranked above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.objectives.compositional import ClassCounts, CompositionalObjective, PairTerms, mean_by_class

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.trees import Tree

SMALLEST_COUNT = 1e-6
"""Keeps the precision of a positive defined where no row is counted above it."""


@dataclass(frozen=True, kw_only=True)
class AveragePrecisionLoss(CompositionalObjective):
    """F = mean_i ρ b_i / (a_i + ρ b_i): one less the precision at positive i, averaged over positives.

    a_i is the mean of ψ_is over positives s, and b_i that of ψ_ij over negatives j. As ψ(h_i - h_s) stands for
    1[h_s ≥ h_i], a_i n₊ and b_i n₋ count the positives and the negatives above i. ρ = n₋/n₊ is the number of negatives
    per positive of all clients, which the server knows: average precision depends on it, unlike AUC.

    An anchor keeps both means. With D = a_i + ρ b_i a pair with a negative counts ∂F_i/∂b = ρ a_i / D² times, and one
    with a positive ∂F_i/∂a = -ρ b_i / D² times: positives above i are welcome.

    >>> import torch
    >>> losses = PairTerms(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    >>> AveragePrecisionLoss().estimate_inner(losses)
    tensor([[1.0000, 0.5000]])

    Reference: Qi et al., Stochastic optimization of areas under precision-recall curves with provable convergence,
    NeurIPS 2021 (SOAP).
    """

    name: ClassVar[str] = "average-precision"
    estimate_count: ClassVar[int] = 2
    summary_count: ClassVar[int] = 1
    compares_positives: ClassVar[bool] = True

    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """(a_i, b_i)."""
        return mean_by_class(losses)

    def summarize_pool(self, estimates: Tensor, counts: ClassCounts) -> Tensor:
        """ρ."""
        return estimates.new_full((1,), counts.negatives / max(counts.positives, 1))

    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """∂F_i/∂a for pairs with positives, ∂F_i/∂b for pairs with negatives."""
        ratio, positives, negatives = summary[..., None, :], estimates[..., :1], estimates[..., 1:]
        scaled = (positives + ratio * negatives).clamp_min(SMALLEST_COUNT)
        # Divided twice, because the square of a small number may be zero.
        return PairTerms(-(ratio * negatives / scaled) / scaled, ratio * (positives / scaled) / scaled)

    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """ρ b_i / (a_i + ρ b_i)."""
        weighted: Tensor = summary * estimates[..., 1]
        return weighted / (estimates[..., 0] + weighted).clamp_min(SMALLEST_COUNT)
