"""Vectors in pieces: the arithmetic of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedauc import split_vectors
from fedauc.split_vectors import SplitVector, VectorSplit
from fedauc.trees import tree_map

SPLIT = VectorSplit((3, 40, 2, 25))


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the four parts are large."""
    monkeypatch.setattr(split_vectors, "OWN_PART_FROM", 20)


def vectors() -> tuple[Tensor, Tensor]:
    made = torch.randn(2, 3, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return made[0], made[1]


@pytest.mark.parametrize(
    "act",
    [
        lambda a, b, s, c: a + b - 0.5 * (a - b),
        lambda a, b, s, c: s * (-a) + a * s,
        lambda a, b, s, c: a / 3 - c * b,
        lambda a, b, s, c: 1 - a,
        lambda a, b, s, c: s - b,
        lambda a, b, s, c: c + b,
        lambda a, b, s, c: a - (c[..., 0] if isinstance(a, SplitVector) else c) * b,
    ],
)
def test_arithmetic_in_pieces_is_arithmetic_on_the_whole(act: Any) -> None:
    """`s` is a number on the device, `c` one number per client."""
    (a, b), s = vectors(), torch.tensor(0.3, dtype=torch.float64)
    c = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    joined = SPLIT.join_tree(act(SPLIT.split_vector(a), SPLIT.split_vector(b), s, c))
    torch.testing.assert_close(joined, act(a, b, s, c), rtol=1e-15, atol=1e-15)


def test_large_parts_come_first_and_small_ones_together() -> None:
    a, _ = vectors()
    assert [part.shape[-1] for part in SPLIT.split_vector(a)] == [40, 25, 5]
    assert [part.shape[-1] for part in SPLIT.list_parameters(SPLIT.split_vector(a))] == [3, 40, 2, 25]
    assert [part.shape[-1] for part in VectorSplit((30, 40)).split_vector(a)] == [30, 40]
    assert torch.equal(VectorSplit((30, 40)).join_tree(VectorSplit((30, 40)).split_vector(a)), a)


def test_a_tree_comes_apart_where_its_vectors_are() -> None:
    """Leaves of another length, and of other dimensions, stay; trees keep their types."""
    a, b = vectors()
    tree = ((a, torch.zeros(3)), a[:, :4], b)
    cut = SPLIT.split_tree(tree, 1)
    assert isinstance(cut[0][0], SplitVector)
    assert isinstance(cut[2], SplitVector)
    assert cut[0][1] is tree[0][1]
    assert cut[1] is tree[1]
    doubled = tree_map(lambda leaf: 2 * leaf, cut)
    assert torch.equal(SPLIT.join_tree(doubled)[2], 2 * b)
    assert SPLIT.split_tree(a, 0) is a
    assert VectorSplit().split_tree(a, 1) is a


def test_a_vector_of_another_kind_is_refused() -> None:
    a, b = vectors()
    with pytest.raises(TypeError, match=r"split vectors \(3,\) meet a tensor of shape \(3, 70\); it must be \(3,\)"):
        SPLIT.split_vector(a) + b
