"""The graphed engine: one client's local step, compiled, and a whole cohort's captured in one CUDA graph.

Clients' data stay on the device, as do averaging, pools and row numbers, and nothing waits for the device inside a
round. Runs that differ only in seeds, learning rates, schedules or data may share a graph (`SharedGraph`), which fills
the device better. On a CPU the lanes run one after another, which is slower than the loop and serves to test them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.engines.batched import LocalResult, PendingVisit, StackedEngine
from fedauc.engines.cuda.capture import CompiledStep, Stepper, get_or_make, prepare_stepper
from fedauc.engines.cuda.lanes import CannotShareLanes, LabeledRows, Lanes, LaneStep, make_lanes
from fedauc.engines.kernels import Unsupported
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Cohort, Download, Setting, Visits
from fedauc.network import ModuleNetwork, module_signature
from fedauc.trees import tree_leaves, tree_map
from fedauc.uploads import UploadPipeline

MAX_LANES = 64
"""Clients of one run that are stepped at the same time; larger cohorts come in waves."""

RUNS_PER_STACK = 3
"""Runs in one stack of lanes. Where fewer are left, lanes idle, since every size of stack is compiled separately."""

_compiled_steps: dict[object, CompiledStep] = {}
"""Compiled steps, which later runs with the same graph signature reuse."""


class StepVariants(NamedTuple):
    """A local step, and the ways to run it, from the fastest to the one that always works."""

    plain: LaneStep
    variants: tuple[LaneStep | CompiledStep, ...]


@final
class GraphedEngine(StackedEngine):
    """The local steps as CUDA graphs, for any module without randomness of its own.

    Results equal the loop's up to the order of sums.

    `largest_cohort` is the largest cohort to expect; lanes are allocated at the first visit, which may be smaller.
    """

    name: ClassVar[str] = "graphed"

    def __init__(
        self,
        algorithm: Algorithm,
        network: ModuleNetwork,
        clients: Clients,
        setting: Setting,
        uploads: UploadPipeline | None = None,
        compiled: bool = True,
    ) -> None:
        Simulator.__init__(self, algorithm, network, clients, setting, uploads)
        if _uses_randomness(network, self._inputs[:2]):
            raise Unsupported("it draws random numbers (dropout), which a replayed graph would not draw by key")
        self.compiled = compiled
        self.largest_cohort = 1
        # A proxy, so that the lanes, which hold whole models, are freed with the engine.
        self._own_graph = SharedGraph([weakref.proxy(self)])

    @property
    def client_rows(self) -> LabeledRows:
        """All clients' rows."""
        return LabeledRows(self._inputs, self._labels)

    @property
    def graph_signature(self) -> tuple[object, ...]:
        """Engines with equal signatures may share a graph."""
        network, rows = self._network, self._inputs
        compute = (network.dtype, network.mixed, network.device, network.channels_last)
        algorithm, module = self._algorithm.without_server_settings(), module_signature(network.plain_module)
        return algorithm, module, *compute, rows.dtype, rows.shape[1:], self._setting.augment

    def make_step_variants(self, scoring: bool) -> StepVariants:
        """The local step, and the ways to run it."""
        stacked, single = (LaneStep(self._algorithm, self._network, stacked) for stacked in (True, False))
        if scoring or not self.compiled:
            # A scoring cycle is too short to compile for.
            return StepVariants(single, (stacked, single))
        signature = self.graph_signature
        compiled = [
            get_or_make(_compiled_steps, (signature, step.stacked), functools.partial(CompiledStep, step))
            for step in (stacked, single)
        ]
        return StepVariants(single, (*compiled, stacked, single))

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit all clients of the cohort at once."""
        (visits,) = self._own_graph.visit([(download, cohort)])
        assert visits is not None
        return visits

    def _run_local_steps(self, pending: PendingVisit) -> LocalResult:
        (result,) = self._own_graph.run_local_steps([pending])
        assert result is not None
        return result


class SharedGraph:
    """A group of runs whose clients share a graph: one local step and model; seeds, rates, cycles, data may differ."""

    def __init__(self, engines: Sequence[GraphedEngine]) -> None:
        self._engines = list(engines)
        self._step_variants: dict[bool, StepVariants] = {}
        self._visit_kind: object = None
        self._lane_stacks: list[Lanes] = []
        self._stepper: Stepper | None = None
        self._step_number = torch.zeros(1, dtype=torch.int64)
        self._lanes_per_run = 0
        if any(engine.graph_signature != self._engines[0].graph_signature for engine in self._engines[1:]):
            bound = "they need one local step, model and shape of rows: run these separately"
            raise ValueError(f"runs cannot share a graph; {bound}")

    @torch.no_grad()
    def visit(self, visits: Sequence[tuple[Download, Cohort] | None]) -> list[Visits | None]:
        """One visit of every run that has one, all at once; runs with None wait."""
        runs = zip(self._engines, visits, strict=True)
        pending = [None if visit is None else engine.open_visit(*visit) for engine, visit in runs]
        closing = zip(self._engines, pending, self.run_local_steps(pending), strict=True)
        return [
            None if visit is None or result is None else engine.close_visit(visit, result)
            for engine, visit, result in closing
        ]

    def run_local_steps(self, pending: list[PendingVisit | None]) -> list[LocalResult | None]:
        """Every local step; visits of different kinds (a run that still scores) take turns."""
        results: list[LocalResult | None] = [None] * len(pending)
        for kind in dict.fromkeys(_describe_visit(visit) for visit in pending if visit is not None):
            same_kind = [visit if visit is not None and _describe_visit(visit) == kind else None for visit in pending]
            self._prepare_lanes(same_kind, kind)
            pairs = zip(self._run_in_waves(same_kind), results, strict=True)
            results = [new or earlier for new, earlier in pairs]
        return results

    def _prepare_lanes(self, pending: list[PendingVisit | None], kind: object) -> None:
        """Allocate lanes for this kind of visit, and compile and capture its step, unless that is done."""
        if self._visit_kind == kind:
            return
        visits = [visit for visit in pending if visit is not None]
        phase = visits[0].download.phase
        # The old lanes, which hold whole models, are freed first. The kind is set last: compiling may be interrupted.
        self._lane_stacks, self._stepper, self._visit_kind = [], None, None
        largest = max(engine.largest_cohort for engine in self._engines)
        self._lanes_per_run = min(MAX_LANES, max(largest, *(len(visit.cohort.clients) for visit in visits)))
        if phase.scoring not in self._step_variants:
            self._step_variants[phase.scoring] = self._engines[0].make_step_variants(phase.scoring)
        steps = self._step_variants[phase.scoring]
        self._step_number = torch.zeros(1, dtype=torch.int64, device=visits[0].rows.weights.device)
        self._lane_stacks = self._stack_lanes([visit or _make_idle_visit(visits[0]) for visit in pending], steps.plain)
        self._stepper = prepare_stepper(self._lane_stacks, self._step_number, steps.variants)
        self._visit_kind = kind

    def _stack_lanes(self, pending: list[PendingVisit], step: LaneStep) -> list[Lanes]:
        """Stacks of several runs' lanes; a stack per run where the client states need that, or where there is one."""
        data, width = [engine.client_rows for engine in self._engines], self._lanes_per_run

        def make_stacks(runs: int) -> list[Lanes]:
            idle = -len(data) % runs
            rows, visits = data + data[:1] * idle, pending + [_make_idle_visit(pending[0])] * idle
            parts = [slice(start, start + runs) for start in range(0, len(rows), runs)]
            return [make_lanes(rows[part], visits[part], width, step) for part in parts]

        try:
            return make_stacks(min(RUNS_PER_STACK, MAX_LANES // width) if len(data) > 1 and width < MAX_LANES else 1)
        except CannotShareLanes:
            return make_stacks(1)

    def _run_in_waves(self, pending: list[PendingVisit | None]) -> list[LocalResult | None]:
        """Every local step, in several waves where a cohort has more clients than there are lanes."""
        starts = range(0, max(len(visit.cohort.clients) for visit in pending if visit is not None), self._lanes_per_run)
        waves: list[list[LocalResult]] = [[] for _ in pending]
        for start in starts:
            wave = self._run_wave([_select_clients(visit, start, self._lanes_per_run) for visit in pending])
            for results, result in zip(waves, wave, strict=True):
                if result is not None:
                    # The next wave overwrites the lanes.
                    results.append(result if len(starts) == 1 else tree_map(torch.clone, result))
        return [
            tree_map(lambda *leaves: torch.cat(leaves), *results) if len(results) > 1 else next(iter(results), None)
            for results in waves
        ]

    def _run_wave(self, pending: list[PendingVisit | None]) -> list[LocalResult | None]:
        """Every local step of as many clients as there are lanes."""
        waiting = iter(pending)
        placed: list[tuple[Lanes, int, PendingVisit | None]] = []
        for lanes in self._lane_stacks:
            visits = [next(waiting, None) for _ in lanes.data]
            lanes.fill_visits(visits)
            placed += [(lanes, run, visit) for run, visit in enumerate(visits)]
        assert self._stepper is not None
        self._step_number.zero_()
        self._stepper.start_visit()
        for _ in range(self._lane_stacks[0].losses.shape[1]):
            self._stepper.run_step()
        return [
            None if visit is None else lanes.read_result(run, len(visit.cohort.clients))
            for lanes, run, visit in placed[: len(pending)]
        ]


@torch.no_grad()
def _uses_randomness(network: ModuleNetwork, rows: Tensor) -> bool:
    """Whether a pass in training mode changes a random generator."""
    cuda = network.device.type == "cuda"

    def read_generators() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(network.device)] if cuda else [])]

    with torch.random.fork_rng([network.device] if cuda else []):
        states = read_generators()
        network.forward_pass(network.initial_model(), rows)
        return not all(map(torch.equal, states, read_generators()))


def _describe_visit(pending: PendingVisit) -> object:
    """What the lanes must fit: visits with equal descriptions may use the same lanes."""
    phase = pending.download.phase
    shapes = tuple(leaf.shape[1:] for leaf in tree_leaves((pending.local, pending.rows)))
    return phase.scoring, phase.local_steps, phase.batch, shapes


def _make_idle_visit(pending: PendingVisit) -> PendingVisit:
    """A visit for lanes whose result nobody reads: it uses the first row only, which every run's data has."""
    return pending._replace(rows=pending.rows._replace(rows=torch.zeros_like(pending.rows.rows)))


def _select_clients(pending: PendingVisit | None, start: int, count: int) -> PendingVisit | None:
    """Some of a cohort's clients; None where there are none left."""
    if pending is None or start >= len(pending.cohort.clients):
        return None
    if len(pending.cohort.clients) <= count:
        return pending
    cohort = pending.cohort._replace(clients=pending.cohort.clients[start : start + count])
    local, rows = tree_map(lambda leaf: leaf[start : start + count], (pending.local, pending.rows))
    return pending._replace(cohort=cohort, local=local, rows=rows)
