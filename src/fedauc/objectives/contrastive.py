"""The contrastive loss on embeddings: metric learning by the same active-passive algorithm, vectors for scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedauc.objectives._checks import check_positive, check_raw
from fedauc.objectives.kinds import Active, PairObjective, Passive, apply_in_blocks, mean_last


@dataclass(frozen=True, kw_only=True)
class Contrastive(PairObjective):
    """½‖u - v‖² for a pair of one label, ½(m - ‖u - v‖)₊² for a pair of two labels, with margin m > 0.

    Active embeddings are `[..., B, E]`, passive ones `[..., P, E]`. When the passive embeddings are the active ones,
    the value is L = ½E₊E₊'[same] + ½E₋E₋'[same] + E₊E₋[different], and the derivative is that of L.
    At distance zero, where the second term has no derivative, it contributes zero.

    >>> one, two = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> share = torch.ones(1)
    >>> Contrastive(margin=7.0).monitored_loss(Active(one, two, share, share), Passive(one, two))
    tensor(2.)

    Reference: Hadsell et al., Dimensionality reduction by learning an invariant mapping, CVPR 2006.
    """

    name: ClassVar[str] = "contrastive"
    takes_embeddings: ClassVar[bool] = True
    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw(self.name, self.score)
        check_positive("margin", self.margin)

    def active_slopes(self, active: Active, passive: Passive) -> Active:
        """Each active embedding meets the passive ones of its own label and of the other (no 1/2 in the derivative)."""
        pull = _apply_to_pairs(self._mean_slope, active.positives, passive.positives, passive.negatives)
        push = _apply_to_pairs(self._mean_slope, active.negatives, passive.negatives, passive.positives)
        return active._replace(
            positives=active.positive_weights[..., None] * pull,
            negatives=active.negative_weights[..., None] * push,
        )

    def monitored_loss(self, active: Active, passive: Passive) -> Tensor:
        """The weighted mean loss of the pairs, halved."""
        first = _apply_to_pairs(self._mean_loss, active.positives, passive.positives, passive.negatives)
        second = _apply_to_pairs(self._mean_loss, active.negatives, passive.negatives, passive.positives)
        return ((active.positive_weights * first).sum(-1) + (active.negative_weights * second).sum(-1)) / 2

    def _mean_loss(self, near: Tensor, far: Tensor) -> Tensor:
        """Each own embedding's mean loss `[..., B]`."""
        lack = (self.margin - torch.linalg.vector_norm(far, dim=-1)).clamp_min(0)
        return mean_last(near.square().sum(-1)) / 2 + mean_last(lack.square()) / 2

    def _mean_slope(self, near: Tensor, far: Tensor) -> Tensor:
        """Its derivative with respect to the own embedding `[..., B, E]`."""
        distance = torch.linalg.vector_norm(far, dim=-1)
        lack = (self.margin - distance).clamp_min(0)
        direction = far / torch.where(distance > 0, distance, 1)[..., None]
        return _mean_pairs(near) - _mean_pairs(lack[..., None] * direction)


def _apply_to_pairs(function: Callable[[Tensor, Tensor], Tensor], own: Tensor, alike: Tensor, other: Tensor) -> Tensor:
    """A function of each own embedding's differences to the passive ones of its own label and of the other."""
    partners = alike.shape[own.ndim - 2] + other.shape[own.ndim - 2]
    return apply_in_blocks(
        lambda part: function(_pair_differences(part, alike), _pair_differences(part, other)), own, -2, partners
    )


def _pair_differences(own: Tensor, passive: Tensor) -> Tensor:
    """u - v for every pair, `[..., B, P, E]`."""
    if passive.numel() == 0:
        # An empty pool does not know the embedding's width.
        passive = own[..., :0, :]
    return own[..., :, None, :] - passive[..., None, :, :]


def _mean_pairs(vectors: Tensor) -> Tensor:
    """The mean over the passive side of `[..., B, P, E]`."""
    return mean_last(vectors.transpose(-1, -2))
