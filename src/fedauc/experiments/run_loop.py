"""The run loop: what happens after every round of a run, wherever the round was trained.

`fit` uses it without a folder and `Run` with one, a run group drives one loop per run, and the federation's server
passes its own evaluation and writes its attendance lines before each checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.interrupts import DeferredInterrupts, deliver_signal
from fedauc.experiments.ranks import is_first_rank, maximum_over_ranks
from fedauc.guards import TrainingStopped
from fedauc.training import Round, State, Training


class Progress(NamedTuple):
    """How far a run is: rounds done, rounds in all, the last record, and whether training had to be stopped."""

    done: int
    rounds: int
    record: dict[str, Any] | None
    stopped: bool = False


Observer = Callable[[Progress], None]

Evaluate = Callable[[Round], Mapping[str, Any] | None]
"""Measures the model after a round and returns the record's columns of quality; None means that there is no record."""


class RunPaused(Exception):
    """An observer raises this to end the work on a run for now: the run is saved first, and can be resumed."""


class _RunInterrupted(RunPaused):
    """A signal has come in."""


@dataclass
class RunLoop:
    """A run between two rounds: its state, and what is due after the next one.

    Without a folder nothing is written. `losses` are those since the last record, or None where clients report none.
    `seconds` is the training time so far. `on_round_end` is called after the evaluation and before the checkpoint.
    """

    training: Training
    state: State
    evaluate: Evaluate
    evaluate_every: int = 1
    folder: RunFolder | None = None
    checkpointer: Checkpointer | None = None
    losses: list[Tensor] | None = field(default_factory=list)
    on_round_end: Callable[[Round], None] | None = None
    record: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.seconds = self.folder.training_seconds() if self.folder else 0.0
        self._saved_round, self._saved_seconds = self.state.round, self.seconds

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return Progress(self.state.round, self.training.plan.total_rounds, self.record)

    @property
    def is_over(self) -> bool:
        """Whether the last round is done."""
        return self.state.round == self.training.plan.total_rounds

    def train_to_end(self, observer: Observer = lambda progress: None) -> None:
        """Train the remaining rounds; the observer is called before the first and after each of them."""
        observer(self.progress)
        with save_before_interrupts([self]) as check_signals:
            begin = time.perf_counter()
            try:
                for finished in self.training.rounds(self.state):
                    self.advance(finished, time.perf_counter() - begin)
                    observer(self.progress)
                    check_signals()
                    begin = time.perf_counter()
            except TrainingStopped as reason:
                self.stop(reason)
                raise

    def advance(self, finished: Round, seconds: float) -> None:
        """Go to the state after a round that took so many seconds; evaluate it and save it where that is due."""
        begin = time.perf_counter() - seconds
        self.state = finished.state
        if self.losses is not None and finished.loss is not None:
            self.losses.append(finished.loss)
        if self.is_evaluation_due(finished) and (quality := self.evaluate(finished)) is not None:
            self.record = make_record(finished, quality, self.losses)
            self.losses = None if self.losses is None else []
            if self.folder:
                self.folder.append_record(self.record, self.seconds + time.perf_counter() - begin)
        if self.on_round_end:
            self.on_round_end(finished)
        self.seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        if self.is_checkpoint_due(finished):
            self.save()
        self.seconds += time.perf_counter() - begin

    def is_evaluation_due(self, finished: Round) -> bool:
        """Whether the round ends a learning cycle that is evaluated; the last one always is."""
        phase = finished.phase
        ends_cycle = phase.ends_cycle and not phase.scoring
        return self.is_over or (ends_cycle and phase.learning_cycles % self.evaluate_every == 0)

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
            client_states, losses = self.training.engine.client_states(), [float(loss) for loss in self.losses or []]
            self.checkpointer.save(Checkpoint(self.state, client_states, self.training.ledger, losses))
            self._saved_round, self._saved_seconds = self.state.round, self.seconds

    def stop(self, reason: TrainingStopped) -> None:
        """Write down why the run cannot go on."""
        if self.folder:
            self.folder.write_stop_reason(str(reason))


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
            if not isinstance(pause, _RunInterrupted):
                raise
    if number:
        deliver_signal(number)
