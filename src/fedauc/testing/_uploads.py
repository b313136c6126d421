"""Uploads for the suites of transforms and means, and the layout of a tree."""

from __future__ import annotations

import torch

from fedauc.interfaces import Model, Upload
from fedauc.trees import Tree, tree_leaves


def make_upload(client: int) -> Upload:
    """An upload with a model of 40 weights and 2 buffers, a dual variable, and 5 scores, in float64."""
    numbers = torch.randn(48, generator=torch.Generator().manual_seed(client), dtype=torch.float64)
    return Upload(mean=(Model(numbers[:40], numbers[40:42]), numbers[42]), pool=(numbers[43:],))


def list_layouts(tree: Tree) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The type and shape of every tensor of a tree."""
    return [(leaf.dtype, tuple(leaf.shape)) for leaf in tree_leaves(tree)]
