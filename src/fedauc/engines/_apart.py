"""What the compiler is told of flat vectors: arithmetic on a vector is arithmetic on its parts.

A step joins its layers' gradients into one vector, moves the weights by it, and the next step cuts them apart again.
Left alone, the compiler writes every joint down. Here sums and multiples of joints become joints of sums and multiples,
and what is cut where it was joined becomes the parts themselves, so that a gradient goes straight into its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""What the clients' rules do with vectors. Anything else gets the joint, as if nothing had been done."""


class Apart(CustomGraphPass):
    """Works on vectors `[M, d]` that are joined of parts of the given lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph in place."""
        parts: dict[Node, list[Node]] = {}
        for node in list(graph.nodes):
            arguments: Any = node.args
            if node.target is aten.cat.default and self._joins(*arguments):
                parts[node] = list(arguments[0])
            elif node.target is aten.split_with_sizes.default and arguments[0] in parts:
                self._cut(node, arguments[1], parts[arguments[0]])
            elif node.target in POINTWISE and any(argument in parts for argument in node.all_input_nodes):
                self._push(node, parts)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """What a kept result of the compiler depends on."""
        return get_hash_for_files((__file__,), repr(self._lengths))

    def _joins(self, pieces: Sequence[Node], dim: int = 0) -> bool:
        shapes = [list(piece.meta["val"].shape) for piece in pieces]
        return dim in (1, -1) and [shape[1:] for shape in shapes] == [[length] for length in self._lengths]

    def _cut(self, node: Node, lengths: Sequence[int], found: list[Node]) -> None:
        for user in list(node.users) if list(lengths) == self._lengths else ():
            _, place = cast(tuple[Node, int], user.args)
            user.replace_all_uses_with(found[place])

    def _push(self, node: Node, parts: dict[Node, list[Node]]) -> None:
        """Do to the parts what is done to a joint, and join the results."""
        shape, graph = node.meta["val"].shape, node.graph
        if any(_ndim(other) and other.meta["val"].shape != shape for other in node.all_input_nodes):
            return
        with graph.inserting_before(node):
            whole = [self._parts(argument, parts) for argument in node.args]
            made = [_called(graph, node.target, own, node.kwargs) for own in zip(*whole, strict=True)]
            joint = _called(graph, aten.cat.default, (made, 1), {})
        node.replace_all_uses_with(joint)
        parts[joint] = made

    def _parts(self, argument: Any, parts: dict[Node, list[Node]]) -> list[Any]:
        """An operand for each of the parts; one that was never joined is cut, which costs nothing."""
        if not isinstance(argument, Node) or not _ndim(argument):
            return [argument] * len(self._lengths)
        if argument in parts:
            return parts[argument]
        ends = [sum(self._lengths[: place + 1]) for place in range(len(self._lengths))]
        pairs = zip(ends, self._lengths, strict=True)
        return [_called(argument.graph, aten.slice.Tensor, (argument, 1, end - n, end), {}) for end, n in pairs]


def _ndim(node: Node) -> int:
    """Dimensions; a number of steps or clients, which the compiler does not know, has none."""
    return getattr(node.meta["val"], "ndim", 0)


def _called(graph: Graph, target: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Node:
    """A new node that knows its shape, as the compiler wants it."""
    node = graph.call_function(target, arguments, options)
    node.meta["val"] = target(*torch.fx.map_arg(arguments, lambda other: other.meta["val"]), **options)
    return node
