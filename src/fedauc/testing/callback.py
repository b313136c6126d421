"""The suite of a callback: training does not notice it, and a resumed run goes on with its state."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedauc.experiments.callbacks import Callback
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.callbacks.record_writer import RecordWriter
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.evaluation import Evaluator, RecordColumns
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_loop import Progress, RunLoop, RunPaused, first_checkpoint
from fedauc.metrics import DEFAULT_METRICS, parse_metrics
from fedauc.testing._expectations import check_configuration, expect, same_bits, untouched_generators
from fedauc.testing.small_federation import assemble_small, held_out, small_federation, small_recipe
from fedauc.trees import Tree

METHOD, CYCLES = "a-scaffold", 4
"""A method with states of clients, in four cycles of three rounds with an evaluation after each cycle."""


class Outcome(NamedTuple):
    """What a run has left behind."""

    records: list[dict[str, Any]]
    notes: dict[str, Any]
    model: Tree
    states: list[Tree]


def check_callback(callback: Callback) -> None:
    """Check a callback in runs with and without it, and in runs that are paused after a round and resumed."""
    if isinstance(getattr(callback, "name", None), str):
        check_configuration(callback, Callback)
    for name in dir(callback):
        expect(
            not name.startswith("on_") or hasattr(Callback, name),
            f"{name} is no hook of a Callback; check its spelling",
        )
    check_state(callback)
    complete = train_run(callback)
    check_training_unchanged(callback, complete)
    check_resumed(callback, complete)


def check_state(callback: Callback) -> None:
    """The state is a tree of tensors, which a checkpoint can hold."""
    state = callback.initial_state()
    expect(_is_tree(state), f"the initial state is {state!r}; it must be a tensor, or a named tuple of tensors")


def _is_tree(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and all(map(_is_tree, value)))


def check_training_unchanged(callback: Callback, complete: Outcome) -> None:
    """Up to its end, a run has the records that it would have without the callback."""
    alone = train_run(Callback())
    records = complete.records
    expect(records, "the run has no record")
    expect(records[:-1] == alone.records[: len(records) - 1], "the records differ from those without the callback")
    if not complete.notes:
        expect(records == alone.records, "the last record differs from that without the callback")
        expect(same_bits(complete.model, alone.model), "the model differs from that without the callback")


def check_resumed(callback: Callback, complete: Outcome) -> None:
    """Wherever a run is paused, its rest is the same: records, model, why it ended, and the callback's state."""
    last_round = complete.records[-1]["round"]
    for rounds in range(1, last_round + 2):
        resumed, where = train_run(callback, pause_after=rounds), f"after a pause in round {rounds}"
        expect(resumed.records == complete.records, f"{where} the records differ")
        expect(resumed.notes == complete.notes, f"{where} the run ends with {resumed.notes}, not {complete.notes}")
        expect(same_bits(resumed.model, complete.model), f"{where} the model differs")
        for state, expected in zip(resumed.states, complete.states, strict=True):
            expect(same_bits(state, expected), f"{where} the state is {state}, not {expected}")


def train_run(callback: Callback, pause_after: int | None = None) -> Outcome:
    """A small run with the callback; if told so, it is saved after some rounds and goes on from the file."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run"
        first = first_checkpoint(assemble_small(small_recipe(METHOD, cycles=CYCLES)).start)
        loop = _make_loop(callback, RunFolder.create(path, {}, first), first)
        if pause_after is not None:
            try:
                loop.train_to_end(lambda progress: _pause(progress, pause_after))
            except RunPaused:
                folder = RunFolder(path)
                loop = _make_loop(callback, folder, folder.rewind_to_checkpoint("cpu"))
        with untouched_generators(f"callback {type(callback).__name__}"):
            loop.train_to_end()
            end = loop.finish()
        states = loop.list_callback_states()
        return Outcome(RunFolder(path).read_records(), end.notes, end.model, states)


def _pause(progress: Progress, rounds: int) -> None:
    if progress.done == rounds:
        raise RunPaused


def _make_loop(callback: Callback, folder: RunFolder, checkpoint: Checkpoint) -> RunLoop:
    recipe, metrics = small_recipe(METHOD, cycles=CYCLES), parse_metrics(DEFAULT_METRICS)
    assembly = assemble_small(recipe)
    assembly.training.engine.restore_client_states(checkpoint.client_states)
    assembly.training.ledger.restore_from(checkpoint.ledger)
    evaluator = Evaluator(recipe.algorithm, assembly.network, metrics)
    rows = held_out()
    evaluation = Evaluation(lambda run: evaluator.measure_model(run.model, run.round.phase, rows, rows))
    return RunLoop(
        assembly,
        checkpoint,
        (RecordWriter(folder), callback, evaluation),
        RecordColumns.of(metrics, has_test=True, has_validation=True),
        folder,
        Checkpointer(folder.write_checkpoint),
        small_federation(),
    )
