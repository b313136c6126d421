"""What compressing transforms share: they encode vectors one by one, and may keep the error for the next upload."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.interfaces import Upload, UploadTransform
from fedauc.random_tensors import fold_in
from fedauc.trees import Tree, is_empty, tree_add, tree_map, tree_sub

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EncodingTransform(UploadTransform):
    """Encodes every tensor of the change as a vector; `client` keeps the sum of the errors, if asked to."""

    encodes: ClassVar[bool] = True
    error_feedback: bool = option(True, "Whether clients add what encoding lost to their next upload.")

    @abstractmethod
    def encode_vector(self, vector: Tensor, key: Tensor) -> Tree:
        """What is sent instead of vectors `[..., n]`."""

    @abstractmethod
    def decode_vector(self, encoded: Tree, count: int) -> Tensor:
        """The vectors `[..., count]` that the server reads."""

    def initial_state(self, shared: Tree) -> Tree:
        """No error yet."""
        return tree_map(torch.zeros_like, shared) if self.error_feedback else ()

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """Encode the change plus the error of earlier uploads."""
        if is_empty(upload.mean):
            return upload, state
        target, leading, numbers = upload.mean, key.ndim, itertools.count()
        if self.error_feedback:
            target = tree_add(target, state)

        def encode_leaf(leaf: Tensor) -> Tree:
            vector, leaf_key = leaf.reshape(*leaf.shape[:leading], -1), fold_in(key, next(numbers))
            # For a single number, such as a dual variable, there is nothing to gain.
            return leaf if vector.shape[-1] <= 1 else self.encode_vector(vector, leaf_key)

        encoded = tree_map(encode_leaf, target)
        if self.error_feedback:
            state = tree_sub(
                target, tree_map(lambda leaf, code: self._decode_leaf(code, leaf[(0,) * leading]), target, encoded)
            )
        return upload._replace(mean=encoded), state

    def decode(self, upload: Upload, shared: Tree) -> Upload:
        """The change as the server reads it."""
        if is_empty(upload.mean):
            return upload
        return upload._replace(
            mean=tree_map(lambda leaf, encoded: self._decode_leaf(encoded, leaf), shared, upload.mean)
        )

    def _decode_leaf(self, encoded: Tree, like: Tensor) -> Tensor:
        """A tensor of the type and shape of `like`, with the leading dimensions of what was sent."""
        if isinstance(encoded, torch.Tensor):
            return encoded
        vector = self.decode_vector(encoded, like.numel())
        return vector.to(like.dtype).reshape(*vector.shape[:-1], *like.shape)
