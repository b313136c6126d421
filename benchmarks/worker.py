"""A contender's process: gets ready, then answers `go N` on stdin with one JSON line each, until stdin ends.

    python benchmarks/worker.py CONTENDER WORK.npz RESULT.npy

The final weights of each measurement are written to RESULT.npy after the clock has stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from harness.work import Work

Run = Callable[[int], np.ndarray]

PACKAGES = ("fedauc", "torch", "numpy", "jax", "jaxlib", "fedjax", "pfl", "flwr", "ray")


def main(contender: str, work: str, result: str) -> None:
    """Import the contender and let it answer requests."""
    # Libraries print; the answers keep a channel of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer_requests(run: Run, **about: Any) -> None:
        _send_answer(answers, ready=True, versions=_list_versions(), about=about)
        for line in sys.stdin:
            rounds = int(line.split()[1])
            start = time.perf_counter()
            weights = run(rounds)
            seconds = time.perf_counter() - start
            np.save(result, np.asarray(weights, dtype=np.float32))
            _send_answer(answers, seconds=seconds)

    import_module("contenders." + contender.replace("-", "_")).main(Work.load(Path(work)), answer_requests)


def _send_answer(answers: TextIO, **fields: Any) -> None:
    print(json.dumps(fields), file=answers, flush=True)


def _list_versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


if __name__ == "__main__":
    main(*sys.argv[1:])
