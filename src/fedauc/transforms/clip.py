"""Norm clipping: no client moves the mean by more than a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.interfaces import Upload, UploadTransform
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Clip(UploadTransform):
    """Scales an upload down to a largest norm: model, dual variables and control variates together.

    u ← u · min(1, C / ‖u‖₂). The pool of scores is not clipped.
    """

    name: ClassVar[str] = "clip"
    norm: float = option(1.0, "Largest Euclidean norm of a client's upload; larger ones are scaled down.", above=0)

    def client(self, upload: Upload, state: Tree, key: Tensor) -> tuple[Upload, Tree]:
        """Scale the upload down to the bound."""
        if is_empty(upload.mean):
            return upload, state
        squares = [_sum_squares(leaf, key.ndim) for leaf in tree_leaves(upload.mean)]
        norm = torch.sqrt(torch.stack(squares).sum(0))
        factor = torch.clamp(self.norm / norm.clamp(min=torch.finfo(norm.dtype).tiny), max=1.0)

        def scale_leaf(leaf: Tensor) -> Tensor:
            return leaf * factor.to(leaf.dtype).reshape(factor.shape + (1,) * (leaf.ndim - key.ndim))

        return upload._replace(mean=tree_map(scale_leaf, upload.mean)), state


def _sum_squares(leaf: Tensor, leading: int) -> Tensor:
    # In float64: the squares of a small model's change may underflow in float16.
    return leaf.double().reshape(*leaf.shape[:leading], -1).square().sum(-1)
