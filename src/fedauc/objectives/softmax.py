"""The cross-entropy of a softmax over classes: what FedAvg minimizes where labels are numbers of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.objectives.class_scores import log_odds_against_rest
from fedauc.objectives.kinds import PointObjective, check_raw_outputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Softmax(PointObjective):
    """log Σ_c e^{z_c} - z_y, on raw scores z `[..., B, C]` of an example of class y.

    Rows are ranked by the log-odds of each class against the rest. With `draw="classes"` a batch has as many rows of
    every class, so that rare classes count as much as frequent ones.

    >>> Softmax().example_loss(torch.zeros(1, 4), torch.tensor([2.0])).exp()
    tensor([4.])
    """

    name: ClassVar[str] = "softmax"
    takes_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw_outputs(self)

    def to_ranking(self, outputs: Tensor) -> Tensor:
        """The log-odds of each class against the rest, which rank rows as its probability does."""
        return log_odds_against_rest(outputs)

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """log Σ_c e^{z_c} - z_y."""
        return torch.logsumexp(scores, -1) - (scores * _one_hot(scores, labels)).sum(-1)

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """softmax(z) - 1[c = y], `[..., B, C]`."""
        return torch.softmax(scores, -1) - _one_hot(scores, labels)


def _one_hot(scores: Tensor, labels: Tensor) -> Tensor:
    """1 in the column of the label, else 0."""
    return (labels[..., None] == torch.arange(scores.shape[-1], device=scores.device)).to(scores.dtype)
