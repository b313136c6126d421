"""Makes local steps fast: traced and compiled, and captured in one CUDA graph."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedauc.engines.cuda.lanes import LabeledRows, Lanes, LaneStep, gather_step_rows
from fedauc.engines.cuda.padding_weights import CAPTURE_ERRORS, extract_padding_updates
from fedauc.progress import report_activity

WARM_UP_STEPS = 2
"""Steps before capture, so that compilers and libraries have made their choices."""

CACHE_SIZE = 16
"""Compiled steps that a process keeps, since compiling takes far longer than a short run."""

MAX_STEPS_AT_ONCE = 8
"""Most steps in one update of weights without a gradient: compiling takes twice as long with every further one."""

VARYING_INPUTS = (-3, -2, -1)
"""Positions of a step's tensors that differ from step to step: its number, its rows, their labels. Constants follow."""

LIFTED_OPERATIONS = tuple(getattr(torch.ops.aten, name).Tensor for name in ("mul", "add", "sub", "div"))

Value = TypeVar("Value")

_compiled_functions: dict[object, Callable[..., Any]] = {}
_function_numbers = itertools.count()


class CompiledFunctions(NamedTuple):
    """A compiled step, the constants it takes after the lanes' tensors, and the update of weights without gradient."""

    step: Callable[..., Any]
    constants: list[Tensor]
    padding_update: Callable[..., Any] | None = None
    padding_inputs: Sequence[int] = ()


class CompiledStep:
    """A step as one compiled function, traced when its first lanes come."""

    def __init__(self, step: LaneStep) -> None:
        self._step, self.stacked = step, step.stacked
        self._functions: dict[object, CompiledFunctions] = {}

    def __call__(self, lanes: Lanes, step_number: Tensor) -> None:
        """The same as the step itself, except for what `update_padding_weights` has done."""
        functions = self._get_functions(lanes, step_number)
        functions.step(*_list_step_tensors(lanes, step_number), *functions.constants)

    def update_padding_weights(self, lanes: Lanes, step_number: Tensor) -> None:
        """Update weights that get no gradient for all steps of a visit, several steps at a time."""
        functions = self._get_functions(lanes, step_number)
        if functions.padding_update is not None:
            # This update takes none of the varying inputs, so no rows are gathered for it.
            tensors = [*lanes.list_tensors(), *[step_number] * len(VARYING_INPUTS), *functions.constants]
            for _ in range(lanes.download.phase.local_steps // _count_steps_at_once(lanes)):
                functions.padding_update(*(tensors[position] for position in functions.padding_inputs))

    def _get_functions(self, lanes: Lanes, step_number: Tensor) -> CompiledFunctions:
        phase, shapes = lanes.download.phase, tuple(tensor.shape for tensor in lanes.list_tensors())
        key = (phase.local_steps, phase.batch, phase.scoring, shapes)
        return get_or_make(self._functions, key, lambda: self._compile(lanes, _list_step_tensors(lanes, step_number)))

    def _compile(self, lanes: Lanes, tensors: Sequence[Tensor]) -> CompiledFunctions:
        # A first run fills the layers' caches (pixel positions of convolutions), which must not be traced.
        self._step.compute_step(lanes, tensors[-3], LabeledRows(*tensors[-2:]))
        # Tracing changes its inputs, so it gets copies.
        copies = [*map(torch.clone, tensors)]

        def run_step(*inputs: Tensor) -> None:
            *lane_tensors, step_number, rows, labels = inputs
            self._step.run_in_place(lanes.replace_tensors(lane_tensors), step_number, LabeledRows(rows, labels))

        traced = make_fx(run_step)(*copies)
        constants = lift_constants(traced, tensors[-1].device)
        varying = [len(copies) + position for position in VARYING_INPUTS]
        updates = extract_padding_updates(traced, varying, _count_steps_at_once(lanes))
        layouts = [(t.shape, t.stride(), t.dtype, t.device) for t in (*copies, *constants)]
        function = _compile_traced(traced, layouts)
        if updates is None:
            return CompiledFunctions(function, constants)
        update = _compile_traced(updates.module, [layouts[position] for position in updates.inputs])
        return CompiledFunctions(function, constants, update, updates.inputs)


def _list_step_tensors(lanes: Lanes, step_number: Tensor) -> list[Tensor]:
    """A step's tensors, with the varying ones last."""
    return [*lanes.list_tensors(), step_number, *gather_step_rows(lanes, step_number)]


def _count_steps_at_once(lanes: Lanes) -> int:
    """The largest divisor of a visit's steps that is not above the bound."""
    steps = lanes.download.phase.local_steps
    return max(count for count in range(1, MAX_STEPS_AT_ONCE + 1) if steps % count == 0)


def lift_constants(traced: torch.fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Make a traced step's constants inputs, so that algorithms that differ only in them compile once."""
    graph, constants = traced.graph, list[Tensor]()
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.target in LIFTED_OPERATIONS]:
        operand, constant = node.args[:2]
        if isinstance(constant, float) and operand.meta["val"].is_floating_point():
            dtype = torch.promote_types(operand.meta["val"].dtype, torch.float32)
            with graph.inserting_after(last):
                last = graph.placeholder(f"number_{len(constants)}")
            constants.append(torch.tensor(constant, dtype=dtype, device=device))
            node.args = (operand, last, *node.args[2:])
    traced.recompile()
    return constants


def _compile_traced(traced: torch.fx.GraphModule, layouts: Sequence[object]) -> Callable[..., Any]:
    """The compiled form of a traced step; steps with the same code, layouts and attributes share it."""
    paths = [str(node.target).split(".") for node in traced.graph.nodes if node.op == "get_attr"]
    attributes = [id(functools.reduce(getattr, path, traced)) for path in paths]

    def compile_copy() -> Callable[..., Any]:
        def step(*tensors: Tensor) -> None:
            traced(*tensors)

        # With code of its own: the compiler allows code a few versions, and counts those of the whole process.
        step.__code__ = step.__code__.replace(co_name=f"step_{next(_function_numbers)}")
        return torch.compile(step, fullgraph=True, dynamic=False)

    return get_or_make(_compiled_functions, (traced.code, *layouts, *attributes), compile_copy)


def get_or_make(cache: dict[object, Value], key: object, make: Callable[[], Value]) -> Value:
    """The cache's value for this key, made if it is missing; the least recently used goes when the cache is full."""
    value = cache.pop(key) if key in cache else make()
    cache[key] = value
    while len(cache) > CACHE_SIZE:
        cache.pop(next(iter(cache)))
    return value


class Stepper(NamedTuple):
    """Runs a visit in lanes that have been filled: `start_visit` once, then `run_step` for every local step."""

    start_visit: Callable[[], None]
    run_step: Callable[[], None]


def prepare_stepper(
    stacks: Sequence[Lanes], step_number: Tensor, variants: Sequence[LaneStep | CompiledStep]
) -> Stepper:
    """A graph of the first variant that can be captured; without a GPU, the last variant, lane by lane."""
    for step in variants if step_number.device.type == "cuda" else ():
        verb = "compiling" if isinstance(step, CompiledStep) else "capturing"
        try:
            branches = _list_branches(stacks, step)
            with report_activity(f"{verb} the training step"):
                return Stepper(_make_start(branches, step_number, step), _capture_graph(branches, step_number, step))
        # An error of the step itself comes again from the last variant, where nothing catches it.
        except CAPTURE_ERRORS as error:
            reason = " ".join(str(error).split()[:40])
            kind = "compiled step" if isinstance(step, CompiledStep) else "step"
            logging.getLogger("fedauc").warning("a %s cannot be captured: %s", kind, reason)
    branches = _list_branches(stacks, variants[-1])

    def run_lane_by_lane() -> None:
        for branch in branches:
            variants[-1](branch, step_number)
        step_number.add_(1)

    return Stepper(_make_start(branches, step_number, variants[-1]), run_lane_by_lane)


def _make_start(branches: Sequence[Lanes], step_number: Tensor, step: LaneStep | CompiledStep) -> Callable[[], None]:
    def start_visit() -> None:
        for branch in branches:
            step.update_padding_weights(branch, step_number)

    return start_visit


def _capture_graph(branches: Sequence[Lanes], step_number: Tensor, step: LaneStep | CompiledStep) -> Callable[[], None]:
    """Capture a graph in which every branch has a stream of its own."""
    device = step_number.device
    streams = [torch.cuda.Stream(device) for _ in branches]  # type: ignore[no-untyped-call]

    def run_branches() -> None:
        main = torch.cuda.current_stream(device)
        for branch, stream in zip(branches, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                step(branch, step_number)
        for stream in streams:
            main.wait_stream(stream)

    for _ in range(WARM_UP_STEPS):
        step_number.zero_()
        for branch in branches:
            step.update_padding_weights(branch, step_number)
        run_branches()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # If an old graph is garbage-collected during a capture, the capture fails.
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            run_branches()
            step_number.add_(1)
    finally:
        if collecting:
            gc.enable()
    return graph.replay


def _list_branches(stacks: Sequence[Lanes], step: LaneStep | CompiledStep) -> list[Lanes]:
    return list(stacks) if step.stacked else [lane for stack in stacks for lane in stack.split_lanes()]
