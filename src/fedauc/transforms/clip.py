"""Norm clipping: no client moves the mean by more than a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.fields import option
from fedauc.interfaces import Upload, UploadTransform
from fedauc.transforms._clipping import clip_factor, scale_leaf, upload_norm
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

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """Scale the upload down to the bound."""
        if is_empty(upload.mean):
            return upload, state
        factor = clip_factor(upload_norm(tree_leaves(upload.mean), key.ndim), self.norm)
        return upload._replace(mean=tree_map(lambda leaf: scale_leaf(leaf, factor), upload.mean)), state
