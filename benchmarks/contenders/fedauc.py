"""fedauc as a user runs it, drawing inside the timed rounds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from harness.prepare import assemble_workload
from harness.work import Work

LONG = 10_000
"""Rounds of the run the measured ones are the first of: `auto` compiles for long runs, and jax always compiles."""


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """The engine that fedauc chooses by itself."""
    run_engine(work, answer_requests, "auto")


def run_engine(work: Work, answer_requests: Callable[..., None], engine: str) -> None:
    """Serve rounds of one engine."""
    (training, _, start), _ = assemble_workload(work.workload, LONG, engine)

    def run(rounds: int) -> np.ndarray:
        state = start
        for finished in islice(training.rounds(start), rounds):
            state = finished.state
        weights: np.ndarray = training.algorithm.extract_model(state.server.shared).weights.numpy()
        return weights

    answer_requests(run, engine=type(training.engine).__name__)
