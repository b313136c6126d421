"""The processes of a local federation are stopped with everything they have started, and no other process is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedauc.federation.local_federation import SUPERLINK_NAME, LocalFederation, find_free_port

PARENT = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
"""A process whose child ignores SIGTERM and has moved to a session of its own."""


def ends_soon(number: int) -> bool:
    """Whether a process ends within five seconds."""
    end = time.monotonic() + 5
    while is_alive(number) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(number)


def is_alive(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_child_pid(folder: Path, name: str) -> int:
    log = folder / "logs" / f"{name}.log"
    end = time.monotonic() + 20
    while not log.read_text().strip():
        assert time.monotonic() < end, "the process did not start"
        time.sleep(0.05)
    return int(log.read_text())


def test_leaving_the_block_stops_every_process_and_what_it_started(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with LocalFederation(tmp_path) as trial:
            trial.start_process("one", "python", "-c", PARENT)
            child = read_child_pid(tmp_path, "one")
            assert is_alive(child)
            assert trial.is_running("one")
        assert ends_soon(child)
        assert not trial.is_running("one")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_commands_run_where_no_folder_has_the_superlinks_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out trial` makes a folder of that name where the user is, which Flower would take for an app."""
    (tmp_path / SUPERLINK_NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    with LocalFederation(Path(SUPERLINK_NAME)) as trial:
        trial.start_process("one", "python", "-c", "import os; print(os.listdir())")
        log = tmp_path / SUPERLINK_NAME / "logs" / "one.log"
        deadline = time.monotonic() + 20
        while not log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert log.read_text().strip() == "['one.log']"


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    with LocalFederation(tmp_path) as trial:
        trial.start_process("one", "python", "-c", PARENT)
        child = read_child_pid(tmp_path, "one")
        trial.stop_process("one", signal.SIGKILL)
        assert ends_soon(child)


def test_a_process_started_again_replaces_the_old_one(tmp_path: Path) -> None:
    with LocalFederation(tmp_path) as trial:
        trial.start_process("one", "python", "-c", PARENT)
        child = read_child_pid(tmp_path, "one")
        old = trial.process_ids()
        assert child in old
        trial.start_process("one", "python", "-c", "import time; time.sleep(60)")
        (new,) = trial.process_ids()
        assert all(map(ends_soon, old))
        assert os.getpgid(new) == new


def test_a_program_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with LocalFederation(tmp_path) as trial, pytest.raises(ValueError, match="no-such-program is not installed beside"):
        trial.start_process("one", "no-such-program")


def test_ports_are_free_and_differ() -> None:
    assert len({find_free_port() for _ in range(5)}) > 1
