"""Run groups: runs of the same shape that share one CUDA graph, with their clients side by side in every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from fedauc.engines.cuda.engine import MAX_LANES, RUNS_PER_STACK, GraphedEngine, SharedGraph
from fedauc.experiments.config import Config
from fedauc.experiments.run_loop import Observer, save_before_interrupts
from fedauc.experiments.runner import DataCache, Run, assemble_run
from fedauc.guards import DivergenceMonitor, TrainingStopped
from fedauc.interfaces import Visits
from fedauc.training import PendingRound, State, Training
from fedauc.trees import is_empty


def plan_run_groups(configs: Mapping[str, Config], cache: DataCache) -> list[list[str]]:
    """The names of the runs that share a graph: those of one shape, as many as have lanes; the others are alone.

    Runs with a state per client are at most as many as one stack of runs holds: six of ResNet-18 with 100 clients took
    94 GB. A configuration that does not fit its data is a `ValueError`.
    """
    names_by_shape: dict[Hashable, list[str]] = {}
    largest: dict[Hashable, int] = {}
    for name, config in configs.items():
        assembly = assemble_run(config, cache)[1]
        training = assembly.training
        shape = _graph_shape(training) or name
        names_by_shape.setdefault(shape, []).append(name)
        # Runs of other engines are alone anyway.
        width = training.engine.largest_cohort if isinstance(training.engine, GraphedEngine) else MAX_LANES
        runs = max(1, MAX_LANES // width)
        limit = min(runs, RUNS_PER_STACK) if _keeps_client_states(training, assembly.start) else runs
        largest[shape] = min(largest.get(shape, MAX_LANES), limit)
    return [group for shape, names in names_by_shape.items() for group in _split_names(names, largest[shape])]


def train_run_group(runs: Mapping[str, Run], observer: Callable[[str], Observer]) -> dict[str, str]:
    """Train a group of runs to their ends; return why training had to be stopped, by the run's name."""
    unfinished = {name: run for name, run in runs.items() if not run.folder.done}
    if len(unfinished) > 1:
        return RunGroup(unfinished, observer).train_to_end()
    for name, run in unfinished.items():
        observe = observer(name)
        try:
            run.train_to_end(observe)
        except TrainingStopped as reason:
            observe(run.loop.progress._replace(stopped=True))
            return {name: str(reason)}
    return {}


class RunGroup:
    """Unfinished runs that share a graph; the lanes of a run that is stopped stay empty.

    The runs train rounds of one kind at a time, whatever their numbers: a graph holds one kind, so a run that comes to
    another kind waits for those still at the current one. The time of a round is divided evenly among the runs in it,
    so that their seconds add up to those on the clock.
    """

    def __init__(self, runs: Mapping[str, Run], observer: Callable[[str], Observer]) -> None:
        self._runs = dict(runs)
        self._observers = {name: observer(name) for name in runs}
        trainings = {name: self._training(name) for name in runs}
        self._monitors = {name: DivergenceMonitor(part.algorithm, part.advice) for name, part in trainings.items()}
        engines = [self._training(name).engine for name in runs]
        self._graph = SharedGraph([engine for engine in engines if isinstance(engine, GraphedEngine)])
        self._active = {name: run.loop for name, run in runs.items()}
        self._kind: Hashable = None
        self._stopped: dict[str, str] = {}

    def train_to_end(self) -> dict[str, str]:
        """Train all runs to their ends; return why training had to be stopped, by the run's name."""
        for name, loop in self._active.items():
            self._observers[name](loop.progress)
        self._finish_runs()
        with save_before_interrupts(self._active.values()) as check_signals:
            while self._active:
                self._train_round(self._choose_runs())
                check_signals()
        return self._stopped

    def _choose_runs(self) -> list[str]:
        """The runs that train next: those at the last kind of round, or else at that of the run furthest behind."""
        phases = {name: self._training(name).plan.phase(loop.state.round) for name, loop in self._active.items()}
        kinds = {name: (phase.scoring, phase.local_steps) for name, phase in phases.items()}
        if self._kind not in kinds.values():
            self._kind = kinds[min(self._active, key=lambda name: self._active[name].state.round)]
        return [name for name, kind in kinds.items() if kind == self._kind]

    def _train_round(self, names: list[str]) -> None:
        begin = time.perf_counter()
        pending = {name: self._training(name).open_round(self._active[name].state) for name in names}
        visits = self._visit_clients(pending)
        finished = {name: self._training(name).close_round(pending[name], visits[name]) for name in names}
        for name, round in finished.items():
            with self._stop_diverged_run(name):
                self._monitors[name].check_round(round.phase, round.state.server.shared, round.diagnostics)
        # At the end of a cycle the monitors have waited for the device, so no evaluation waits for other runs' work.
        seconds = (time.perf_counter() - begin) / len(names)
        for name in [name for name in names if name in self._active]:
            with self._stop_diverged_run(name):
                self._active[name].advance(finished[name], seconds)
        for name in [name for name in names if name in self._active]:
            self._observers[name](self._active[name].progress)
        self._finish_runs()

    def _visit_clients(self, pending: Mapping[str, PendingRound]) -> dict[str, Visits | None]:
        """The visits of one round by run; None for a run whose round no client takes part in."""
        due = {name: (round.download, round.cohort) for name, round in pending.items() if round.download is not None}
        if not due:
            return dict.fromkeys(pending)
        return dict(zip(self._runs, self._graph.visit([due.get(name) for name in self._runs]), strict=True))

    @contextmanager
    def _stop_diverged_run(self, name: str) -> Iterator[None]:
        try:
            yield
        except TrainingStopped as reason:
            loop = self._active.pop(name)
            loop.fail(reason)
            self._stopped[name] = str(reason)
            self._observers[name](loop.progress._replace(stopped=True))

    def _finish_runs(self) -> None:
        for name in [name for name, loop in self._active.items() if loop.is_over]:
            self._runs[name].write_result()
            del self._active[name]

    def _training(self, name: str) -> Training:
        return self._runs[name].assembly.training


def _keeps_client_states(training: Training, start: State) -> bool:
    """Whether clients keep something from visit to visit, for the algorithm or its wrappers."""
    download = training.open_round(start).download
    # Nobody may come in the first round.
    return download is None or not is_empty(training.algorithm.initial_client_state(download))


def _graph_shape(training: Training) -> Hashable:
    """What runs that share a graph have in common: the engine's shape and the kinds of rounds; None for other engines.

    They have as many rounds without those that only score, and cohorts of about the same size: smaller ones leave
    lanes empty. Where their stages or cycles differ, a run may wait for the others.
    """
    if not isinstance(training.engine, GraphedEngine):
        return None
    plan, setting, width = training.plan, training.setting, training.engine.largest_cohort
    learning_rounds = sum(stage.cycles for stage in plan.stages) * setting.cycle_length
    steps = tuple(stage.local_steps for stage in plan.stages)
    return training.engine.graph_signature, learning_rounds, steps, (width - 1).bit_length(), setting.batch


def _split_names(names: list[str], largest: int) -> list[list[str]]:
    """The names in groups of at most `largest`, in full stacks of runs as long as there are enough.

    No run is left alone if it could share: a run by itself is compiled by itself.

    >>> _split_names(list("abcdefghi"), 7)
    [['a', 'b', 'c', 'd', 'e', 'f'], ['g', 'h', 'i']]
    >>> _split_names(list("abcdefg"), 7)
    [['a', 'b', 'c'], ['d', 'e', 'f', 'g']]
    """
    size = largest - largest % RUNS_PER_STACK or largest
    starts = list(range(0, len(names), size))
    if len(starts) > 1 and size > 2 and len(names) - starts[-1] == 1:
        starts[-1] -= size // 2
    return [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
