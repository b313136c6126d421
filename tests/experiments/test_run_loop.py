"""When a run is saved, in which thread, and what a signal does to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from every_cycle import every_cycle  # noqa: F401
from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.runner import Run
from fedauc.interfaces import Server
from fedauc.ledger import Ledger
from fedauc.training import State


def make_config(method: str = "cycp-minimax") -> Config:
    """Three cycles of two rounds; the pairwise methods have a scoring cycle before them."""
    recipe = Recipe.of(method, cycles=3, groups=2, local_steps=2, dtype="float64")
    return Config(recipe=recipe, data=Synthetic(clients=4, rows_per_client=30))


def make_checkpoint(weights: torch.Tensor) -> Checkpoint:
    return Checkpoint(State(1, Server((weights,), ())), {0: (weights,)}, Ledger(), [])


def saved_rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round-")) for path in (folder / "checkpoints").iterdir())


def read_results(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "records.jsonl").read_bytes(), (folder / "result.json").read_bytes()


def at_round(round: int, action: Callable[[], None]) -> Callable[[Progress], None]:
    """An observer that acts once, after a round."""
    return lambda progress: action() if progress.done == round else None


def send_signal(number: int) -> None:
    os.kill(os.getpid(), number)
    # Python runs the handler between two instructions of the main thread.
    time.sleep(0.01)


# ----------------------------------------------------------------------------------------------------- the checkpointer


def test_a_checkpoint_is_due_when_its_share_of_the_time_pays_for_it() -> None:
    """A checkpoint that takes .1 s is worth 3 % of 3.3 s; before the first one only the interval counts."""
    saver = Checkpointer(lambda checkpoint: time.sleep(0.1), share=0.03, interval=1.0)
    assert [saver.is_due(seconds) for seconds in (0.9, 1.0)] == [False, True]
    saver.save(make_checkpoint(torch.zeros(3)))
    assert not saver.is_due(1000), "one write at a time"
    saver.wait()
    # The sleep takes .1 s or a little longer, under .2 s unless the machine is very busy.
    assert [saver.is_due(seconds) for seconds in (1.0, 3.2, 1000)] == [False, False, True]


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    """What is written is the state at the time of the call, although its tensors change before the write begins."""
    written: list[Checkpoint] = []
    release = threading.Event()

    def write(checkpoint: Checkpoint) -> None:
        release.wait(10)
        written.append(checkpoint)

    weights = torch.arange(6.0)
    saver = Checkpointer(write)
    saver.save(make_checkpoint(weights[:3]))
    weights.zero_()
    assert not written
    release.set()
    saver.wait()
    state, client_states, *_ = written[0]
    assert [leaf.tolist() for leaf in (*state.server.shared, *client_states[0])] == [[0.0, 1.0, 2.0]] * 2


def test_with_every_round_the_checkpoint_is_on_the_disk_before_the_next_round() -> None:
    written: list[int] = []
    saver = Checkpointer(lambda checkpoint: written.append(checkpoint.state.round), every_round=True)
    assert saver.is_due(0.0)
    saver.save(make_checkpoint(torch.zeros(3)))
    assert written == [1]


@pytest.mark.usefixtures("every_cycle")
def test_an_error_of_the_writer_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(make_config(), tmp_path / "run")

    def fail(checkpoint: Checkpoint) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(run.loop.checkpointer, "_write", fail)
    with pytest.raises(OSError, match="no space left"):
        run.train_to_end()
    assert not run.folder.done


def test_a_short_run_is_saved_before_its_first_round_and_after_its_last(tmp_path: Path) -> None:
    Run.create(make_config(), tmp_path / "run").train_to_end()
    assert saved_rounds(tmp_path / "run") == [0, 6]


# ------------------------------------------------------------------------------------------------- signals and pauses


@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise", "a-scaffold"])
@pytest.mark.parametrize("round", [1, 3, 4, 6])
def test_a_paused_run_is_saved_and_goes_on_to_the_same_bits(tmp_path: Path, method: str, round: int) -> None:
    """Also in the middle of a cycle, whose losses and uploads belong to the next record."""

    def pause() -> None:
        raise RunPaused

    Run.create(make_config(method), tmp_path / "alone").train_to_end()
    with pytest.raises(RunPaused):
        Run.create(make_config(method), tmp_path / "run").train_to_end(at_round(round, pause))
    assert saved_rounds(tmp_path / "run")[-1] == round
    Run.resume(tmp_path / "run").train_to_end()
    assert read_results(tmp_path / "run") == read_results(tmp_path / "alone")


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_lets_the_round_end_and_saves_the_run(tmp_path: Path, number: int, error: type[BaseException]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = Run.create(make_config(), tmp_path / "run")
    with pytest.raises(error) as caught:
        run.train_to_end(at_round(3, lambda: send_signal(number)))
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 128 + signal.SIGTERM
    assert saved_rounds(tmp_path / "run") == [0, 3]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    Run.create(make_config(), tmp_path / "alone").train_to_end()
    Run.resume(tmp_path / "run").train_to_end()
    assert read_results(tmp_path / "run") == read_results(tmp_path / "alone")


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """The observer of a round never returns from the second signal, so the round is not saved."""
    run = Run.create(make_config(), tmp_path / "run")

    def press_twice() -> None:
        send_signal(signal.SIGINT)
        send_signal(signal.SIGINT)
        raise AssertionError("the second signal did not interrupt")

    with pytest.raises(KeyboardInterrupt):
        run.train_to_end(at_round(3, press_twice))
    assert saved_rounds(tmp_path / "run") == [0]
