"""The squared AUC loss as a saddle problem: it is a sum over examples, at the price of three extra variables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import BatchKind, Objective, Score

if TYPE_CHECKING:
    from torch import Tensor


class Duals(NamedTuple):
    """The auxiliary variables, each `[...]`: at the saddle a = E₊h, b = E₋h, alpha = b - a."""

    a: Tensor
    b: Tensor
    alpha: Tensor


class _ClassWeights(NamedTuple):
    """The weight of each example as a positive and as a negative, `[..., B]`."""

    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True, kw_only=True)
class Minimax(Objective):
    """The square AUC loss as a saddle: min over (w, a, b), max over α, of f with margin m > 0.

    With scores h and batch weights ω,

        f = Σᵢ ωᵢ [ yᵢ c₊ ((hᵢ - a)² - 2(m + α)hᵢ) + (1 - yᵢ) c₋ ((hᵢ - b)² + 2(m + α)hᵢ) ] - c₀α²

    Without `prior`, c₊ = c₋ = c₀ = 1 on a `classes` batch: the normalised form, whose learning rate does not depend on
    the imbalance. With `prior` p, (c₊, c₋, c₀) = (1 - p, p, p(1 - p)) on a `rows` batch: the paper's form.
    `prior_from_data` takes p from the training data, once `with_prior` is told how many examples of each class it has.
    At the saddle, f = L - m² (times p(1 - p)) with L = E₊E₋(m - h + h')².

    >>> Minimax().batch_kind, Minimax(prior=0.1).batch_kind
    ('classes', 'rows')

    Reference: Ying et al., Stochastic online AUC maximization, NeurIPS 2016.
    """

    name: ClassVar[str] = "minimax"
    score: Score = option("sigmoid", "How a raw output becomes a score.")
    margin: float = option(1.0, "Gap between the mean scores of the classes that the loss asks for.", above=0)
    prior: float | None = option(None, "Share of positives; gives the paper's form of the loss.", above=0, below=1)
    prior_from_data: bool = option(
        False, "Whether the share of positives is that of the training data, where no prior is given."
    )

    @property
    def batch_kind(self) -> BatchKind:
        """Both classes in fixed numbers, or rows of any label when the prior balances the classes."""
        return "rows" if self._has_prior else "classes"

    def saddle_value(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> Tensor:
        """f, `[...]`. It may be negative, so `monitored_loss` is what the records show."""
        a, b, alpha = (dual[..., None] for dual in duals)
        positives, negatives = self._scale_weights(_class_weights(scores, labels, weights))
        spread = positives * (scores - a).square() + negatives * (scores - b).square()
        linear = 2 * (self.margin + alpha) * (negatives - positives) * scores
        return (spread + linear).sum(-1) - self._dual_curvature * duals.alpha.square()

    def saddle_slopes(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> tuple[Tensor, Duals]:
        """∂f/∂scores `[..., B]`, and ∂f/∂(a, b, α) `[...]` each."""
        a, b, alpha = (dual[..., None] for dual in duals)
        positives, negatives = self._scale_weights(_class_weights(scores, labels, weights))
        positive_residuals, negative_residuals = positives * (scores - a), negatives * (scores - b)
        signed_weights = negatives - positives
        alpha_slope = 2 * ((signed_weights * scores).sum(-1) - self._dual_curvature * duals.alpha)
        dual_slopes = Duals(-2 * positive_residuals.sum(-1), -2 * negative_residuals.sum(-1), alpha_slope)
        return 2 * (positive_residuals + negative_residuals + (self.margin + alpha) * signed_weights), dual_slopes

    def monitored_loss(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> Tensor:
        """The batch's L = (m - E₊h + E₋h)² + Var₊h + Var₋h ≥ 0, `[...]`; an absent class has its dual as mean."""
        positives, negatives = _class_weights(scores, labels, weights)
        positive_mean, positive_variance = _class_moments(scores, positives, duals.a)
        negative_mean, negative_variance = _class_moments(scores, negatives, duals.b)
        return (self.margin - positive_mean + negative_mean).square() + positive_variance + negative_variance

    def _scale_weights(self, weights: _ClassWeights) -> _ClassWeights:
        """c₊ and c₋ times the weights."""
        if not self._has_prior:
            return weights
        return _ClassWeights((1 - self._known_prior) * weights.positives, self._known_prior * weights.negatives)

    @property
    def _dual_curvature(self) -> float:
        return self._known_prior * (1 - self._known_prior) if self._has_prior else 1.0

    def with_prior(self, positives: int, negatives: int) -> Minimax:
        """The objective for training data with so many examples of each class; unchanged if it asks for no prior.

        >>> Minimax(prior_from_data=True).with_prior(1, 9).prior
        0.1
        """
        if self.prior is not None or not self.prior_from_data:
            return self
        if not (positives and negatives):
            raise ValueError(
                f"the training data has {positives} positives and {negatives} negatives; a prior from the data needs "
                "both classes: give prior as a number"
            )
        return replace(self, prior=positives / (positives + negatives))

    @property
    def _has_prior(self) -> bool:
        return self.prior is not None or self.prior_from_data

    @property
    def _known_prior(self) -> float:
        if self.prior is None:
            raise ValueError("prior_from_data is true, but no data has been seen yet; call with_prior, or give prior")
        return self.prior


def _class_weights(scores: Tensor, labels: Tensor, weights: Tensor) -> _ClassWeights:
    positives = labels.to(scores.dtype) * weights
    return _ClassWeights(positives, weights - positives)


def _class_moments(scores: Tensor, weights: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and variance of the scores of one class; (`absent`, 0) when its weights are all zero."""
    total = weights.sum(-1)
    held = total > 0
    normalised = weights / torch.where(held, total, 1)[..., None]
    mean = torch.where(held, (normalised * scores).sum(-1), absent)
    return mean, (normalised * (scores - mean[..., None]).square()).sum(-1)
