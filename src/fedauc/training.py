"""The rounds of a training: one generator that sees no client data. Its caller evaluates, logs, saves and stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedauc.guards import DivergenceMonitor
from fedauc.interfaces import (
    Algorithm,
    Cohort,
    Download,
    Engine,
    Model,
    Phase,
    Schedule,
    Server,
    Setting,
    Upload,
    Visits,
)
from fedauc.ledger import Ledger, Traffic
from fedauc.stages import Plan, StageOutput
from fedauc.trees import Tree, tree_map


class Average(NamedTuple):
    """The running sum of a stage's models and how many it holds; `()` while the stage output is its last model."""

    total: Tree
    models: Tensor


class State(NamedTuple):
    """Everything that training needs to continue after a round, besides the engine's client states and the ledger."""

    round: int
    server: Server
    average: Tree = ()


class PendingRound(NamedTuple):
    """A round that is under way: which clients were sent what. Without clients there is no download."""

    phase: Phase
    cohort: Cohort
    server: Server
    average: Tree
    download: Download | None


class Round(NamedTuple):
    """A finished round: what happened, and the state after it. `loss` and `diagnostics` stay on the device."""

    phase: Phase
    cohort: Cohort
    loss: Tensor | None
    diagnostics: dict[str, Tensor]
    traffic: Traffic
    state: State

    @property
    def loss_value(self) -> float | None:
        """The cohort's mean loss before its first step, where the engine knows it."""
        return None if self.loss is None else float(self.loss)

    @property
    def diagnostic_values(self) -> dict[str, float]:
        """The algorithm's diagnostics as plain numbers."""
        return {name: float(value) for name, value in self.diagnostics.items()}


@dataclass(frozen=True)
class Training:
    """The parts of a training. `initial_state` gives the first state; `rounds` continues from any state."""

    algorithm: Algorithm
    engine: Engine
    schedule: Schedule
    plan: Plan
    setting: Setting
    stage_output: StageOutput
    ledger: Ledger

    def initial_state(self, model: Model) -> State:
        """The state before the first round."""
        return State(0, self.algorithm.init(self.setting, model))

    def rounds(self, state: State) -> Iterator[Round]:
        """Run from a state to the plan's end, one round at a time."""
        monitor = DivergenceMonitor(self.algorithm)
        for _ in range(state.round, self.plan.total_rounds):
            pending = self.open_round(state)
            visits = None if pending.download is None else self.engine.visit(pending.download, pending.cohort)
            finished = self.close_round(pending, visits)
            monitor.check_round(finished.phase, finished.state.server.shared, finished.diagnostics)
            state = finished.state
            yield finished

    def open_round(self, state: State) -> PendingRound:
        """The server's first half of the next round: who takes part, and what they are sent."""
        phase, cohort, server = self.plan.phase(state.round), self.schedule.cohort(state.round), state.server
        if phase.starts_stage:
            server = server._replace(anchor=server.shared)
        download = self.algorithm.dispatch(self.setting, server, cohort, phase) if cohort.clients else None
        return PendingRound(phase, cohort, server, state.average, download)

    def close_round(self, pending: PendingRound, visits: Visits | None) -> Round:
        """The server's second half: count the traffic, and merge the uploads (`visits` is None without clients)."""
        phase, cohort, server, average, download = pending
        reduced, loss, present = visits or Visits(Upload(), None)
        cohort = present or cohort
        if download is None or not cohort.clients:
            self.ledger.record_empty_round(cohort)
        else:
            self.ledger.record_round(download, reduced, cohort)
        server = self.algorithm.merge(self.setting, server, reduced, cohort, phase)
        server, average = self._update_average(phase, server, average)
        diagnostics = self.algorithm.diagnostics(server.shared)
        return Round(phase, cohort, loss, diagnostics, self.ledger.traffic, State(phase.round + 1, server, average))

    def _update_average(self, phase: Phase, server: Server, average: Tree) -> tuple[Server, Tree]:
        """Add the model to the stage's mean, which replaces the last model when the stage ends."""
        if self.stage_output == "last" or phase.scoring:
            return server, average
        if self.stage_output == "round_mean" or phase.ends_cycle:
            # In float64: a running sum in bfloat16 no longer changes after 256 rounds.
            shared, count = tree_map(torch.Tensor.double, server.shared), torch.ones((), dtype=torch.int64)
            if isinstance(average, Average):
                shared, count = tree_map(torch.add, average.total, shared), average.models + count
            average = Average(shared, count)
        if not phase.ends_stage:
            return server, average
        mean = tree_map(lambda total, last: (total / average.models).to(last), average.total, server.shared)
        return server._replace(shared=self.algorithm.stage_output(server.shared, mean)), ()
