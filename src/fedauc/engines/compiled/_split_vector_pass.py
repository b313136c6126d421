"""A pass over the compiler's graphs that turns arithmetic on flat vectors into arithmetic on their parts.

A step concatenates its layers' gradients into one vector and moves the weights by it, and the next step splits them
again. Without this pass, the compiler stores every concatenated vector. The pass applies additions and multiplications
to the parts instead, and replaces a split of a concatenation by the parts themselves, so that each gradient goes
straight into its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten

POINTWISE = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.neg.default,
    aten.clone.default,
}
"""The operations that algorithms apply to vectors. Any other operation still gets the concatenated vector."""


class SplitVectorPass(CustomGraphPass):
    """Rewrites graphs in which vectors `[M, d]` are concatenated from parts of the given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place."""
        parts: dict[Node, list[Node]] = {}
        for node in list(graph.nodes):
            arguments: Any = node.args
            if node.target is aten.cat.default and self._joins_vector(*arguments):
                parts[node] = list(arguments[0])
            elif node.target is aten.split_with_sizes.default and arguments[0] in parts:
                self._replace_split(node, arguments[1], parts[arguments[0]])
            elif node.target in POINTWISE and any(argument in parts for argument in node.all_input_nodes):
                self._apply_to_parts(node, parts)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """The key under which the compiler's cache stores results of this pass."""
        return get_hash_for_files((__file__,), repr(self._lengths))

    def _joins_vector(self, tensors: Sequence[Node], dim: int = 0) -> bool:
        shapes = [list(tensor.meta["val"].shape) for tensor in tensors]
        return dim in (1, -1) and [shape[1:] for shape in shapes] == [[length] for length in self._lengths]

    def _replace_split(self, node: Node, lengths: Sequence[int], parts: list[Node]) -> None:
        for user in list(node.users) if list(lengths) == self._lengths else ():
            _, index = cast(tuple[Node, int], user.args)
            user.replace_all_uses_with(parts[index])

    def _apply_to_parts(self, node: Node, parts: dict[Node, list[Node]]) -> None:
        """Apply an operation on a concatenated vector to its parts, and concatenate the results."""
        shape, graph = node.meta["val"].shape, node.graph
        if any(_count_dimensions(operand) and operand.meta["val"].shape != shape for operand in node.all_input_nodes):
            return
        with graph.inserting_before(node):
            operands = [self._split_operand(argument, parts) for argument in node.args]
            results = [_insert_call(graph, node.target, part, node.kwargs) for part in zip(*operands, strict=True)]
            joined = _insert_call(graph, aten.cat.default, (results, 1), {})
        node.replace_all_uses_with(joined)
        parts[joined] = results

    def _split_operand(self, argument: Any, parts: dict[Node, list[Node]]) -> list[Any]:
        """An operand for each part; a vector that was never concatenated is sliced, which costs nothing."""
        if not isinstance(argument, Node) or not _count_dimensions(argument):
            return [argument] * len(self._lengths)
        if argument in parts:
            return parts[argument]
        ranges = zip(accumulate(self._lengths), self._lengths, strict=True)
        slices = [(argument, 1, end - length, end) for end, length in ranges]
        return [_insert_call(argument.graph, aten.slice.Tensor, arguments, {}) for arguments in slices]


def _count_dimensions(node: Node) -> int:
    """A tensor's dimensions; symbolic numbers of steps or clients have none."""
    return getattr(node.meta["val"], "ndim", 0)


def _insert_call(graph: Graph, target: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Node:
    """A new node with the shape information that the compiler needs."""
    node = graph.call_function(target, arguments, options)
    node.meta["val"] = target(*torch.fx.map_arg(arguments, lambda operand: operand.meta["val"]), **options)
    return node
