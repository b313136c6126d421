"""Two-way partial AUC: the highest negatives and the lowest positives count more, each by a KL-regularized maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.compositional import ClassCounts, CompositionalObjective, PairTerms
from fedauc.objectives.partial_auc import average_exponents, bounded_exp, log_mean_exp

if TYPE_CHECKING:
    from torch import Tensor

    from fedauc.objectives.compositional import PassiveAnchors
    from fedauc.objectives.kinds import Active
    from fedauc.trees import Tree


@dataclass(frozen=True, kw_only=True)
class TwoWayPartialAUCLoss(CompositionalObjective):
    """F = μ log mean_i exp(L_i / μ), where L_i = λ log mean_j exp(ψ_ij / λ): both temperatures λ, μ > 0.

    The inner maximum is that of the one-way partial AUC. The outer one makes positives with a large loss count more:
    those with the lowest scores, which a true positive rate of at least some bound is about. As μ → ∞ it is the one-way
    objective.

    An anchor keeps u_i = log mean_j exp(ψ_ij / λ). The outer mean v = log mean_i exp(λ u_i / μ) is over all positives:
    the server takes it over the pool of a cycle, and sends it in the next one. A pair counts
    c = exp(λ u_i / μ - v) · exp(ψ_ij / λ - u_i) times.

    >>> TwoWayPartialAUCLoss().summarize_pool(torch.zeros(3, 1), ClassCounts(1, 9))
    tensor([0.])

    Reference: Zhu et al., When AUC meets DRO, ICML 2022 (SOTA-s).
    """

    name: ClassVar[str] = "two-way-partial-auc"
    summary_count: ClassVar[int] = 1
    temperature: float = option(0.1, "The smaller, the more the highest-scored negatives count.", above=0)
    positive_temperature: float = option(0.5, "The smaller, the more the lowest-scored positives count.", above=0)

    def estimate_inner(self, losses: PairTerms) -> Tensor:
        """u = log mean_j exp(ψ_ij / λ)."""
        return log_mean_exp(losses.negatives / self.temperature)[..., None]

    def update_inner(self, old: Tensor, fresh: Tensor, rate: float) -> Tensor:
        """log((1 - γ) e^old + γ e^fresh): the moving average of the inner mean, not of its logarithm."""
        return average_exponents(old, fresh, rate)

    def summarize_pool(self, estimates: Tensor, counts: ClassCounts) -> Tensor:
        """v = log mean_i exp(λ u_i / μ)."""
        return log_mean_exp(estimates[:, 0] * self._power)[None]

    def refresh_rate(self, rate: float, active: Active, passive: PassiveAnchors) -> float:
        """The whole rate, as for the one-way form: a single active negative counts less."""
        return rate

    def pair_weights(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> PairTerms:
        """exp(λ u_i / μ - v + ψ_ij / λ - u_i)."""
        anchor_exponents = estimates * self._power - summary[..., None, :]
        exponents = anchor_exponents + losses.negatives / self.temperature - estimates
        return PairTerms(losses.positives, bounded_exp(exponents))

    def anchor_losses(self, losses: PairTerms, estimates: Tensor, summary: Tree) -> Tensor:
        """L_i = λ u_i."""
        return self.temperature * estimates[..., 0].clamp_min(0)

    def combine_losses(self, anchor_losses: Tensor, weights: Tensor) -> Tensor:
        """μ log mean_i exp(L_i / μ), times the sum of the weights."""
        total = weights.sum(-1)
        # The weights of a client without positives are all zero: its loss is zero, not the logarithm of zero.
        shares = torch.where(total[..., None] > 0, weights / total[..., None].clamp_min(1e-30), 1.0)
        scaled = anchor_losses / self.positive_temperature
        outer = torch.logsumexp(scaled + shares.log(), -1)
        return total * self.positive_temperature * outer.clamp_min(0)

    @property
    def _power(self) -> float:
        """λ / μ."""
        return self.temperature / self.positive_temperature
