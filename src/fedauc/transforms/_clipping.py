"""The factor that scales an upload down to a largest norm: min(1, C / ‖u‖₂)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def upload_norm(leaves: Sequence[Tensor], leading: int) -> Tensor:
    """The Euclidean norm of all tensors together, float64, for each entry of so many leading dimensions."""
    # In float64: the squares of a small model's change may underflow in float16.
    squares = [leaf.double().reshape(*leaf.shape[:leading], -1).square().sum(-1) for leaf in leaves]
    return torch.sqrt(torch.stack(squares).sum(0))


def clip_factor(norm: Tensor, limit: float | Tensor) -> Tensor:
    """min(1, limit / norm), and 1 for an upload of zeros."""
    return torch.clamp(limit / norm.clamp(min=torch.finfo(norm.dtype).tiny), max=1.0)


def scale_leaf(leaf: Tensor, factor: Tensor) -> Tensor:
    """A tensor times one factor per entry of its leading dimensions."""
    return leaf * expand_to(factor.to(leaf.dtype), leaf)


def expand_to(values: Tensor, leaf: Tensor) -> Tensor:
    """One value per entry of the leading dimensions, with as many dimensions as a tensor."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))
