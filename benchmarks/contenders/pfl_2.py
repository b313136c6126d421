"""pfl-research on two processes: this one and a second process that takes half of every cohort."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.work import Work

ADDRESSES, RANK = "PFL_WORKER_ADDRESSES", "PFL_WORKER_RANK"


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """Start the second process, join it, and tell it of every measurement."""
    os.environ[ADDRESSES], os.environ[RANK] = f"127.0.0.1:{_free_port()},127.0.0.1:0", "0"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        work.save(path)
        command = [sys.executable, "-m", "contenders.pfl_2", str(path)]
        home = Path(__file__).resolve().parents[1]
        environment = {**os.environ, RANK: "1"}
        with subprocess.Popen(command, cwd=home, env=environment, stdin=subprocess.PIPE, text=True) as second_process:
            assert second_process.stdin is not None
            from contenders.pfl import runner  # joins the second process when it is imported

            run_here, requests = runner(work), second_process.stdin

            def run(rounds: int) -> np.ndarray:
                print(rounds, file=requests, flush=True)
                return run_here(rounds)

            answer_requests(run, processes=2)


def follow(path: Path) -> None:
    """What the second process does."""
    from contenders.pfl import runner

    run = runner(Work.load(path))
    for line in sys.stdin:
        run(int(line))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
