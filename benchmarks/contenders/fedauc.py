"""fedauc as a user runs it, drawing inside the timed rounds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np

from fedauc.engines import engines
from harness.prepare import assembled
from harness.work import Work


def main(work: Work, serve: Callable[..., None]) -> None:
    """The engine that is chosen by itself; the reference loop as long as there is none."""
    run_engine(work, serve, "auto" if "auto" in engines() else "loop")


def run_engine(work: Work, serve: Callable[..., None], engine: str) -> None:
    """Serve rounds of one engine."""
    (training, _, start), _ = assembled(work.workload, len(work.rows), engine)

    def run(rounds: int) -> np.ndarray:
        state = start
        for finished in islice(training.rounds(start), rounds):
            state = finished.state
        weights: np.ndarray = training.algorithm.model(state.server.shared).weights.numpy()
        return weights

    serve(run, engine=type(training.engine).__name__)
