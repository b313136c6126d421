"""The graphed engine: one client's local step, compiled, and a whole cohort's captured in one CUDA graph.

Clients' data stay on the device; so do averaging, pools and batch numbers, and nothing waits for the device inside a
round. Clients of several runs of one shape may share a graph (`Together`), which fills the device better still. On a
CPU the lanes run one after another, which is slower than the loop and serves to test them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.engines.batched import Advanced, Opened, StackedEngine
from fedauc.engines.capture import Compiled, Taking, kept, ready
from fedauc.engines.kernels import Unsupported
from fedauc.engines.lanes import Data, Lanes, Step, Unshared, make_lanes
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Cohort, Download, Setting, Visits
from fedauc.network import ModuleNetwork, signature
from fedauc.trees import tree_leaves, tree_map

WIDTH = 64
"""Clients of one run that are stepped side by side; larger cohorts come in waves."""

RUNS = 3
"""Runs in one stack of lanes. Where fewer are left, lanes rest: every size of stack is compiled by itself."""

_known: dict[object, Compiled] = {}
"""Steps that later runs of the same shape take over."""


class Steps(NamedTuple):
    """A local step, and the ways to take it, from the fastest to the one that always works."""

    plain: Step
    ways: tuple[Step | Compiled, ...]


@final
class GraphedEngine(StackedEngine):
    """Any module without randomness of its own; results equal the loop's up to the order of sums.

    `widest` is the largest cohort to expect: lanes are made once, when the first comes, which may be smaller.
    """

    name: ClassVar[str] = "graphed"

    def __init__(
        self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting, compiled: bool = True
    ) -> None:
        Simulator.__init__(self, algorithm, network, clients, setting)
        if _draws(network, self._inputs[:2]):
            raise Unsupported("it draws random numbers (dropout), which a replayed graph would not draw by key")
        self.compiled = compiled
        self.widest = 1
        # A proxy, so that lanes, which are whole models, go when the engine goes.
        self._alone = SharedGraph([weakref.proxy(self)])

    @property
    def data(self) -> Data:
        """Every client's rows."""
        return Data(self._inputs, self._labels)

    @property
    def twin(self) -> tuple[object, ...]:
        """Engines with the same may share a graph."""
        network, rows = self._network, self._inputs
        ways = (network.dtype, network.mixed, network.device, network.channels_last)
        algorithm = self._algorithm.without_server_settings()
        return algorithm, signature(network.plain), *ways, rows.dtype, rows.shape[1:], self._setting.augment

    def steps(self, scoring: bool) -> Steps:
        """The local step, and the ways to take it."""
        stacked, single = (Step(self._algorithm, self._network, way) for way in (True, False))
        # A scoring cycle is too short to compile for.
        fast = [self._kept(step) for step in (stacked, single)] if self.compiled and not scoring else []
        return Steps(single, (*fast, stacked, single))

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit the cohort side by side."""
        (visits,) = self._alone.visit([(download, cohort)])
        assert visits is not None
        return visits

    def _kept(self, step: Step) -> Compiled:
        return kept(_known, (self.twin, step.stacked), lambda: Compiled(step))

    def _advance(self, opened: Opened) -> Advanced:
        (advanced,) = self._alone.advance([opened])
        assert advanced is not None
        return advanced


class SharedGraph:
    """Runs whose clients share a graph: one step and model; seeds, learning rates, cycles and data may differ."""

    def __init__(self, engines: Sequence[GraphedEngine]) -> None:
        self._engines = list(engines)
        self._steps: dict[bool, Steps] = {}
        self._kind: object = None
        self._stacks: list[Lanes] = []
        self._taking: Taking | None = None
        self._at = torch.zeros(1, dtype=torch.int64)
        self._width = 0
        for engine in self._engines[1:]:
            if engine.twin != self._engines[0].twin:
                bound = "they need one local step, model and shape of rows: run these apart"
                raise ValueError(f"runs cannot share a graph; {bound}")

    @torch.no_grad()
    def visit(self, visits: Sequence[tuple[Download, Cohort] | None]) -> list[Visits | None]:
        """One visit of every run that has one, all at once; the others wait."""
        pairs = zip(self._engines, visits, strict=True)
        opened = [None if visit is None else engine.open(*visit) for engine, visit in pairs]
        places = zip(self._engines, opened, self.advance(opened), strict=True)
        return [None if mine is None or after is None else engine.close(mine, after) for engine, mine, after in places]

    def advance(self, opened: list[Opened | None]) -> list[Advanced | None]:
        """Every local step; visits of different kinds (a run that still scores) take turns."""
        found: list[Advanced | None] = [None] * len(opened)
        for kind in dict.fromkeys(_kind(mine) for mine in opened if mine is not None):
            same = [mine if mine is not None and _kind(mine) == kind else None for mine in opened]
            found = [after or before for after, before in zip(self._advance(same, kind), found, strict=True)]
        return found

    def _advance(self, opened: list[Opened | None], kind: object) -> list[Advanced | None]:
        """In waves where a cohort has more clients than there are lanes."""
        self._fit(opened, kind)
        starts = range(0, max(len(mine.cohort.clients) for mine in opened if mine is not None), self._width)
        waves = []
        for start in starts:
            wave = self._wave([_part(mine, start, self._width) for mine in opened])
            # The next wave overwrites the lanes.
            waves.append(wave if len(starts) == 1 else [_copy(after) for after in wave])
        return [_joined([wave[run] for wave in waves]) for run in range(len(opened))]

    def _fit(self, opened: list[Opened | None], kind: object) -> None:
        """Lanes for this kind of visit, made when it first comes."""
        if self._kind == kind:
            return
        found = [mine for mine in opened if mine is not None]
        phase = found[0].download.phase
        # The old lanes go first: they hold whole models. Nothing fits until all is ready: compiling may be interrupted.
        self._stacks, self._taking, self._kind = [], None, None
        widest = max(engine.widest for engine in self._engines)
        self._width = min(WIDTH, max(widest, *(len(mine.cohort.clients) for mine in found)))
        if phase.scoring not in self._steps:
            self._steps[phase.scoring] = self._engines[0].steps(phase.scoring)
        self._at = torch.zeros(1, dtype=torch.int64, device=found[0].rows.weights.device)
        self._stacks = self._stacked([mine or _resting(found[0]) for mine in opened], self._steps[phase.scoring])
        self._taking = ready(self._stacks, self._at, self._steps[phase.scoring].ways)
        self._kind = kind

    def _stacked(self, opened: list[Opened], steps: Steps) -> list[Lanes]:
        """Lanes of several runs together; of each by itself, where its states need that, or where there is one."""
        data = [engine.data for engine in self._engines]

        def stacks(most: int) -> list[Lanes]:
            idle = -len(data) % most
            rows, visits = data + data[:1] * idle, opened + [_resting(opened[0])] * idle
            parts = [slice(start, start + most) for start in range(0, len(rows), most)]
            return [make_lanes(rows[part], visits[part], self._width, steps.plain) for part in parts]

        try:
            return stacks(min(RUNS, WIDTH // self._width) if len(data) > 1 and self._width < WIDTH else 1)
        except Unshared:
            return stacks(1)

    def _wave(self, opened: list[Opened | None]) -> list[Advanced | None]:
        """Every local step of as many clients as there are lanes."""
        waiting, places = list(opened), []
        for lanes in self._stacks:
            mine, waiting = waiting[: len(lanes.data)], waiting[len(lanes.data) :]
            lanes.fill(mine)
            places += [(lanes, run, each) for run, each in enumerate(mine)]
        assert self._taking is not None
        self._at.zero_()
        self._taking.settle()
        for _ in range(self._stacks[0].losses.shape[1]):
            self._taking.step()
        return [None if mine is None else lanes.result(run, len(mine.cohort.clients)) for lanes, run, mine in places]


@torch.no_grad()
def _draws(network: ModuleNetwork, rows: Tensor) -> bool:
    """Whether a pass in training mode moves a random generator."""
    cuda = network.device.type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(network.device)] if cuda else [])]

    with torch.random.fork_rng([network.device] if cuda else []):
        before = states()
        network.forward_pass(network.state(), rows)
        return not all(map(torch.equal, before, states()))


def _kind(opened: Opened) -> object:
    """Visits of one kind fit the same lanes."""
    phase = opened.download.phase
    shapes = tuple(leaf.shape[1:] for leaf in tree_leaves((opened.local, opened.rows)))
    return phase.scoring, phase.local_steps, phase.batch, shapes


def _resting(opened: Opened) -> Opened:
    """Another run's visit on the first row alone, which every run's data has."""
    return opened._replace(rows=opened.rows._replace(rows=torch.zeros_like(opened.rows.rows)))


def _part(opened: Opened | None, start: int, width: int) -> Opened | None:
    """Some of a cohort's clients; nothing where there are none left."""
    if opened is None or start >= len(opened.cohort.clients):
        return None
    if len(opened.cohort.clients) <= width:
        return opened
    cohort = opened.cohort._replace(clients=opened.cohort.clients[start : start + width])
    local, rows = tree_map(lambda leaf: leaf[start : start + width], (opened.local, opened.rows))
    return opened._replace(cohort=cohort, local=local, rows=rows)


def _copy(advanced: Advanced | None) -> Advanced | None:
    return None if advanced is None else tree_map(torch.clone, advanced)


def _joined(waves: list[Advanced | None]) -> Advanced | None:
    found = [wave for wave in waves if wave is not None]
    return tree_map(lambda *leaves: torch.cat(leaves), *found) if len(found) > 1 else (found[0] if found else None)
