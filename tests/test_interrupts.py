"""Ctrl-C and SIGTERM: a real signal to a real process saves the run; Ctrl-C also says how to go on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.cli import federation, federation_site, find_out_folder

RUN = ("run", "--data", "synthetic", "--cycles", "500", "--out", "made")
"""Far longer than the test waits."""


def send_signal_during_run(folder: Path, number: int) -> tuple[int, str]:
    """Start a run and send it a signal after its first record; the exit code and what it wrote on standard error."""
    command = [sys.executable, "-m", "fedauc", *RUN]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            end = time.monotonic() + 60  # importing the library takes seconds
            while not (folder / "made" / "records.jsonl").exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(number)
            errors = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    return process.returncode, errors


def count_saved_rounds(folder: Path) -> int:
    return max(int(path.stem.removeprefix("round-")) for path in (folder / "made" / "checkpoints").iterdir())


def test_an_interrupted_run_is_saved_and_says_how_to_go_on(tmp_path: Path) -> None:
    code, errors = send_signal_during_run(tmp_path, signal.SIGINT)
    assert code == 130
    assert errors.splitlines()[-1] == "interrupted; go on with: fedauc resume made"
    assert "Traceback" not in errors
    assert count_saved_rounds(tmp_path) > 0


def test_a_terminated_run_is_saved(tmp_path: Path) -> None:
    """As a scheduler does it before a job's time is over; 143 is 128 and the signal's number."""
    code, errors = send_signal_during_run(tmp_path, signal.SIGTERM)
    assert code == 143
    assert "Traceback" not in errors
    assert count_saved_rounds(tmp_path) > 0


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("run --data synthetic --out runs/a", "runs/a"),
        ("sweep --out=b --seeds 3", "b"),
        ("resume runs/c", "runs/c"),
        ("federation local --out d", "d"),
        ("federation run e lab --run-config cycles=2", "e"),
        ("federation run --run-config cycles=2 e lab", "DIR"),
        ("compare", "DIR"),
    ],
)
def test_the_hint_names_the_folder_that_was_typed(typed: str, folder: str) -> None:
    assert find_out_folder(typed.split()) == folder
    assert find_out_folder(["run", "--out", "my runs"]) == "'my runs'"


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("local --out new", "go on with: fedauc federation resume new"),
        ("resume trial", "go on with: fedauc federation resume trial"),
        ("plan trial", "go on with: the same command"),
        (
            "run . lab",
            "a run that has begun goes on; on the server, `fedauc federation show .` follows it, and "
            "`fedauc federation pause .` stops it after its round",
        ),
    ],
)
def test_an_interrupted_command_of_a_federation_says_what_goes_on(
    typed: str, advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*folder: Path) -> None:
        raise KeyboardInterrupt

    for module, reader in (
        (federation, "read_template_config"),
        (federation, "read_app_config"),
        (federation_site, "read_app_config"),
    ):
        monkeypatch.setattr(module, reader, interrupt)
    monkeypatch.chdir(tmp_path)
    Path("trial/sites").mkdir(parents=True)
    Path("trial/run").mkdir()
    Path("trial/run/federation.json").touch()
    assert fedauc(capsys, "federation", *typed.split()) == (130, "", f"interrupted; {advice}\n")
