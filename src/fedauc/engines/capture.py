"""How steps are taken fast: traced and compiled, and captured in one CUDA graph."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.engines.aside import set_aside
from fedauc.engines.lanes import Data, Lanes, Step, take
from fedauc.engines.windows import FAULTS

WARM_UP = 2
"""Steps before capture, so that compilers and libraries have made their choices."""

KEPT = 16
"""Compiled steps that a process keeps: compiling takes far longer than a run."""

Made = TypeVar("Made")


class Compiled:
    """A step as one compiled function, traced when its first lanes come."""

    def __init__(self, step: Step) -> None:
        self._step, self.stacked = step, step.stacked
        self._made: dict[object, Ready] = {}

    def __call__(self, lanes: Lanes, at: Tensor) -> None:
        """The same as the step itself, but for what `settle` has done."""
        made = self._made_for(lanes, at)
        made.function(*_given(lanes, at), *made.numbers)

    def settle(self, lanes: Lanes, at: Tensor) -> None:
        """All of a visit's steps of what needs no gradient, before the first of the others, some at a time."""
        made = self._made_for(lanes, at)
        if made.aside is not None:
            # It takes nothing that varies, so no rows are gathered for it.
            given = [*lanes.tensors(), *[at] * len(VARYING), *made.numbers]
            for _ in range(lanes.download.phase.local_steps // _at_once(lanes)):
                made.aside(*(given[place] for place in made.places))

    def _made_for(self, lanes: Lanes, at: Tensor) -> Ready:
        phase, shapes = lanes.download.phase, tuple(tensor.shape for tensor in lanes.tensors())
        kind = (phase.local_steps, phase.batch, phase.scoring, shapes)
        return kept(self._made, kind, lambda: self._ready(lanes, _given(lanes, at)))

    def _ready(self, lanes: Lanes, tensors: Sequence[Tensor]) -> Ready:
        # A look first: tables that layers keep (where a convolution finds its pixels) must not become part of it.
        self._step.look(lanes, tensors[-3], Data(*tensors[-2:]))
        # Tracing takes the step for real, so it gets copies.
        copies = [*map(torch.clone, tensors)]

        def moved(*given: Tensor) -> None:
            *own, at, inputs, labels = given
            self._step.move(lanes.holding(own), at, Data(inputs, labels))

        traced = make_fx(moved)(*copies)
        numbers = lift(traced, tensors[-1].device)
        aside = set_aside(traced, [len(copies) + place for place in VARYING], _at_once(lanes))
        every = [(t.shape, t.stride(), t.dtype, t.device) for t in (*copies, *numbers)]
        function = _same(traced, every)
        if aside is None:
            return Ready(function, numbers)
        return Ready(function, numbers, _same(aside.module, [every[place] for place in aside.places]), aside.places)


def _given(lanes: Lanes, at: Tensor) -> list[Tensor]:
    """A step's tensors, the varying ones last."""
    return [*lanes.tensors(), at, *take(lanes, at)]


AT_ONCE = 8
"""Steps without a gradient in one pass over memory, at most: compiling takes twice as long with every one."""


def _at_once(lanes: Lanes) -> int:
    """As many as a visit's steps are a multiple of."""
    steps = lanes.download.phase.local_steps
    return max(number for number in range(1, AT_ONCE + 1) if steps % number == 0)


VARYING = (-3, -2, -1)
"""Of a step's tensors, before its numbers, those that differ from step to step: its number, its rows, their labels."""


class Ready(NamedTuple):
    """A compiled function, the numbers of a rule that it takes after the lanes' tensors, and what is done at once."""

    function: Callable[..., Any]
    numbers: list[Tensor]
    aside: Callable[..., Any] | None = None
    places: Sequence[int] = ()


def lift(traced: torch.fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Make a traced step's factors and summands inputs, so that rules that differ in them alone compile once."""
    graph, numbers = traced.graph, list[Tensor]()
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.target in LIFTED]:
        partner, number = node.args[:2]
        if isinstance(number, float) and partner.meta["val"].is_floating_point():
            dtype = torch.promote_types(partner.meta["val"].dtype, torch.float32)
            with graph.inserting_after(last):
                last = graph.placeholder(f"number_{len(numbers)}")
            numbers.append(torch.tensor(number, dtype=dtype, device=device))
            node.args = (partner, last, *node.args[2:])
    traced.recompile()
    return numbers


_aten = torch.ops.aten
LIFTED = (_aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor)

_functions: dict[object, Callable[..., Any]] = {}


def _same(traced: torch.fx.GraphModule, given: Sequence[object]) -> Callable[..., Any]:
    """The compiled form of a traced step, kept for later ones that compute the same."""
    constants = [id(_attribute(traced, str(node.target))) for node in traced.graph.nodes if node.op == "get_attr"]
    key = (traced.code, *given, *constants)
    return kept(_functions, key, lambda: torch.compile(_fresh(traced), fullgraph=True, dynamic=False))


def _attribute(module: nn.Module, path: str) -> object:
    return functools.reduce(getattr, path.split("."), module)


def kept(cache: dict[object, Made], key: object, make: Callable[[], Made]) -> Made:
    """What was made for this key, or a new one; the one used longest ago goes when there are many."""
    found = cache.pop(key) if key in cache else make()
    cache[key] = found
    while len(cache) > KEPT:
        cache.pop(next(iter(cache)))
    return found


class Taking(NamedTuple):
    """How lanes that have been filled go through a visit: settled, and then one step after another."""

    settle: Callable[[], None]
    step: Callable[[], None]


def ready(stacks: Sequence[Lanes], at: Tensor, steps: Sequence[Step | Compiled]) -> Taking:
    """What takes one step of every lane: a graph of the first step that can be captured, or the last as it is."""
    for step in steps if at.device.type == "cuda" else ():
        try:
            branches = _branches(stacks, step)
            return Taking(_settling(branches, at, step), _captured(branches, at, step))
        # A fault of the step itself comes again from the last way, which nothing catches.
        except FAULTS as error:
            reason = " ".join(str(error).split()[:40])
            logging.getLogger("fedauc").warning("a %s step cannot be captured: %s", type(step).__name__.lower(), reason)
    branches = _branches(stacks, steps[-1])

    def one_by_one() -> None:
        for branch in branches:
            steps[-1](branch, at)
        at.add_(1)

    return Taking(_settling(branches, at, steps[-1]), one_by_one)


def _settling(branches: Sequence[Lanes], at: Tensor, step: Step | Compiled) -> Callable[[], None]:
    def settle() -> None:
        for branch in branches:
            step.settle(branch, at)

    return settle


def _captured(branches: Sequence[Lanes], at: Tensor, step: Step | Compiled) -> Callable[[], None]:
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
        for branch in branches:
            step.settle(branch, at)
        fan_out()
    torch.cuda.synchronize(at.device)
    graph = torch.cuda.CUDAGraph()
    # An old graph that is collected during a capture spoils it.
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            fan_out()
            at.add_(1)
    finally:
        if collecting:
            gc.enable()
    return graph.replay


def _branches(stacks: Sequence[Lanes], step: Step | Compiled) -> list[Lanes]:
    return list(stacks) if step.stacked else [lane for stack in stacks for lane in stack.single()]


_numbers = itertools.count()


def _fresh(traced: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own: the compiler allows code a few versions, and counts all runs of a process."""

    def step(*tensors: Tensor) -> None:
        traced(*tensors)

    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step
