"""The weighted mean of uploads, the only place where it is computed.

    Δ = Σ_m weight_m Δ_m

An engine with a stack of clients calls `combine`. One that visits clients one after another, as sites of a federation
answer, adds each upload to a running sum, so that memory does not grow with the cohort.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedauc.interfaces import Mean
from fedauc.trees import Tree, is_empty, tree_add, tree_map

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RunningMean(Mean):
    """A mean that is made of a running sum, so that no upload need be kept."""

    @abstractmethod
    def add_upload(self, total: Tree, upload: Tree, weight: float) -> Tree:
        """The running sum with one more upload; it starts as `()`."""


@dataclass(frozen=True, kw_only=True)
class WeightedMean(RunningMean):
    """Every client counts with its weight in the cohort."""

    name: ClassVar[str] = "weighted"

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """Σ_m weight_m Δ_m, as one matrix product."""
        return tree_map(lambda leaf: _average_leaf(weights, leaf), uploads)

    def add_upload(self, total: Tree, upload: Tree, weight: float) -> Tree:
        """The running sum with one more upload; it starts as `()`."""
        weighted = tree_map(lambda leaf: weight * leaf, upload)
        return weighted if is_empty(total) else tree_add(total, weighted)


def _average_leaf(weights: Tensor, leaf: Tensor) -> Tensor:
    if not leaf.numel():
        return leaf.new_zeros(leaf.shape[1:])
    return (weights.to(leaf.dtype) @ leaf.reshape(len(leaf), -1)).view(leaf.shape[1:])
