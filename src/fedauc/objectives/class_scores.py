"""The score of a class where a model has an output for each class: its log-odds against all other classes.

An output alone does not rank rows by a class: the softmax of (3, 0) is surer of the first class than that of (4, 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def log_odds_against_rest(outputs: Tensor) -> Tensor:
    """s_c = z_c - log Σ_{y≠c} e^{z_y} of outputs z `[..., C]`: log p_c / (1 - p_c), where p is the softmax of z.

    >>> log_odds_against_rest(torch.tensor([0.0, 1.0]))
    tensor([-1.0000,  1.0000])
    >>> log_odds_against_rest(torch.zeros(3)).exp()  # A third of the probability, against two thirds.
    tensor([0.5000, 0.5000, 0.5000])
    """
    total = torch.logsumexp(outputs, -1, keepdim=True)
    classes = torch.arange(outputs.shape[-1], device=outputs.device)
    is_top = classes == outputs.argmax(-1, keepdim=True)
    rest_of_top = torch.logsumexp(outputs.masked_fill(is_top, -torch.inf), -1, keepdim=True)
    # 1 - p_c is exact only where p_c is at most one half, which all classes but the top one are.
    rest = total + torch.log1p(-(outputs - total).exp().clamp_max(0.5))
    return outputs - torch.where(is_top, rest_of_top, rest)


def slopes_of_outputs(log_odds: Tensor, slopes: Tensor) -> Tensor:
    """Derivatives with respect to the outputs, given those with respect to the log-odds, both `[..., C]`.

    ∂s_c/∂z_y is 1 for y = c, and -p_y / (1 - p_c) for another class.
    """
    own, rest = (torch.nn.functional.logsigmoid(signed) for signed in (log_odds, -log_odds))
    shares = own[..., None, :] - rest[..., :, None]
    others = shares.clamp_max(0).exp() * (1 - torch.eye(log_odds.shape[-1]).to(log_odds))
    return slopes - (slopes[..., :, None] * others).sum(-2)
