"""The run loop: what happens after every round of a run, wherever the round was trained.

`fit` uses it without a folder and `Run` with one, a run group drives one loop per run, and the federation's server
uses callbacks of its own for the evaluation and the attendance lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.callbacks.callback import Callback
from fedauc.experiments.callbacks.evaluation import Evaluation, is_evaluation_due
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.evaluation import RecordColumns
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.interrupts import DeferredInterrupts, deliver_signal
from fedauc.experiments.ranks import is_first_rank, maximum_over_ranks
from fedauc.experiments.run_view import RunView
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Model
from fedauc.ledger import Ledger
from fedauc.network import ModuleNetwork
from fedauc.plugins import describe_error, plugin_of_class
from fedauc.training import Round, State, Training
from fedauc.trees import Tree, is_empty


class Progress(NamedTuple):
    """How far a run is: rounds done, rounds in all, the last record, and whether training had to be stopped.

    `column` names the value of the record that a progress bar shows, and `label` is how the bar calls it. `phase` says
    what happens in the next round: training, scoring (clients only score rows), or nothing, as the run is done.
    """

    done: int
    rounds: int
    record: Mapping[str, Any] | None
    stopped: bool = False
    column: str = "auc"
    label: str = "test AUC"
    phase: Literal["training", "scoring", "done"] = "training"


Observer = Callable[[Progress], None]


class RunPaused(Exception):
    """An observer raises this to end the work on a run for now: the run is saved first, and can be resumed."""


class _RunInterrupted(RunPaused):
    """A signal has come in."""


class RunEnd(NamedTuple):
    """How a run ended: its model, the round and record that the model belongs to, and what a result says besides.

    `notes` is empty for a run that went through all its rounds and ends with its last model.
    """

    model: Model
    round: int
    record: Mapping[str, Any] | None
    notes: dict[str, Any]


@dataclass
class RunLoop:
    """A run between two rounds: its state, and what is due after the next one.

    Without a folder nothing is written. `start` is the checkpoint to go on from. `losses` are those since the last
    record, or None where clients report none. `seconds` is the training time so far. With `evaluates_average` the
    average of the stage so far is evaluated instead of the last model. A private run ends before it has spent more than
    `stop_at_epsilon`. `parameters` describe the run, for trackers.
    """

    assembly: Assembly
    start: InitVar[Checkpoint]
    callbacks: Sequence[Callback]
    columns: RecordColumns
    folder: RunFolder | None = None
    checkpointer: Checkpointer | None = None
    clients: Clients | None = None
    reports_losses: bool = True
    evaluates_average: bool = False
    stop_at_epsilon: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self, start: Checkpoint) -> None:
        self.state: State = start.state
        self.stop_reason = start.stop_reason
        self.losses: list[Tensor] | None = None
        if self.reports_losses:
            self.losses = [torch.tensor(loss, dtype=torch.float64) for loss in start.losses]
        self.records: list[dict[str, Any]] = self.folder.read_records() if self.folder else []
        self.seconds = self.folder.training_seconds() if self.folder else 0.0
        self.last_round: Round | None = None
        self.chosen_model: tuple[Model, int] | None = None
        self.live_objects: dict[str, Any] = {}
        stored, names = start.callback_states, _number_callbacks(self.callbacks)
        self._callback_states = {
            name: stored[name] if name in stored else callback.initial_state()
            for name, callback in zip(names, self.callbacks, strict=True)
        }
        self._round_begin: float | None = None
        self._saved_round, self._saved_seconds = self.state.round, self.seconds

    @property
    def training(self) -> Training:
        """The parts that train."""
        return self.assembly.training

    @property
    def network(self) -> ModuleNetwork:
        """The network of the run's models."""
        return self.assembly.network

    @property
    def view(self) -> RunView:
        """The run as its callbacks see it. It is not kept: a cycle of references would hold the data in memory."""
        return RunView(self)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        record = self.records[-1] if self.records else None
        total = self.state.round if self.stop_reason else self.training.plan.total_rounds
        column, name = (next(iter(names), "") for names in (self.columns.values, self.columns.names))
        part, metric = "validation" if name.startswith("validation_") else "test", name.removeprefix("validation_")
        label, phase = f"{part} {'AUC' if metric == 'auc' else metric}", self._next_phase()
        return Progress(self.state.round, total, record, column=column, label=label, phase=phase)

    def _next_phase(self) -> Literal["training", "scoring", "done"]:
        if self.is_over:
            return "done"
        return "scoring" if self.training.plan.phase(self.state.round).scoring else "training"

    @property
    def is_over(self) -> bool:
        """Whether the last round is done, or a callback has stopped the run."""
        return self.stop_reason is not None or self.state.round == self.training.plan.total_rounds

    def evaluated_model(self) -> Model:
        """The model that is evaluated, compared and saved after the last round."""
        last = self.state.server.shared
        shared = self.training.averaged_shared(self.state) if self.evaluates_average else last
        return self.training.algorithm.extract_model(shared)

    def elapsed_seconds(self) -> float:
        """The training time so far, including that of the round under way."""
        return self.seconds + (0.0 if self._round_begin is None else time.perf_counter() - self._round_begin)

    def train_to_end(self, observer: Observer = lambda progress: None) -> None:
        """Train the remaining rounds; the observer is called before the first and after each of them."""
        observer(self.progress)
        with save_before_interrupts([self]) as check_signals:
            begin = time.perf_counter()
            try:
                for finished in [] if self.is_over else self.training.rounds(self.state):
                    self.advance(finished, time.perf_counter() - begin)
                    observer(self.progress)
                    check_signals()
                    if self.is_over:
                        break
                    begin = time.perf_counter()
            except TrainingStopped as reason:
                self.fail(reason)
                raise

    def advance(self, finished: Round, seconds: float) -> None:
        """Go to the state after a round that took so many seconds; call the callbacks, and save where that is due."""
        self._round_begin = time.perf_counter() - seconds
        self.state, self.last_round = finished.state, finished
        if self.losses is not None and finished.loss is not None:
            self.losses.append(finished.loss)
        record_count = len(self.records)
        self._stop_within_budget()
        self._call_hooks("on_round_end")
        self._agree_on_stop()
        self._call_hooks("evaluate_round")
        if len(self.records) > record_count:
            self._call_hooks("on_evaluation")
            self._agree_on_stop()
        self.seconds = self.elapsed_seconds()
        self._round_begin = time.perf_counter()
        if self.is_checkpoint_due(finished):
            self.save()
        self.seconds, self._round_begin = self.elapsed_seconds(), None

    def add_record(self, columns: Mapping[str, Any]) -> None:
        """Make a record of the last round with these columns of quality."""
        assert self.last_round is not None
        spent = self.training.spent_epsilon(self.state.round, len(self.records) + 1)
        columns = {**columns, "epsilon": spent} if spent is not None and math.isfinite(spent) else columns
        self.records.append(make_record(self.last_round, columns, self.losses))
        self.losses = None if self.losses is None else []

    def _stop_within_budget(self) -> None:
        """Stop a private run whose next round, with an evaluation after it, would exceed `stop_at_epsilon`.

        Wherever a run ends it is evaluated, so that there must always be enough left for one evaluation.
        """
        if self.stop_at_epsilon is None or self.state.round == self.training.plan.total_rounds:
            return
        assert self.last_round is not None
        evaluation = next((callback for callback in self.callbacks if isinstance(callback, Evaluation)), None)
        is_due = evaluation is None or is_evaluation_due(self.last_round.phase, evaluation.every, False)
        needed = self.training.spent_epsilon(self.state.round + 1, len(self.records) + is_due + 1)
        if needed is not None and needed > self.stop_at_epsilon:
            spent = self.training.spent_epsilon(self.state.round, len(self.records) + 1)
            self.stop_reason = (
                f"the next round would spend epsilon {needed:.4g}; {spent:.4g} is spent, and the run stops at "
                f"{self.stop_at_epsilon:g}"
            )

    def is_checkpoint_due(self, finished: Round) -> bool:
        """Whether to save the state after a round. Saving gathers client states from all ranks, so rank 0 decides."""
        if self.checkpointer is None:
            return False
        if self.is_over:
            return self.checkpointer.at_end
        due = is_first_rank() and self.checkpointer.is_due(self.seconds - self._saved_seconds)
        return bool(maximum_over_ranks(due))

    def save(self) -> None:
        """Save the state in the background, unless it is saved already."""
        if self.checkpointer is not None and self._saved_round < self.state.round:
            self._call_hooks("on_checkpoint")
            client_states, losses = self.training.engine.client_states(), [float(loss) for loss in self.losses or []]
            callback_states = {name: state for name, state in self._callback_states.items() if not is_empty(state)}
            self.checkpointer.save(
                Checkpoint(self.state, client_states, self.training.ledger, losses, callback_states, self.stop_reason)
            )
            self._saved_round, self._saved_seconds = self.state.round, self.seconds

    def finish(self) -> RunEnd:
        """Let the callbacks finish; return the model that the run ends with."""
        for callback, state in zip(self.callbacks, self._callback_states.values(), strict=True):
            with name_failing_callback(callback, "on_finish"):
                callback.on_finish(self.view, state)
        return self.describe_end()

    def describe_end(self) -> RunEnd:
        """The model that the run ends with, as far as callbacks have chosen it, and what the result says of it."""
        notes: dict[str, Any] = {}
        model, round = self.evaluated_model(), self.state.round - 1
        if self.chosen_model is not None:
            model, round = self.chosen_model
            notes["kept_round"] = round
        if self.stop_reason is not None and self.state.round < self.training.plan.total_rounds:
            notes["stopped_early"] = self.stop_reason
        record = next((record for record in reversed(self.records) if record["round"] == round), None)
        return RunEnd(model, round, record, notes)

    def fail(self, reason: TrainingStopped) -> None:
        """Write down why the run cannot go on, and tell the callbacks."""
        if self.folder:
            self.folder.write_stop_reason(str(reason))
        for callback, state in zip(self.callbacks, self._callback_states.values(), strict=True):
            with name_failing_callback(callback, "on_failure"):
                callback.on_failure(self.view, state, str(reason))

    def release_live_objects(self) -> None:
        """Close what callbacks hold open, where it has a method `close`: the run may go on in another process."""
        for live_object in self.live_objects.values():
            if callable(close := getattr(live_object, "close", None)):
                close()
        self.live_objects.clear()

    def list_callback_states(self) -> list[Tree]:
        """The states of the callbacks, in their order."""
        return list(self._callback_states.values())

    def _call_hooks(self, hook: str) -> None:
        for (name, state), callback in zip(list(self._callback_states.items()), self.callbacks, strict=True):
            with name_failing_callback(callback, hook):
                changed: Tree | None = getattr(callback, hook)(self.view, state)
            if changed is None and not is_empty(state):
                raise ValueError(f"a hook of callback {name} has returned None; it must return the callback's state")
            self._callback_states[name] = state if changed is None else changed

    def _agree_on_stop(self) -> None:
        """Under torchrun all ranks stop if rank 0 does: metrics could differ between devices in their last bits."""
        if maximum_over_ranks(is_first_rank() and self.stop_reason is not None):
            self.stop_reason = self.stop_reason or "rank 0 has stopped the run"
        else:
            self.stop_reason = None


def first_checkpoint(state: State, ledger: Ledger | None = None) -> Checkpoint:
    """The checkpoint of a run before its first round; the ledger may hold what was sent before."""
    return Checkpoint(state, {}, ledger or Ledger(), [])


def _number_callbacks(callbacks: Sequence[Callback]) -> list[str]:
    """A name for each callback's state in a checkpoint: its class, numbered where there are several of one class."""
    kinds = [type(callback).__qualname__ for callback in callbacks]
    return [f"{kind}-{kinds[:position].count(kind) + 1}" for position, kind in enumerate(kinds)]


def make_record(finished: Round, quality: Mapping[str, Any], losses: Sequence[Tensor] | None) -> dict[str, Any]:
    """One line of `records.jsonl`: when, the mean loss since the last record, the quality, diagnostics and traffic."""
    phase = finished.phase
    mean_loss = float(np.mean([float(loss) for loss in losses])) if losses else None
    return {
        "round": phase.round,
        "cycle": phase.cycle,
        "stage": phase.stage,
        "learning_rate": phase.learning_rate,
        **({} if losses is None else {"loss": mean_loss}),
        **quality,
        **finished.diagnostic_values,
        **finished.traffic._asdict(),
    }


@contextmanager
def name_failing_callback(callback: Callback, hook: str) -> Iterator[None]:
    """Turn an error in a hook into one line that names the callback.

    The library's own callbacks raise errors that say what is wrong already.
    """
    try:
        yield
    except (TrainingStopped, RunPaused):
        raise
    except Exception as error:
        if plugin_of_class(type(callback)) == "":
            raise
        name = getattr(callback, "name", type(callback).__qualname__)
        raise ValueError(f"callback {name!r} failed in {hook}: {describe_error(error)}") from error


@contextmanager
def save_before_interrupts(loops: Collection[RunLoop]) -> Iterator[Callable[[], None]]:
    """Save the loops before Ctrl-C, SIGTERM or `RunPaused` ends the block; leave it when all checkpoints are written.

    The block calls the yielded function after every round; that function ends the block if a signal has come in. A loop
    that leaves the collection is not saved. Where every round is saved anyway, signals act at once.
    """
    number = 0
    with ExitStack() as stack:
        interrupts = DeferredInterrupts()
        if any(loop.checkpointer and not loop.checkpointer.every_round for loop in loops):
            stack.enter_context(interrupts)
        for loop in loops:
            if loop.folder:
                stack.enter_context(loop.folder.lock())
            if loop.checkpointer:
                stack.callback(loop.checkpointer.wait)

        def check_signals() -> None:
            nonlocal number
            number = interrupts.received_signal()
            if number:
                raise _RunInterrupted

        try:
            yield check_signals
        except RunPaused as pause:
            for loop in loops:
                loop.save()
                loop.release_live_objects()
            if not isinstance(pause, _RunInterrupted):
                raise
    if number:
        deliver_signal(number)
