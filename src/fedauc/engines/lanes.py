"""Lanes: fixed tensors for the clients of a visit, and one CUDA graph that takes a local step of all of them.

A graph reads and writes the same tensors each time: a visit is written into its lanes, the graph is replayed once per
local step, with a counter on the device that says which batch comes next, and the result is read out of the lanes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.data.augment import move
from fedauc.engines.batched import Advanced, Opened, Rows, gather, widen
from fedauc.engines.convolve import stackable
from fedauc.engines.simulator import Once
from fedauc.interfaces import Algorithm, Batch, Model, Network, Order, Phase, Scored
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map

WARM_UP = 2
"""Steps before capture, so that compilers and libraries have made their choices."""


class Data(NamedTuple):
    """All rows of a run's clients, on the device."""

    inputs: Tensor
    labels: Tensor


class Lanes(NamedTuple):
    """Places for the clients of one run: every leaf but the data's and the order's has a leading lane dimension.

    `rows` hold a whole visit's draws, and `emitted` and `losses` have room for every step's, `[M, I, ...]`.
    """

    data: Data
    order: Order
    local: Tree
    rows: Rows
    emitted: Tree = ()
    losses: Tree = ()

    def fill(self, opened: Opened) -> None:
        """Write a visit into the lanes; those beyond its cohort keep what they had, and nobody reads them."""
        count, order, step_size = len(opened.cohort.clients), opened.order, self.order.phase.step_size
        assert isinstance(step_size, Tensor)
        step_size.fill_(order.phase.step_size)
        sent, known = (order.shared, order.anchor), (self.order.shared, self.order.anchor)
        tree_map(lambda old, new: old.copy_(new[0]), known, sent)
        tree_map(lambda old, new: old[:count].copy_(new), (self.local, self.rows), (opened.local, opened.rows))

    def result(self, count: int) -> Advanced:
        """What the first lanes hold after the last step; the scores are kept long after the lanes move on."""
        local = tree_map(lambda leaf: leaf[:count], self.local)
        emitted = tree_map(lambda leaf: leaf[:count].clone(), self.emitted)
        return Advanced(local, emitted, self.losses[:count, 0].clone())

    def single(self) -> list[Lanes]:
        """Each lane for itself, as views."""
        mine = (self.local, self.rows, self.emitted, self.losses)
        count = len(self.losses)
        parts = [tree_map(lambda leaf, at=at: leaf[at : at + 1], mine) for at in range(count)]
        return [Lanes(self.data, self.order, *part) for part in parts]


class LaneNetwork(Network):
    """A module over some lanes as pure functions: mapped over many, or for one."""

    def __init__(self, network: ModuleNetwork, stacked: bool) -> None:
        self._network, self._stacked = network, stacked
        self._module: nn.Module = stackable(network.plain) if stacked else network.plain

    def score(self, model: Model, inputs: Tensor) -> Scored:
        """One forward pass in training mode; the pullback is its transposed derivative."""
        return self._network.trace(self._module, model, inputs, self._stacked)


class Step:
    """One local step of some lanes, in place. `stacked` takes many lanes at once, otherwise each goes alone."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, stacked: bool) -> None:
        self._algorithm, self._network, self.stacked = algorithm, LaneNetwork(network, stacked), stacked

    def __call__(self, lanes: Lanes, at: Tensor) -> None:
        """Step number `at` `[1]`: the state moves on, and what the step emits goes to its place."""
        local, emitted, losses = self.look(lanes, at)
        tree_map(lambda old, new: old.copy_(new), lanes.local, local)
        room = (lanes.emitted, lanes.losses)
        tree_map(lambda old, new: old.index_copy_(1, at, new[:, None]), room, (emitted, losses))

    def look(self, lanes: Lanes, at: Tensor) -> tuple[Tree, Tree, Tensor]:
        """The state after step `at`, what the step emits, and the losses before it."""
        rows, moves, own = (_at(tree, at) for tree in (lanes.rows.rows, lanes.rows.moves, lanes.rows.own))
        inputs, labels = (gather(part, rows) for part in lanes.data)
        batch = Batch(inputs if is_empty(moves) else move(inputs, moves), labels, lanes.rows.weights, own)
        phase, count = lanes.order.phase, len(labels)
        order = Order(phase, widen(lanes.order.shared, count), widen(lanes.order.anchor, count))
        network, losses = Once(self._network), labels.new_zeros(count)
        if not phase.scoring:
            losses = self._algorithm.monitor(network, order, lanes.local, batch)
        return *self._algorithm.step(network, order, lanes.local, batch), losses


OneStep = Callable[[Lanes, Tensor], None]


class Compiled:
    """A step as one compiled function, traced when its first lanes come."""

    def __init__(self, step: Step) -> None:
        self._step, self.stacked = step, step.stacked
        self._made: dict[object, Callable[..., Any]] = {}

    def __call__(self, lanes: Lanes, at: Tensor) -> None:
        """The same as the step itself."""
        tensors = [*_tensors(lanes), at]
        phase, shapes = lanes.order.phase, tuple(tensor.shape for tensor in tensors)
        kind = (phase.local_steps, phase.batch, phase.scoring, shapes)
        if kind not in self._made:
            # A look first: tables that layers keep (where a convolution finds its pixels) must not become part of it.
            self._step.look(lanes, at)
            # Tracing takes the step for real, so it gets copies of all but the data.
            copies = [*tensors[:2], *map(torch.clone, tensors[2:])]
            traced = make_fx(lambda *given: self._step(_with(lanes, given[:-1]), given[-1]))(*copies)
            self._made[kind] = torch.compile(_fresh(traced), fullgraph=True, dynamic=False)
        self._made[kind](*tensors)


def make_lanes(data: Data, opened: Opened, width: int, step: Step) -> Lanes:
    """Lanes of the right shapes, filled from a visit; a trial step tells the shape of what steps emit."""
    phase, (local, rows) = opened.order.phase, tree_map(lambda leaf: _spread(leaf, width), (opened.local, opened.rows))
    weights, steps = rows.weights, phase.local_steps
    constant = Phase(0, 0, 0, weights.new_zeros(()), steps, phase.batch, phase.scoring)
    sent = tree_map(lambda leaf: leaf[0].clone(), (opened.order.shared, opened.order.anchor))
    lanes = Lanes(data, Order(constant, *sent), local, rows, (), weights.new_zeros(width, steps))
    _, emitted, _ = step.look(lanes.single()[0], torch.zeros(1, dtype=torch.int64, device=weights.device))
    return lanes._replace(emitted=tree_map(lambda leaf: leaf.new_zeros(width, steps, *leaf.shape[1:]), emitted))


def ready(runs: Sequence[Lanes], at: Tensor, steps: Sequence[Step | Compiled]) -> Callable[[], None]:
    """What takes one step of every lane: a graph of the first step that can be captured, or the last as it is."""
    for step in steps if at.device.type == "cuda" else ():
        try:
            return _captured(_branches(runs, step), at, step)
        # What tracing (TypeError), the compiler (AssertionError on strides) and capture raise; a fault of the step
        # itself comes again from the last way, which nothing catches.
        except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
            reason = " ".join(str(error).split()[:40])
            logging.getLogger("fedauc").warning("a %s step cannot be captured: %s", type(step).__name__.lower(), reason)
    branches = _branches(runs, steps[-1])

    def one_by_one() -> None:
        for branch in branches:
            steps[-1](branch, at)
        at.add_(1)

    return one_by_one


def _captured(branches: Sequence[Lanes], at: Tensor, step: OneStep) -> Callable[[], None]:
    """A graph in which every branch has a stream of its own."""
    streams = [torch.cuda.Stream(at.device) for _ in branches]  # type: ignore[no-untyped-call]

    def fan_out() -> None:
        main = torch.cuda.current_stream(at.device)
        for branch, stream in zip(branches, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                step(branch, at)
        for stream in streams:
            main.wait_stream(stream)

    for _ in range(WARM_UP):
        at.zero_()
        fan_out()
    torch.cuda.synchronize(at.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fan_out()
        at.add_(1)
    return graph.replay


def _branches(runs: Sequence[Lanes], step: Step | Compiled) -> list[Lanes]:
    return list(runs) if step.stacked else [lane for run in runs for lane in run.single()]


def _spread(leaf: Tensor, width: int) -> Tensor:
    """A copy with as many entries as lanes; those beyond the first visit's clients repeat its first."""
    more = leaf[:1].expand(max(0, width - len(leaf)), *leaf.shape[1:])
    return torch.cat([leaf[:width], more])


def _at(tree: Tree, at: Tensor) -> Tree:
    return tree_map(lambda leaf: leaf.index_select(1, at).squeeze(1), tree)


def _tensors(lanes: Lanes) -> list[Tensor]:
    data, (phase, shared, anchor, _), *rest = lanes
    return tree_leaves((data, phase.step_size, shared, anchor, tuple(rest)))


def _with(lanes: Lanes, tensors: Sequence[Tensor]) -> Lanes:
    """The same lanes with other tensors."""
    data, (phase, shared, anchor, own), *rest = lanes
    given = iter(tensors)
    data, step_size, shared, anchor, rest = tree_map(
        lambda leaf: next(given), (data, phase.step_size, shared, anchor, tuple(rest))
    )
    return Lanes(data, Order(phase._replace(step_size=step_size), shared, anchor, own), *rest)


_numbers = itertools.count()


def _fresh(traced: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own: the compiler allows code a few versions, and counts all runs of a process."""

    def step(*tensors: Tensor) -> None:
        traced(*tensors)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step
