"""One-way partial AUC with hard weights: the share of negatives with the largest losses counts, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.compositional import CompositionalObjective, PairTerms
from fedauc.objectives.kinds import mean_last

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.trees import Tree


@dataclass(frozen=True, kw_only=True)
class PartialAUCTopLoss(CompositionalObjective):
    """F = mean_i min_s s + mean_j (ψ_ij - s)₊ / β: the mean loss over the share β of negatives with the largest ones.

    That is the conditional value at risk. As ψ falls with the gap, these are the highest-scored negatives: those that
    a false positive rate of at most β is about. β = 1 is the pairwise loss.

    An anchor keeps its threshold s_i: the ⌈βn⌉-th largest loss of n passive negatives, averaged over steps. (The
    reference takes subgradient steps on s_i instead, which have a step size of their own.) A client is sent n = I B₂
    of them for a visit; with fewer than 1/β, the threshold is near that of β = 1/n. A pair counts 1/β times if
    ψ_ij ≥ s_i, else not at all.

    >>> losses = PairTerms(torch.zeros(1, 0), torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    >>> PartialAUCTopLoss(max_fpr=0.5).estimate_inner(losses)
    tensor([[0.3000]])

    Reference: Zhu et al., When AUC meets DRO, ICML 2022 (SOPA).
    """

    name: ClassVar[str] = "partial-auc-cvar"
    max_fpr: float = option(
        0.05, "Largest false positive rate that counts: the share of negatives.", above=0, at_most=1
    )

    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """The k-th largest loss, k = ⌈βn⌉; a constant in every gradient, because F is minimal in it."""
        ranked = torch.sort(losses.negatives.detach(), dim=-1, descending=True).values
        # Counted as a tensor: a length in a number would make compiled code hold for this length alone.
        count = torch.ones_like(ranked, dtype=torch.float64).sum(-1, keepdim=True)
        # β times n may exceed a whole number by rounding alone.
        position = (self.max_fpr * count - 1e-9).ceil().clamp_min(1).long() - 1
        return ranked.gather(-1, position)

    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """1/β where ψ_ij ≥ s_i."""
        return PairTerms(losses.positives, (losses.negatives >= estimates).to(estimates.dtype) / self.max_fpr)

    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """s_i + mean_j (ψ_ij - s_i)₊ / β."""
        return estimates[..., 0] + mean_last((losses.negatives - estimates).clamp_min(0)) / self.max_fpr
