"""The rounds of a training: one generator that sees no client data. Its caller evaluates, logs, saves and stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.guards import Advice, DivergenceMonitor
from fedauc.interfaces import (
    Algorithm,
    Cohort,
    Download,
    Engine,
    Model,
    Phase,
    Schedule,
    Server,
    ServerOptimizer,
    Setting,
    Upload,
    Visits,
)
from fedauc.ledger import Ledger, Traffic
from fedauc.privacy.accounting import PrivacyAccount
from fedauc.server_optimizers.plain import Plain
from fedauc.stages import Plan, StageOutput
from fedauc.trees import Tree, is_empty, tree_map, tree_shapes
from fedauc.uploads import UploadPipeline


class Average(NamedTuple):
    """The running sum of a stage's models and how many it holds; `()` while the stage output is its last model.

    An exponential moving average multiplies both by its decay before a model is added.
    """

    total: Tree
    models: Tensor


class State(NamedTuple):
    """Everything that training needs to continue after a round, besides the engine's client states and the ledger.

    `transforms` is what the upload transforms keep at the server, such as the noise of earlier rounds.
    """

    round: int
    server: Server
    average: Tree = ()
    optimizer: Tree = ()
    transforms: Tree = ()


class PendingRound(NamedTuple):
    """A round that is under way: the state before it, and which clients were sent what; no download without clients."""

    phase: Phase
    cohort: Cohort
    server: Server
    state: State
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
    uploads: UploadPipeline = UploadPipeline()
    server_optimizer: ServerOptimizer = Plain()
    ema_decay: float = 0.9
    has_scaled_inputs: bool = False
    account: PrivacyAccount | None = None

    @property
    def advice(self) -> Advice:
        """The values that the advice to the user names where training diverges."""
        server_rate = getattr(self.server_optimizer, "learning_rate", None)
        return Advice(self.plan.stages[0].learning_rate, self.setting.weighting, server_rate, self.has_scaled_inputs)

    def initial_state(self, model: Model) -> State:
        """The state before the first round."""
        server = self.algorithm.init(self.setting, model)
        transforms = self.uploads.initial_server_state(server.shared)
        return State(0, server, (), self.server_optimizer.init(model.weights), transforms)

    def rounds(self, state: State) -> Iterator[Round]:
        """Run from a state to the plan's end, one round at a time."""
        monitor = DivergenceMonitor(self.algorithm, self.advice)
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
        if self.uploads.has_fixed_denominator:
            cohort = self.uploads.skip_small_cohort(cohort.fix_denominator())
        download = self.algorithm.dispatch(self.setting, server, cohort, phase) if cohort.clients else None
        if download is not None and not is_empty(announced := self.uploads.announce_state(state.transforms)):
            download = download._replace(announced=announced)
        return PendingRound(phase, cohort, server, state, download)

    def close_round(self, pending: PendingRound, visits: Visits | None) -> Round:
        """The server's second half: count the traffic, and merge the uploads (`visits` is None without clients)."""
        phase, cohort, server, state, download = pending
        reduced, loss, present, size = visits or Visits(Upload(), None)
        cohort = present or cohort
        if download is None or not cohort.clients:
            self.ledger.record_empty_round(cohort)
        else:
            self.ledger.record_round(download, reduced, cohort, size)
        mean = reduced.mean
        if is_empty(mean) and self.uploads.has_fixed_denominator and not phase.scoring:
            # The sum over nobody is zero, and it is released with noise like any other.
            mean = self.uploads.zero_mean(server.shared)
        mean, transforms = self.uploads.transform_mean(mean, state.transforms, cohort, phase, server.shared)
        change, optimizer = self._change_shared(mean, state.optimizer)
        server = self.algorithm.merge(self.setting, server, reduced._replace(mean=change), cohort, phase)
        server, average = self._update_average(phase, server, state.average)
        diagnostics = self.algorithm.diagnostics(server.shared)
        state = State(phase.round + 1, server, average, optimizer, transforms)
        return Round(phase, cohort, loss, diagnostics, self.ledger.traffic, state)

    @property
    def is_private(self) -> bool:
        """Whether clients are protected by noise; a run with an infinite budget is not."""
        return self.account is not None and self.account.noise_multiplier > 0

    def spent_epsilon(self, rounds: int, evaluations: int = 0) -> float | None:
        """ε of everything that was released after so many rounds and evaluations; None for a run without an account.

        Evaluations on rows that count as public cost nothing.
        """
        if self.account is None:
            return None
        counted = 0 if self.account.evaluation_noise is None else evaluations
        return self.account.epsilon(self.account.count_participations(rounds), counted)

    def averaged_shared(self, state: State) -> Tree:
        """The shared state with the average that the stage would end with now; the last one where there is none."""
        last, average = state.server.shared, state.average
        if not isinstance(average, Average):
            return last
        mean = tree_map(lambda total, leaf: (total / average.models).to(leaf), average.total, last)
        return self.algorithm.stage_output(last, mean)

    def _change_shared(self, mean: Tree, optimizer: Tree) -> tuple[Tree, Tree]:
        """The change of the shared state that the algorithm merges, and the server optimizer's new state."""
        if is_empty(mean) or isinstance(self.server_optimizer, Plain):
            return mean, optimizer
        model = self.algorithm.extract_model(mean)
        updated: Any = self.server_optimizer.update(model.weights, optimizer)
        is_pair = isinstance(updated, tuple) and len(updated) == 2
        if not is_pair or tree_shapes(updated[0]) != tree_shapes(model.weights):
            needs = f"it must return a pair (change, state), with a change of shape {tree_shapes(model.weights)}"
            name = self.server_optimizer.name
            raise ValueError(f"server optimizer {name!r} has returned {tree_shapes(updated)}; {needs}")
        weights, optimizer = updated
        return self.algorithm.replace_model(mean, model._replace(weights=weights)), optimizer

    def _update_average(self, phase: Phase, server: Server, average: Tree) -> tuple[Server, Tree]:
        """Add the model to the stage's mean, which replaces the last model when the stage ends."""
        if self.stage_output == "last" or phase.scoring:
            return server, average
        if self.stage_output in ("round_mean", "ema") or phase.ends_cycle:
            # In float64: a running sum in bfloat16 no longer changes after 256 rounds.
            shared, count = tree_map(torch.Tensor.double, server.shared), torch.ones((), dtype=torch.int64)
            if isinstance(average, Average):
                total, models = average
                if self.stage_output == "ema":
                    total, models = tree_map(lambda leaf: self.ema_decay * leaf, (total, models.double()))
                shared, count = tree_map(torch.add, total, shared), models + count
            average = Average(shared, count)
        if not phase.ends_stage:
            return server, average
        averaged = self.averaged_shared(State(phase.round + 1, server, average))
        return server._replace(shared=averaged), ()
