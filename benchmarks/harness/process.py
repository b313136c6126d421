"""A contender's worker process, seen from the driver: started, asked, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.environments import HERE


class WorkerFailed(Exception):
    """A worker died, hung or answered nonsense; the message says which."""


class WorkerSetup(NamedTuple):
    """Where a contender works: its interpreter, the work file, a folder for its log and result, and its threads."""

    python: str
    work: Path
    folder: Path
    threads: int


class Worker:
    """One contender on one workload."""

    def __init__(self, contender: str, setup: WorkerSetup) -> None:
        self._log, self._result = setup.folder / f"{contender}.log", setup.folder / f"{contender}.npy"
        command = [setup.python, "-u", str(HERE / "worker.py"), contender, str(setup.work), str(self._result)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_make_environment(setup.threads),
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._queue_answers, daemon=True).start()

    def wait_until_ready(self, seconds: float) -> dict[str, Any]:
        """Wait until it has imported and built everything; its versions and what it says of itself."""
        return self._receive_answer(seconds)

    def run_rounds(self, rounds: int, seconds: float) -> tuple[float, np.ndarray]:
        """Run so many rounds from the start: seconds by the worker's own clock, and the final weights."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"go {rounds}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(self._explain_failure()) from error
        answer = self._receive_answer(seconds)
        return float(answer["seconds"]), np.load(self._result)

    def close(self) -> None:
        """Let it end by itself, then end it and what it started in its session."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _queue_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _receive_answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty as error:
            raise WorkerFailed(f"no answer in {seconds:.0f} s") from error
        if not line:
            raise WorkerFailed(self._explain_failure())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _explain_failure(self) -> str:
        """What the log says last, the exception if there is one."""
        time.sleep(0.2)
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        return (errors or lines or ["the process ended without a word"])[-1][:300]


def _make_environment(threads: int) -> dict[str, str]:
    """The same number of threads for every library; idle ones sleep rather than spin."""
    count = str(threads)
    flags = "" if threads > 1 else "--xla_cpu_multi_thread_eigen=false"
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"), count),
        "OMP_WAIT_POLICY": "PASSIVE",
        "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip(),
        "JAX_PLATFORMS": "cpu",
        "PFL_PYTORCH_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
