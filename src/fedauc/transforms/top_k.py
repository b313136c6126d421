"""Top-k sparsification: only the largest numbers of a change travel, with their positions.

With error feedback a client adds what it left out to its next upload. Stich, Cordonnier and Jaggi, Sparsified SGD with
memory, NeurIPS 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.fields import option
from fedauc.transforms._encoding import EncodingTransform

if TYPE_CHECKING:
    from torch import Tensor


class Sparse(NamedTuple):
    """The positions, int32 `[..., k]`, and values `[..., k]` of the numbers that are sent; all others are 0."""

    positions: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class TopK(EncodingTransform):
    """Sends the largest numbers of the change; single numbers (dual variables) stay as they are."""

    name: ClassVar[str] = "top-k"
    share: float = option(0.05, "Share of the numbers that are sent.", above=0, at_most=1)

    def encode_vector(self, vector: Tensor, key: Tensor) -> Sparse:
        """The largest numbers of vectors `[..., n]`."""
        positions = torch.topk(vector.abs(), math.ceil(self.share * vector.shape[-1]), sorted=False).indices
        return Sparse(positions.to(torch.int32), vector.gather(-1, positions))

    def decode_vector(self, encoded: Sparse, count: int) -> Tensor:
        """Vectors `[..., count]` with the values at their positions."""
        zeros = encoded.values.new_zeros(*encoded.values.shape[:-1], count)
        return zeros.scatter(-1, encoded.positions.long(), encoded.values)
