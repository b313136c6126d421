"""Killed at any instant and resumed, a run yields the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_helpers import fedauc
from every_cycle import every_cycle  # noqa: F401
from fedauc.experiments.folder import RunFolder
from fedauc.locks import LockBusy

METHODS = ["cycp-pairwise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("a-scaffold", "codasca"))]

ARGUMENTS = [
    *("--data", "synthetic", "--data.clients", "8", "--data.rows-per-client", "40", "--cycles", "12"),
    *("--local-steps", "4", "--stages", "geometric", "--stages.initial", "3", "--stage-output", "cycle_mean"),
]


def python_command(*arguments: str) -> list[str]:
    """With a checkpoint after every cycle, so that a short run has some."""
    return [sys.executable, "-m", "every_cycle", *arguments]


def child_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(("src", "tests", "."))}


def run_to_end(*arguments: str) -> None:
    subprocess.run(python_command(*arguments), check=True, capture_output=True, env=child_environment())


def run_and_kill(out: Path, moment: float, *arguments: str) -> bool:
    """Start, kill -9 at a moment after the folder appears; False if the run was done before."""
    process = subprocess.Popen(
        python_command(*arguments), env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.wait()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    arguments = ["run", "--method", method, *ARGUMENTS]
    run_to_end(*arguments, "--out", str(uninterrupted))
    kills = [run_and_kill(killed, 0.01, *arguments, "--out", str(killed))]
    # Each attempt is longer than the last, so that the kills fall on different instants of a round.
    for attempt in range(1, 4):
        kills.append(run_and_kill(killed, 0.08 * attempt, "resume", str(killed)))
    run_to_end("resume", str(killed))
    assert kills[0], "the first kill came too late to test anything"
    assert (killed / "records.jsonl").read_bytes() == (uninterrupted / "records.jsonl").read_bytes()
    assert json.loads((killed / "result.json").read_text()) == json.loads((uninterrupted / "result.json").read_text())
    assert not list(killed.glob("**/.*")), "nothing half-written is left behind"


@pytest.mark.usefixtures("every_cycle")
def test_a_killed_sweep_resumes_to_the_same_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two runs in one graph."""
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    vary = ["--vary", "lr=0.03,0.1", "--engine", "graphed", "--cycles", "4"]
    arguments = ["sweep", "--method", "cycp-pairwise", *ARGUMENTS, *vary]
    assert fedauc(capsys, *arguments, "--out", str(uninterrupted)).code == 0
    assert run_and_kill(killed, 0.2, *arguments, "--out", str(killed)), "the kill came too late to test anything"
    run_to_end("resume", str(killed))
    for name in ("records.jsonl", "result.json"):
        files = [
            {path.relative_to(out): path.read_bytes() for path in out.rglob(name)} for out in (uninterrupted, killed)
        ]
        assert len(files[0]) == 2
        assert files[0] == files[1]
    assert not list(killed.glob("**/.*")), "nothing half-written is left behind"


def test_a_torn_record_is_left_out_and_written_again(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves half a line: the run goes on from the checkpoint before it."""
    out = tmp_path / "run"
    arguments = ["run", "--method", "cycp-fedavg", *ARGUMENTS, "--out", str(out)]
    run_to_end(*arguments)
    records, content = out / "records.jsonl", (out / "records.jsonl").read_bytes()
    (out / "result.json").unlink()
    sorted((out / "checkpoints").iterdir())[-1].unlink()
    records.write_bytes(content[:-20])
    run_to_end("resume", str(out))
    assert records.read_bytes() == content


def test_a_folder_in_use_by_another_process_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two processes in one folder would write into each other's records."""
    out = tmp_path / "run"
    words = ("--data", "synthetic", "--cycles", "2", "--local-steps", "1", "--out", str(out))
    assert fedauc(capsys, "run", *words).code == 0
    (out / "result.json").unlink()
    with RunFolder.open(out).lock():
        refused = fedauc(capsys, "resume", str(out))
    assert refused.code == 2
    assert f"is in use by process {os.getpid()}" in refused.err
    assert fedauc(capsys, "resume", str(out)).code == 0
    assert not (out / ".lock").exists()


def test_a_folder_is_read_and_trained_under_one_lock(tmp_path: Path) -> None:
    """A federation's server holds the lock while it reads the state, and the run loop inside asks for it again."""
    folder = RunFolder(tmp_path)
    with folder.lock():
        with folder.lock():
            assert (tmp_path / ".lock").exists()
        with pytest.raises(LockBusy, match=f"is in use by process {os.getpid()}"), RunFolder(tmp_path).lock():
            pass
    assert not (tmp_path / ".lock").exists()
    with RunFolder(tmp_path).lock():
        pass
