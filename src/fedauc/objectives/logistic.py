"""The logistic loss of one example, which the FedAvg family minimizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.objectives.kinds import PointObjective, check_raw_outputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Logistic(PointObjective):
    """log(1 + e^{-z}) for a positive, log(1 + e^{z}) for a negative, on raw scores z.

    >>> Logistic().example_loss(torch.tensor([0.0, 1e4, 1e4]), torch.tensor([1, 1, 0]))
    tensor([6.9315e-01, 0.0000e+00, 1.0000e+04])
    """

    name: ClassVar[str] = "logistic"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw_outputs(self)

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """log(1 + e^{-dz}), with d = 1 for a positive and -1 for a negative."""
        signs = 2 * labels.to(scores.dtype) - 1
        return torch.logaddexp(-signs * scores, scores.new_zeros(()))

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """1 / (1 + e^{-z}) - y."""
        return torch.sigmoid(scores) - labels.to(scores.dtype)
