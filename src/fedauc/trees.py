"""Trees of tensors: what every record that travels is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any
"""A tensor, or a (named) tuple of trees; `()` is the empty tree."""


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to the tensors of one tree, or of several trees of one shape."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    children = [tree_map(function, *branch) for branch in zip(tree, *others, strict=True)]
    return tuple(children) if type(tree) is tuple else type(tree)(*children)


def tree_leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [tree] if isinstance(tree, Tensor) else [leaf for child in tree for leaf in tree_leaves(child)]


def is_empty(tree: Tree) -> bool:
    """Whether a tree is `()`."""
    return isinstance(tree, tuple) and not tree


def tree_add(tree: Tree, other: Tree) -> Tree:
    """The sum, leaf by leaf."""
    return tree_map(torch.add, tree, other)


def tree_sub(tree: Tree, other: Tree) -> Tree:
    """The difference, leaf by leaf."""
    return tree_map(torch.sub, tree, other)


def tree_stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of one shape along a new leading dimension."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def send_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device. From pinned memory, so that the copy waits for its turn there and nobody waits here."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def tree_at(tree: Tree, index: int) -> Tree:
    """The given entry of every leaf's leading dimension."""
    return tree_map(lambda leaf: leaf[index], tree)
