"""Trees of tensors: every record that travels is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Node = TypeVar("Node")

Tree = Any
"""A tensor, or a (named) tuple of trees; `()` is the empty tree."""


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to the tensors of one tree, or of several trees of one shape."""
    if isinstance(tree, torch.Tensor):
        return function(tree, *others)
    children = [tree_map(function, *branch) for branch in zip(tree, *others, strict=True)]
    return tuple(children) if type(tree) is tuple else type(tree)(*children)


def tree_leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for child in tree for leaf in tree_leaves(child)]


def tree_shapes(tree: Tree) -> str:
    """The structure of a tree and the shapes of its tensors as text; what is no tree shows by its type.

    >>> tree_shapes((torch.zeros(3), torch.zeros(2, 1))), tree_shapes(0.5)
    ('([3], [2, 1])', 'float')
    """
    if isinstance(tree, torch.Tensor):
        return str(list(tree.shape))
    if not isinstance(tree, tuple):
        return type(tree).__name__
    name = "" if type(tree) is tuple else type(tree).__name__
    return f"{name}({', '.join(map(tree_shapes, tree))})"


def is_empty(tree: Tree) -> bool:
    """Whether a tree is `()`."""
    return isinstance(tree, tuple) and not tree


def tree_add(left: Tree, right: Tree) -> Tree:
    """The sum of two trees, leaf by leaf."""
    return tree_map(torch.add, left, right)


def tree_sub(left: Tree, right: Tree) -> Tree:
    """The difference of two trees, leaf by leaf."""
    return tree_map(torch.sub, left, right)


def tree_stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of one shape along a new leading dimension."""
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def tree_at(tree: Tree, index: int) -> Tree:
    """One entry of the leading dimension of every leaf."""
    return tree_map(lambda leaf: leaf[index], tree)


def list_nodes(tree: Tree, kind: type[Node]) -> list[Node]:
    """Every record of one kind that a tree contains, in order, such as its models."""
    if isinstance(tree, kind):
        return [tree]
    return [node for child in tree for node in list_nodes(child, kind)] if isinstance(tree, tuple) else []


def find_only_node(tree: Tree, kind: type[Node]) -> Node:
    """The one record of a kind that a tree contains; an algorithm with none or several says itself which is meant."""
    nodes = list_nodes(tree, kind)
    if len(nodes) != 1:
        raise ValueError(
            f"a {type(tree).__name__} contains {len(nodes)} records of the kind {kind.__name__}; it must be 1: define "
            "local_model, replace_local_model and replace_model in the algorithm"
        )
    return nodes[0]


def replace_only_node(tree: Tree, node: Tree) -> Tree:
    """The tree with another record in the place of the one of its kind that the tree contains."""
    find_only_node(tree, type(node))

    def replace_in(child: Tree) -> Tree:
        if isinstance(child, type(node)):
            return node
        if not isinstance(child, tuple):
            return child
        children = [replace_in(grandchild) for grandchild in child]
        return tuple(children) if type(child) is tuple else type(child)(*children)

    return replace_in(tree)


def send_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; to a GPU from pinned memory, so that the CPU does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
