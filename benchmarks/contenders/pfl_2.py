"""pfl-research on two processes: this one and a twin that takes half of every cohort."""

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


def main(work: Work, serve: Callable[..., None]) -> None:
    """Start the twin, join it, and tell it of every measurement."""
    os.environ[ADDRESSES], os.environ[RANK] = f"127.0.0.1:{_free_port()},127.0.0.1:0", "0"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        work.save(path)
        command = [sys.executable, "-m", "contenders.pfl_2", str(path)]
        place = Path(__file__).resolve().parents[1]
        environment = {**os.environ, RANK: "1"}
        with subprocess.Popen(command, cwd=place, env=environment, stdin=subprocess.PIPE, text=True) as twin:
            assert twin.stdin is not None
            from contenders.pfl import runner  # joins the twin when it is imported

            own, orders = runner(work), twin.stdin

            def run(rounds: int) -> np.ndarray:
                print(rounds, file=orders, flush=True)
                return own(rounds)

            serve(run, processes=2)


def follow(path: Path) -> None:
    """The twin's side."""
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
