"""Updates that need no gradient: several steps at once, which are one pass over memory, instead of step by step.

Weights that no pixel ever meets (most of the last layers of an ImageNet network on small images) only decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node


class Aside(NamedTuple):
    """Several steps of some of a step's inputs, and which inputs it takes."""

    module: GraphModule
    places: list[int]


def set_aside(traced: GraphModule, varying: Sequence[int], steps: int) -> Aside | None:
    """Take updates out of a traced step that nothing else in it needs or feeds; None where there are none.

    Such an update reads what it writes, and inputs that stay the same during a visit: not those that other updates
    write, nor the `varying` ones.
    """
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    writes = [node for node in traced.graph.nodes if node.op == "call_function" and _writes(node)]
    # All that a write touches: one into a view is not connected with what is read of its base.
    changing = {inputs[place] for place in varying} | {n for w in writes for n in _before(w.args[0])}
    mine = [node for node in writes if node.target is torch.ops.aten.copy_.default and _alone(node, changing)]
    if not mine:
        return None
    whole = Graph()
    needed = {node for copy in mine for node in (*_before(copy.args[1]), copy.args[0]) if node.op == "placeholder"}
    places = [place for place, node in enumerate(inputs) if node in needed]
    known = {inputs[place]: whole.placeholder(f"given_{place}") for place in places}
    for copy in mine:
        target, source = copy.args[:2]
        before, now = _before(source), known[target]
        order = [node for node in traced.graph.nodes if node in before and node.op != "placeholder"]
        for _ in range(steps):
            found = {**known, target: now}
            for node in order:
                found[node] = whole.node_copy(node, found.__getitem__)
            now = found[source]
        whole.call_function(torch.ops.aten.copy_.default, (known[target], now))
        traced.graph.erase_node(copy)
    whole.output(None)
    traced.recompile()
    return Aside(GraphModule(traced, whole), places)


def _alone(copy: Node, changing: set[Node]) -> bool:
    """Whether an input's update reads nothing else that changes, and nothing else reads the input."""
    target, source = copy.args[:2]
    if not isinstance(target, Node) or target.op != "placeholder" or not isinstance(source, Node):
        return False
    before = _before(source)
    if not _exact(target.meta.get("val"), source.meta.get("val")):
        return False
    if any(node.op not in ("placeholder", "call_function") for node in before) or before & (changing - {target}):
        return False
    return _after(target) <= before | {copy}


def _exact(old: object, new: object) -> bool:
    """Whether steps in a row are the same without being stored in between: rounded to fewer bits they are not."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.shape == new.shape and old.dtype == new.dtype and old.dtype not in (torch.bfloat16, torch.float16)


def _before(node: Node) -> set[Node]:
    """A node, and everything it comes from."""
    return _reached([node], lambda each: each.all_input_nodes)


def _after(node: Node) -> set[Node]:
    """Everything that comes from a node."""
    return _reached(node.users, lambda each: each.users)


def _reached(start: Iterable[Node], further: Callable[[Node], Iterable[Node]]) -> set[Node]:
    waiting, seen = list(start), set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += further(node)
    return seen


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
