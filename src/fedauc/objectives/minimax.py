"""The squared surrogate as a saddle problem: it decomposes over examples, at the price of three duals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedauc.interfaces import BatchKind, Objective, Score
from fedauc.objectives._checks import check_between, check_positive


class Duals(NamedTuple):
    """The auxiliary variables, each `[...]`: at the saddle a = E₊h, b = E₋h, alpha = b - a."""

    a: Tensor
    b: Tensor
    alpha: Tensor


class _ClassWeights(NamedTuple):
    """Each example's weight as a positive and as a negative, `[..., B]`."""

    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True, kw_only=True)
class Minimax(Objective):
    """The square AUC loss as a saddle: min over (w, a, b), max over α, of f with margin m > 0.

    With scores h and batch weights ω,

        f = Σᵢ ωᵢ [ yᵢ c₊ ((hᵢ - a)² - 2(m + α)hᵢ) + (1 - yᵢ) c₋ ((hᵢ - b)² + 2(m + α)hᵢ) ] - c₀α²

    Without `prior`, c₊ = c₋ = c₀ = 1 on a `classes` batch: the normalised form, whose learning rate does not depend on
    the imbalance. With `prior` p, (c₊, c₋, c₀) = (1 - p, p, p(1 - p)) on a `rows` batch: the paper's form.
    At the saddle, f = L - m² (times p(1 - p)) with L = E₊E₋(m - h + h')².

    >>> Minimax().batch_kind, Minimax(prior=0.1).batch_kind
    ('classes', 'rows')

    Reference: Ying et al., Stochastic online AUC maximization, NeurIPS 2016.
    """

    name: ClassVar[str] = "minimax"
    score: Score = "sigmoid"
    margin: float = 1.0
    prior: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("margin", self.margin)
        if self.prior is not None:
            check_between("prior", self.prior, 0, 1)

    @property
    def batch_kind(self) -> BatchKind:
        """So many of each class, or rows as they come when the prior does the balancing."""
        return "classes" if self.prior is None else "rows"

    def saddle_value(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> Tensor:
        """f, `[...]`. It may be negative: watch `monitored` instead."""
        a, b, alpha = (dual[..., None] for dual in duals)
        shares = self._scaled(_class_weights(scores, labels, weights))
        spread = shares.positives * (scores - a).square() + shares.negatives * (scores - b).square()
        tilt = 2 * (self.margin + alpha) * (shares.negatives - shares.positives) * scores
        return (spread + tilt).sum(-1) - self._dual_curvature * duals.alpha.square()

    def saddle_slopes(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> tuple[Tensor, Duals]:
        """∂f/∂scores `[..., B]`, and ∂f/∂(a, b, α) `[...]` each."""
        a, b, alpha = (dual[..., None] for dual in duals)
        shares = self._scaled(_class_weights(scores, labels, weights))
        first, second = shares.positives * (scores - a), shares.negatives * (scores - b)
        tilt = shares.negatives - shares.positives
        rise = (tilt * scores).sum(-1) - self._dual_curvature * duals.alpha
        moves = Duals(a=-2 * first.sum(-1), b=-2 * second.sum(-1), alpha=2 * rise)
        return 2 * (first + second + (self.margin + alpha) * tilt), moves

    def monitored_loss(self, scores: Tensor, labels: Tensor, weights: Tensor, duals: Duals) -> Tensor:
        """The batch's L = (m - E₊h + E₋h)² + Var₊h + Var₋h ≥ 0, `[...]`; an absent class stands at its dual."""
        shares = _class_weights(scores, labels, weights)
        first, spread = _class_moments(scores, shares.positives, duals.a)
        second, other = _class_moments(scores, shares.negatives, duals.b)
        return (self.margin - first + second).square() + spread + other

    def _scaled(self, shares: _ClassWeights) -> _ClassWeights:
        if self.prior is None:
            return shares
        return _ClassWeights((1 - self.prior) * shares.positives, self.prior * shares.negatives)

    @property
    def _dual_curvature(self) -> float:
        return 1.0 if self.prior is None else self.prior * (1 - self.prior)


def _class_weights(scores: Tensor, labels: Tensor, weights: Tensor) -> _ClassWeights:
    positives = labels.to(scores.dtype) * weights
    return _ClassWeights(positives, weights - positives)


def _class_moments(scores: Tensor, shares: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one class's scores; (`absent`, 0) when its shares are all zero."""
    total = shares.sum(-1)
    held = total > 0
    normalised = shares / torch.where(held, total, 1)[..., None]
    mean = torch.where(held, (normalised * scores).sum(-1), absent)
    return mean, (normalised * (scores - mean[..., None]).square()).sum(-1)
