"""A pool that holds the distribution of passive scores, as one histogram per class, instead of the scores themselves.

A score s between two neighbouring bins x_b ≤ s ≤ x_{b+1} is divided between them, (x_{b+1} - s) / w at x_b and the rest
at x_{b+1}, so that the mean of the scores stays what it was. For a smooth loss the mean over the histogram then differs
from the mean over the scores by at most w² max|ψ''| / 8 (linear interpolation), where w is the distance of two bins.
Scores beyond the ends count at the ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fedauc.interfaces import Model, ScoreHistogram
from fedauc.objectives.kinds import Active, PassiveDistribution

if TYPE_CHECKING:
    from torch import Tensor


class HistogramShared(NamedTuple):
    """The model and the pool that clients are sent; an upload holds the model's change and the client's histogram."""

    model: Model
    pool: ScoreHistogram


def initial_histogram(model: Model, bins: int, low: float, high: float, start: float) -> ScoreHistogram:
    """All scores of both classes at `start`, the score of a model whose raw outputs are 0."""
    ends = torch.tensor([low, high], dtype=model.weights.dtype, device=model.weights.device)
    score, weight = torch.full_like(ends[:1], start), torch.ones_like(ends[:1])
    masses = spread_over_bins(score, weight, ends, bins)
    return ScoreHistogram(torch.stack([masses, masses]), ends)


def spread_over_bins(scores: Tensor, weights: Tensor, ends: Tensor, bins: int) -> Tensor:
    """Masses `[..., bins]` of scores `[..., B]` with weights `[..., B]`, between `ends` `[..., 2]`.

    >>> spread_over_bins(torch.tensor([0.25, 9.0]), torch.ones(2), torch.tensor([-1.0, 1.0]), 3)
    tensor([0.0000, 0.7500, 1.2500])
    """
    low, high = ends[..., :1], ends[..., 1:]
    # A score that is no number counts as 0: it must not spoil the masses of all others.
    scores = torch.nan_to_num(scores, nan=0.0)
    position = ((scores - low) / (high - low) * (bins - 1)).clamp(0, bins - 1)
    numbers = torch.arange(bins, dtype=position.dtype, device=position.device)
    # Every score meets every bin: adding at an index is not deterministic on a GPU.
    shares = (1 - (position[..., None] - numbers).abs()).clamp(min=0)
    return (weights[..., None] * shares).sum(-2)


def bin_active_scores(active: Active, pool: ScoreHistogram) -> Tensor:
    """Masses `[..., 2, bins]` of a local step's scores; each class has the weight of its rows in the loss."""
    bins = pool.masses.shape[-1]
    positives = spread_over_bins(active.positives, active.positive_weights, pool.ends, bins)
    return torch.stack(
        [positives, spread_over_bins(active.negatives, active.negative_weights, pool.ends, bins)], dim=-2
    )


def read_distribution(pool: ScoreHistogram) -> PassiveDistribution:
    """The pool as a loss takes it."""
    bins = pool.masses.shape[-1]
    shares = torch.linspace(0, 1, bins, dtype=pool.ends.dtype, device=pool.ends.device)
    scores = pool.ends[..., :1] + (pool.ends[..., 1:] - pool.ends[..., :1]) * shares
    return PassiveDistribution(scores, pool.masses[..., 0, :], pool.masses[..., 1, :])


def normalize_masses(total: Tensor, old: Tensor) -> Tensor:
    """Masses `[2, bins]` that sum to 1 for each class; a class without mass keeps its old ones.

    Noise can make masses negative. Setting those to 0 alone would leave the positive half of the noise, so the masses
    are projected onto the simplex: the nearest distribution to what was released.
    """
    sums = total.sum(-1, keepdim=True)
    shares = total / torch.where(sums > 0, sums, 1)
    if bool((total < 0).any()):
        shares = project_onto_simplex(shares)
    return torch.where(sums > 0, shares, old)


def project_onto_simplex(vectors: Tensor) -> Tensor:
    """The nearest points `[..., n]` with numbers of at least 0 that sum to 1 (Held, Wolfe and Crowder 1974).

    >>> project_onto_simplex(torch.tensor([0.9, 0.4, -0.3]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    ordered = vectors.sort(dim=-1, descending=True).values
    counts = torch.arange(1, vectors.shape[-1] + 1, dtype=vectors.dtype, device=vectors.device)
    surplus = (ordered.cumsum(-1) - 1) / counts
    # The largest number of entries for which the entries stay positive after the surplus is taken off each.
    support = (ordered > surplus).sum(-1, keepdim=True).clamp(min=1)
    return (vectors - surplus.gather(-1, support - 1)).clamp(min=0)
