"""The round loop: one generator that knows no client data. The caller evaluates, logs, saves and stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedauc.guards import check_round
from fedauc.interfaces import Algorithm, Cohort, Engine, Model, Phase, Schedule, Server, Setting, Upload
from fedauc.ledger import Ledger, Traffic
from fedauc.stages import Plan, StageOutput
from fedauc.trees import Tree, tree_map


class Average(NamedTuple):
    """The running sum of a stage's models and how many it holds; `()` while the stage output is its last model."""

    total: Tree
    models: Tensor


class State(NamedTuple):
    """Everything a run needs to go on from a round, besides the engine's memories and the ledger."""

    round: int
    server: Server
    average: Tree = ()


class Round(NamedTuple):
    """A finished round: what happened, and the state after it."""

    phase: Phase
    cohort: Cohort
    value: float | None
    vitals: dict[str, float]
    traffic: Traffic
    state: State


@dataclass(frozen=True)
class Training:
    """A run's parts, put together. `start` gives the first state; `rounds` goes on from any state."""

    algorithm: Algorithm
    engine: Engine
    schedule: Schedule
    plan: Plan
    setting: Setting
    output: StageOutput
    ledger: Ledger

    def start(self, model: Model) -> State:
        """The state before the first round."""
        return State(0, self.algorithm.init(self.setting, model))

    def rounds(self, state: State) -> Iterator[Round]:
        """Run from a state to the plan's end, one round at a time."""
        for number in range(state.round, self.plan.rounds):
            finished = self._round(self.plan.phase(number), self.schedule.cohort(number), state)
            check_round(self.algorithm, finished.phase, finished.state.server.shared, finished.vitals)
            state = finished.state
            yield finished

    def _round(self, phase: Phase, cohort: Cohort, state: State) -> Round:
        server = state.server
        if phase.starts_stage:
            server = server._replace(anchor=server.shared)
        reduced, value = self._visit(phase, cohort, server)
        server = self.algorithm.merge(self.setting, server, reduced, cohort, phase)
        server, average = self._average(phase, server, state.average)
        vitals = self.algorithm.vitals(server.shared)
        return Round(phase, cohort, value, vitals, self.ledger.traffic, State(phase.round + 1, server, average))

    def _visit(self, phase: Phase, cohort: Cohort, server: Server) -> tuple[Upload, float | None]:
        if not cohort.clients:
            self.ledger.absent(cohort)
            return Upload(), None
        order = self.algorithm.dispatch(self.setting, server, cohort, phase)
        visits = self.engine.visit(order, cohort)
        self.ledger.record(order, visits.upload, cohort)
        return visits.upload, None if visits.value is None else float(visits.value)

    def _average(self, phase: Phase, server: Server, average: Tree) -> tuple[Server, Tree]:
        """Collect what the stage's output needs, and put it in place of the last model when the stage ends."""
        if self.output == "last" or phase.scoring:
            return server, average
        if self.output == "round_mean" or phase.ends_cycle:
            average = _add(average, server.shared)
        if not phase.ends_stage:
            return server, average
        mean = tree_map(lambda total, last: (total / average.models).to(last), average.total, server.shared)
        return server._replace(shared=self.algorithm.settle(server.shared, mean)), ()


def _add(average: Tree, shared: Tree) -> Average:
    one = torch.ones((), dtype=torch.int64)
    # In float64: a running sum in bfloat16 stands still after 256 rounds.
    shared = tree_map(torch.Tensor.double, shared)
    if isinstance(average, Average):
        return Average(tree_map(torch.add, average.total, shared), average.models + one)
    return Average(shared, one)
