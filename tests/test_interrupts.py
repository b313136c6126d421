"""Ctrl-C: a real signal to a real process ends it with a line that says how to go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedauc.cli import find_out_folder

RUN = ("run", "--data", "synthetic", "--cycles", "500", "--out", "made")
"""Far longer than the test waits."""


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    # A process in the background may have been told to ignore the signal; then so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "fedauc", *RUN]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        signal.signal(signal.SIGINT, before)
        try:
            end = time.monotonic() + 60  # importing the library takes seconds
            while not (tmp_path / "made" / "records.jsonl").exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; go on with: fedauc resume made"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("run --data synthetic --out runs/a", "runs/a"),
        ("sweep --out=b --seeds 3", "b"),
        ("resume runs/c", "runs/c"),
        ("federation local --out d", "d"),
        ("compare", "DIR"),
    ],
)
def test_the_hint_names_the_folder_that_was_typed(typed: str, folder: str) -> None:
    assert find_out_folder(typed.split()) == folder
    assert find_out_folder(["run", "--out", "my runs"]) == "'my runs'"
