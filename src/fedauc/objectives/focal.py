"""The focal loss of one example: a logistic loss that counts easy examples less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.objectives.kinds import PointObjective, check_raw_outputs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Focal(PointObjective):
    """-(1 - p)^γ log p, where p = 1 / (1 + e^{-dz}) is the probability of the right class; γ = 0 is the logistic loss.

    d is 1 for a positive and -1 for a negative, and z is the raw score.

    >>> Focal(gamma=2.0).example_loss(torch.tensor([0.0, 1e4, 1e4]), torch.tensor([1, 1, 0]))
    tensor([1.7329e-01, 0.0000e+00, 1.0000e+04])

    Reference: Lin et al., Focal loss for dense object detection, ICCV 2017, without its weights of classes.
    """

    name: ClassVar[str] = "focal"
    gamma: float = option(2.0, "How much less easy examples count; 0 is the logistic loss.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw_outputs(self)

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """With s = dz: 1 - p = e^{-log(1 + e^s)} and -log p = log(1 + e^{-s})."""
        signed = (2 * labels.to(scores.dtype) - 1) * scores
        return torch.exp(-self.gamma * _softplus(signed)) * _softplus(-signed)

    def example_slope(self, scores: Tensor, labels: Tensor) -> Tensor:
        """-d (1 - p)^γ (1 - p - γ p log p)."""
        signs = 2 * labels.to(scores.dtype) - 1
        signed = signs * scores
        easy = torch.sigmoid(signed) * _softplus(-signed)
        return -signs * torch.exp(-self.gamma * _softplus(signed)) * (torch.sigmoid(-signed) + self.gamma * easy)


def _softplus(values: Tensor) -> Tensor:
    """log(1 + e^x), safe for any x."""
    return torch.logaddexp(values, values.new_zeros(()))
