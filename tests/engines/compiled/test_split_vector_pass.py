"""Graphs of flat vectors are rewritten part by part: the numbers stay, the joints go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.engines.compiled._split_vector_pass import SplitVectorPass

# The compiler itself uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

LENGTHS = [6, 2, 1]
"""Three layers' parameters: vectors of 9."""

aten = torch.ops.aten


def descend_vectors(split_vectors: list[Tensor], gradients: list[Tensor], other: Tensor, size: Tensor) -> list[Tensor]:
    """A step as the clients' rules write it, with a vector of its own, between a joint and a cut."""
    weights = torch.cat(split_vectors, 1)
    moved = weights - size * (torch.cat(gradients, 1) + 0.5 * weights - other / 2)
    return [part.clone() for part in torch.split(-moved, LENGTHS, 1)]


def measure_norm(split_vectors: list[Tensor], gradients: list[Tensor], other: Tensor, size: Tensor) -> list[Tensor]:
    """A rule that looks at the vector as a whole."""
    return [size * torch.cat(gradients, 1), torch.cat(split_vectors, 1).norm(dim=1)]


def split_elsewhere(split_vectors: list[Tensor], gradients: list[Tensor], other: Tensor, size: Tensor) -> list[Tensor]:
    """Vectors that are joined of other parts, or cut at other places."""
    turned = torch.cat(gradients[::-1], 1) + other
    return [turned, *torch.split(size * torch.cat(split_vectors, 1), [5, 4], 1)]


def scale_per_client(split_vectors: list[Tensor], gradients: list[Tensor], other: Tensor, size: Tensor) -> list[Tensor]:
    """A number for each client, which is not cut."""
    return [torch.cat(split_vectors, 1) * other[:, :1]]


def draw_arguments() -> tuple[Any, ...]:
    keyed = torch.Generator().manual_seed(4)

    def draw(length: int) -> Tensor:
        return torch.randn(3, length, dtype=torch.float64, generator=keyed)

    return [draw(n) for n in LENGTHS], [draw(n) for n in LENGTHS], draw(9), torch.tensor(0.3, dtype=torch.float64)


def trace_and_rewrite(function: Callable[..., list[Tensor]]) -> tuple[GraphModule, GraphModule]:
    """The graph as it is, and rewritten."""
    plain, rewritten = (make_fx(function, tracing_mode="fake")(*draw_arguments()) for _ in range(2))
    SplitVectorPass(LENGTHS)(rewritten.graph)
    rewritten.graph.lint()
    rewritten.recompile()
    return plain, rewritten


def count_concatenations(module: GraphModule) -> int:
    return sum(node.target is aten.cat.default for node in module.graph.nodes)


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [(descend_vectors, 2, 0), (measure_norm, 2, 2), (split_elsewhere, 2, 2), (scale_per_client, 1, 1)],
)
def test_the_numbers_stay_and_joints_that_nobody_needs_go(function: Any, before: int, after: int) -> None:
    plain, rewritten = trace_and_rewrite(function)
    assert (count_concatenations(plain), count_concatenations(rewritten)) == (before, after)
    for one, other in zip(plain(*draw_arguments()), rewritten(*draw_arguments()), strict=True):
        assert torch.equal(one, other)


def test_a_product_of_a_joint_is_a_joint_of_products() -> None:
    _, rewritten = trace_and_rewrite(measure_norm)
    products = [node for node in rewritten.graph.nodes if node.target is aten.mul.Tensor]
    assert [node.meta["val"].shape[1] for node in products] == LENGTHS


def test_a_joint_along_the_clients_stays_whole() -> None:
    """Parts of one length could also be stacked."""

    def stacked(one: Tensor, other: Tensor) -> Tensor:
        return 2 * torch.cat([one, other])

    pair = draw_arguments()[0][0], draw_arguments()[1][0]
    graph = make_fx(stacked, tracing_mode="fake")(*pair)
    SplitVectorPass([6, 6])(graph.graph)
    graph.recompile()
    assert torch.equal(graph(*pair), stacked(*pair))


def test_what_is_kept_depends_on_the_lengths() -> None:
    assert SplitVectorPass(LENGTHS).uuid() == SplitVectorPass(LENGTHS).uuid() != SplitVectorPass([6, 3]).uuid()
