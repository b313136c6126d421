"""What a workshop takes up again, clears away, and keeps from other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedauc.experiments.config import Config
from fedauc.experiments.run_loop import Observer, Progress
from fedauc.experiments.runner import Run
from fedauc.locks import LockBusy
from paper.records import RecordStore, run_name
from paper.run_queue import RunQueue
from paper.scales import SMOKE

BUSY = """
import sys, time
from pathlib import Path
from every_cycle import is_cycle_over
from fedauc.experiments.run_loop import RunLoop
from paper.records import RecordStore
from paper.run_queue import RunQueue
from paper.scales import SMOKE

RunLoop.is_checkpoint_due = is_cycle_over

def stays(place):
    def see(progress):
        if progress.done == 5:
            # Checkpoints are written in the background: this one must be on the disk before the process is killed.
            while not list((folder / "work").rglob("round-*4.pt")):
                time.sleep(0.05)
            print("running", flush=True)
            time.sleep(600)
    return see

folder = Path(sys.argv[1])
config = SMOKE.build_config("cifar10", "cycp-fedavg", {})
RunQueue(RecordStore(folder / "records"), folder / "work", "cpu", stays).run_missing([config])
"""


def config(seed: int = 0) -> Config:
    return SMOKE.build_config("cifar10", "cycp-fedavg", {"seed": str(seed)})


class Seen:
    """Notes which runs take place, and from which round."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}

    def __call__(self, place: str) -> Observer:
        def see(progress: Progress) -> None:
            self.first.setdefault(place, progress.done)

        return see


def shop(folder: Path, seen: Seen | None = None) -> RunQueue:
    return RunQueue(RecordStore(folder / "records"), folder / "work", "cpu", seen or Seen())


def left(folder: Path) -> set[str]:
    return {path.name for path in (folder / "work").iterdir()}


@contextmanager
def another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a run, after five of twelve rounds; killed in the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BUSY, str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# -------------------------------------------------------------------------------------------------------- one at a time


def test_a_second_process_is_told_of_the_first_and_nothing_is_lost(tmp_path: Path) -> None:
    """Refused while the first runs; when that is killed, its run goes on from the checkpoint of round 4."""
    with another(tmp_path) as first:
        told = rf"^{tmp_path / 'work'} is in use by another process \(pid {first.pid}\); wait until .* another folder$"
        for seed in range(2):
            with pytest.raises(ValueError, match=told):
                shop(tmp_path).run_missing([config(seed)])
        assert left(tmp_path) == {".lock", run_name(config())}
    seen = Seen()
    shop(tmp_path, seen).run_missing([config()])
    assert seen.first == {run_name(config()): 4}
    assert left(tmp_path) == set()


def test_where_nothing_is_to_run_another_process_is_no_matter(tmp_path: Path) -> None:
    """The other one's run has a folder; this one's is recorded, and what is left of it stays for now."""
    shop(tmp_path).run_missing([config(1)])
    Run.create(config(1), tmp_path / "work" / run_name(config(1)))
    with another(tmp_path):
        shop(tmp_path).run_missing([config(1)])
        assert left(tmp_path) == {".lock", run_name(config()), run_name(config(1))}


def test_a_workshop_holds_its_folder_between_runs(tmp_path: Path) -> None:
    with shop(tmp_path) as first:
        first.run_missing([config()])
        assert (tmp_path / "work" / ".lock").read_text() == str(os.getpid())
        first.run_missing([config(1)])
        assert left(tmp_path) == {".lock"}
        with pytest.raises(LockBusy), shop(tmp_path) as second:
            second.run_missing([config(2)])
    assert left(tmp_path) == set()


# ------------------------------------------------------------------------------------------------------ what is missing


def test_a_record_without_ranks_is_run_again_where_it_is_tested(tmp_path: Path) -> None:
    shop(tmp_path).run_missing([config()], tested=False)
    before, seen = RecordStore(tmp_path / "records").find_record(config()), Seen()
    shop(tmp_path, seen).run_missing([config()], tested=False)
    assert seen.first == {}
    shop(tmp_path, seen).run_missing([config()], tested=True)
    assert seen.first == {run_name(config()): 0}
    store = RecordStore(tmp_path / "records")
    assert store.load_ranks(config()) is not None
    after = store.find_record(config())
    assert before is not None
    assert after is not None
    assert replace(after, seconds=0) == replace(before, seconds=0)


def test_a_run_that_stopped_has_no_ranks_and_is_not_run_again(tmp_path: Path) -> None:
    """Minimax on raw scores with a step of 1,000 diverges at once."""
    bad = SMOKE.build_config("cifar10", "cycp-minimax", {"objective.score": "identity", "learning-rate": "1000"})
    seen = Seen()
    shop(tmp_path).run_missing([bad])
    shop(tmp_path, seen).run_missing([bad])
    assert seen.first == {}


# --------------------------------------------------------------------------------------------------- what was left over


def test_the_folder_of_a_recorded_run_is_removed(tmp_path: Path) -> None:
    """As a process leaves it that is killed right after it wrote the record. Others' folders stay."""
    shop(tmp_path).run_missing([config()])
    for seed in (0, 1):
        Run.create(config(seed), tmp_path / "work" / run_name(config(seed)))
    seen = Seen()
    shop(tmp_path, seen).run_missing([config()])
    assert seen.first == {}
    assert left(tmp_path) == {run_name(config(1))}


def test_a_folder_that_was_half_removed_is_made_anew(tmp_path: Path) -> None:
    """The configuration goes first; what remains, a checkpoint, is no run."""
    folder = tmp_path / "work" / run_name(config())
    Run.create(config(), folder)
    (folder / "config.json").unlink()
    seen = Seen()
    shop(tmp_path, seen).run_missing([config()])
    assert seen.first == {run_name(config()): 0}
    assert left(tmp_path) == set()
