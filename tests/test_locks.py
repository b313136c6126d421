"""Locks: one holder at a time, released at the end or with a killed process, and no file left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from fedauc import locks
from fedauc.locks import LockBusy, hold_lock


def test_one_at_a_time_and_nothing_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with hold_lock(path, "no") as sure:
            assert sure
            with pytest.raises(LockBusy, match=f"taken by {os.getpid()}$"), hold_lock(path, "taken by {pid}"):
                pass
            assert path.exists()
        assert list(tmp_path.iterdir()) == []


def test_waiting_ends_when_the_lock_is_released(tmp_path: Path) -> None:
    """Many threads, each of which removes the file when it is done: never two inside."""
    inside, most, turns = 0, 0, []

    def take_turn(number: int) -> None:
        nonlocal inside, most
        with hold_lock(tmp_path / "lock", "no", seconds=30):
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)
            inside -= 1
            turns.append(number)

    threads = [threading.Thread(target=take_turn, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == list(range(8))
    assert most == 1


def test_a_file_that_its_owner_removes_while_it_is_opened_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock, calls = tmp_path / "lock", locks._try_lock, []

    def lock_late(stream: IO[str]) -> bool:
        calls.append(stream)
        if len(calls) == 1:
            path.unlink()
        return lock(stream)

    monkeypatch.setattr(locks, "_try_lock", lock_late)
    with hold_lock(path, "no"):
        assert len(calls) == 2
        # Held is the file that the next to come finds.
        with pytest.raises(LockBusy), hold_lock(path, "no"):
            pass


PROGRAM = """
import sys, time
from pathlib import Path
from fedauc.locks import hold_lock
with hold_lock(Path(sys.argv[1]), "no"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockBusy), hold_lock(path, "no"):
            pass
        process.kill()
    assert path.exists()
    with hold_lock(path, "no") as sure:
        assert sure


def test_without_lock_support_every_process_gets_in_and_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with hold_lock(tmp_path / "lock", "no") as sure, hold_lock(tmp_path / "lock", "no") as also:
        assert not sure
        assert not also
