"""The contrastive loss on embeddings: metric learning by the pairwise algorithm, with vectors in place of scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.kinds import Active, PairObjective, Passive, apply_in_blocks, check_raw_outputs, mean_last

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Contrastive(PairObjective):
    """½‖u - v‖² for a pair with equal labels, ½(m - ‖u - v‖)₊² for a pair with different labels, with margin m > 0.

    Active embeddings are `[..., B, E]`, passive embeddings `[..., P, E]`. When the passive embeddings equal the active
    ones, the loss is L = ½E₊E₊'[same] + ½E₋E₋'[same] + E₊E₋[different], and the derivative is that of L.
    At distance zero the second term has no derivative; its slope there is set to zero.

    >>> positive, negative = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> weight = torch.ones(1)
    >>> Contrastive(margin=7.0).monitored_loss(Active(positive, negative, weight, weight), Passive(positive, negative))
    tensor(2.)

    Reference: Hadsell et al., Dimensionality reduction by learning an invariant mapping, CVPR 2006.
    """

    name: ClassVar[str] = "contrastive"
    takes_embeddings: ClassVar[bool] = True
    margin: float = option(1.0, "Distance beyond which embeddings of different labels have no loss.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw_outputs(self)

    def active_slopes(self, active: Active, passive: Passive) -> Active:
        """Each active embedding is paired with the passive embeddings of both labels (no 1/2 in the derivative)."""
        positive_slopes = _apply_to_pairs(self._mean_slope, active.positives, passive.positives, passive.negatives)
        negative_slopes = _apply_to_pairs(self._mean_slope, active.negatives, passive.negatives, passive.positives)
        return active._replace(
            positives=active.positive_weights[..., None] * positive_slopes,
            negatives=active.negative_weights[..., None] * negative_slopes,
        )

    def monitored_loss(self, active: Active, passive: Passive) -> Tensor:
        """Half the weighted mean loss of the pairs."""
        positive_losses = _apply_to_pairs(self._mean_loss, active.positives, passive.positives, passive.negatives)
        negative_losses = _apply_to_pairs(self._mean_loss, active.negatives, passive.negatives, passive.positives)
        positive_sum = (active.positive_weights * positive_losses).sum(-1)
        return (positive_sum + (active.negative_weights * negative_losses).sum(-1)) / 2

    def _mean_loss(self, same: Tensor, different: Tensor) -> Tensor:
        """The mean loss of each active embedding `[..., B]`, given its differences to both kinds of partners."""
        shortfall = (self.margin - torch.linalg.vector_norm(different, dim=-1)).clamp_min(0)
        return mean_last(same.square().sum(-1)) / 2 + mean_last(shortfall.square()) / 2

    def _mean_slope(self, same: Tensor, different: Tensor) -> Tensor:
        """The derivative of the mean loss with respect to the active embedding `[..., B, E]`."""
        distance = torch.linalg.vector_norm(different, dim=-1)
        shortfall = (self.margin - distance).clamp_min(0)
        direction = different / torch.where(distance > 0, distance, 1)[..., None]
        return _mean_pairs(same) - _mean_pairs(shortfall[..., None] * direction)


def _apply_to_pairs(
    function: Callable[[Tensor, Tensor], Tensor], active: Tensor, same_label: Tensor, other_label: Tensor
) -> Tensor:
    """Apply a function to the differences of active embeddings to passive ones of the same and of the other label."""
    partners = same_label.shape[active.ndim - 2] + other_label.shape[active.ndim - 2]

    def apply_to_block(block: Tensor) -> Tensor:
        return function(_pair_differences(block, same_label), _pair_differences(block, other_label))

    return apply_in_blocks(apply_to_block, active, -2, partners)


def _pair_differences(active: Tensor, passive: Tensor) -> Tensor:
    """u - v for every pair, `[..., B, P, E]`."""
    if passive.numel() == 0:
        # An empty pool does not know the width of the embeddings.
        passive = active[..., :0, :]
    return active[..., :, None, :] - passive[..., None, :, :]


def _mean_pairs(vectors: Tensor) -> Tensor:
    """The mean of `[..., B, P, E]` over the passive embeddings."""
    return mean_last(vectors.transpose(-1, -2))
