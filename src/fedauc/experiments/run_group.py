"""Runs of one shape, round by round together, their clients side by side in one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from fedauc.engines.graphed import RUNS, WIDTH, GraphedEngine, SharedGraph
from fedauc.experiments.config import Config
from fedauc.experiments.runner import DataCache, Observer, Run, assemble_run
from fedauc.guards import DivergenceMonitor, TrainingStopped
from fedauc.interfaces import Algorithm, Visits
from fedauc.training import PendingRound, Training


def plan_run_groups(configs: Mapping[str, Config], load: DataCache) -> list[list[str]]:
    """Which runs share a graph, by name: those of one shape, as many as have lanes; the others are alone.

    Of runs that keep a memory per client there is one stack at most: six of ResNet-18 with 100 clients took 94 GB. What
    does not fit a run is raised on the way.
    """
    found: dict[Hashable, list[str]] = {}
    most: dict[Hashable, int] = {}
    for name, config in configs.items():
        training = assemble_run(config, load)[1].training
        key = _graph_shape(training) or name
        found.setdefault(key, []).append(name)
        # Other engines' runs are alone anyway.
        widest = training.engine.widest if isinstance(training.engine, GraphedEngine) else WIDTH
        room = max(1, WIDTH // widest)
        heavy = type(training.algorithm).initial_client_state is not Algorithm.initial_client_state
        most[key] = min(most.get(key, WIDTH), min(room, RUNS) if heavy else room)
    return [part for key, names in found.items() for part in _split_names(names, most[key])]


def train_run_group(runs: Mapping[str, Run], observer: Callable[[str], Observer]) -> dict[str, str]:
    """Take a group of runs to their ends; say which could not go on, and why."""
    going = {name: run for name, run in runs.items() if not run.folder.done}
    if len(going) > 1:
        return RunGroup(going, observer).go()
    for name, run in going.items():
        observe = observer(name)
        try:
            run.train_to_end(observe)
        except TrainingStopped as reason:
            observe(run.progress._replace(stopped=True))
            return {name: str(reason)}
    return {}


class RunGroup:
    """Unfinished runs that share a graph; one that stops leaves its lanes empty.

    Rounds of one kind are taken together, whatever their numbers: lanes are made anew for another kind, so a run that
    comes to one waits until nobody is left at this. What a round takes is shared evenly among the runs in it, so that
    their seconds add up to those on the clock.
    """

    def __init__(self, runs: Mapping[str, Run], observer: Callable[[str], Observer]) -> None:
        self._runs = dict(runs)
        self._observers = {name: observer(name) for name in runs}
        self._watches = {name: DivergenceMonitor(self._training(name).algorithm) for name in runs}
        self._together = SharedGraph([_graphed(self._training(name)) for name in runs])
        self._going = list(runs)
        self._kind: Hashable = None
        self._stopped: dict[str, str] = {}

    def go(self) -> dict[str, str]:
        """Run all to their ends; say which could not go on, and why."""
        for name, run in self._runs.items():
            self._observers[name](run.progress)
            self._leave_if_over(name)
        while self._going:
            self._round(self._turn())
        return self._stopped

    def _turn(self) -> list[str]:
        """Who takes the next round: those at the kind of the last one, or else at that of the run furthest behind."""
        kinds = {name: self._next(name) for name in self._going}
        if self._kind not in kinds.values():
            self._kind = kinds[min(self._going, key=lambda name: self._runs[name].state.round)]
        return [name for name, kind in kinds.items() if kind == self._kind]

    def _next(self, name: str) -> Hashable:
        phase = self._training(name).plan.phase(self._runs[name].state.round)
        return phase.scoring, phase.local_steps

    def _round(self, turn: list[str]) -> None:
        begin = time.perf_counter()
        opened = {name: self._training(name).open_round(self._runs[name].state) for name in turn}
        visits = self._visit(opened)
        finished = {name: self._training(name).close_round(opened[name], visits[name]) for name in turn}
        for name, done in finished.items():
            with self._stopping(name):
                self._watches[name].check_round(done.phase, done.state.server.shared, done.diagnostics)
        # The watch has waited for the device where a cycle ends: no run's evaluation has to wait for the others' work.
        seconds = (time.perf_counter() - begin) / len(turn)
        for name in [name for name in turn if name in self._going]:
            with self._stopping(name):
                self._runs[name].take(finished[name], seconds)
                self._observers[name](self._runs[name].progress)
                self._leave_if_over(name)

    def _visit(self, opened: Mapping[str, PendingRound]) -> dict[str, Visits | None]:
        """The visits of one round; there are none where nobody comes."""
        due = {name: (each.download, each.cohort) for name, each in opened.items() if each.download is not None}
        if not due:
            return dict.fromkeys(opened)
        return dict(zip(self._runs, self._together.visit([due.get(name) for name in self._runs]), strict=True))

    @contextmanager
    def _stopping(self, name: str) -> Iterator[None]:
        try:
            yield
        except TrainingStopped as reason:
            self._runs[name].stop(reason)
            self._stopped[name] = str(reason)
            self._going.remove(name)
            self._observers[name](self._runs[name].progress._replace(stopped=True))

    def _leave_if_over(self, name: str) -> None:
        progress = self._runs[name].progress
        if progress.done == progress.rounds:
            self._runs[name].finish()
            self._going.remove(name)

    def _training(self, name: str) -> Training:
        return self._runs[name].assembly.training


def _graph_shape(training: Training) -> Hashable:
    """What runs that share a graph have in common: the engine's shape and their rounds' kinds; None for other engines.

    They have as many rounds without those that score, and cohorts of about the same size: smaller ones leave lanes
    empty. Where their stages or cycles differ, one may wait for the others.
    """
    if not isinstance(training.engine, GraphedEngine):
        return None
    plan, setting, width = training.plan, training.setting, training.engine.widest
    trained = sum(stage.cycles for stage in plan.stages) * setting.cycle_length
    steps = tuple(stage.local_steps for stage in plan.stages)
    return training.engine.twin, trained, steps, (width - 1).bit_length(), setting.batch


def _graphed(training: Training) -> GraphedEngine:
    assert isinstance(training.engine, GraphedEngine)
    return training.engine


def _split_names(names: list[str], most: int) -> list[list[str]]:
    """The names in parts of at most so many, whole stacks of runs as long as there are enough.

    None is left alone that could have company: a run by itself is compiled by itself.

    >>> _parts(list("abcdefghi"), 7)
    [['a', 'b', 'c', 'd', 'e', 'f'], ['g', 'h', 'i']]
    >>> _parts(list("abcdefg"), 7)
    [['a', 'b', 'c'], ['d', 'e', 'f', 'g']]
    """
    size = most - most % RUNS or most
    starts = list(range(0, len(names), size))
    if len(starts) > 1 and size > 2 and len(names) - starts[-1] == 1:
        starts[-1] -= size // 2
    return [names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
