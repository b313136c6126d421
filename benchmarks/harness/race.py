"""All contenders on one workload, started and warmed up first, then measured in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from harness.environments import NotInstalled, python_of
from harness.process import Worker, WorkerFailed, WorkerSetup

TOLERANCE = 5e-4
"""How far the final weights may be from the plain loop's, in norm, relative to how far training moved them.

Sums in another order part ways at the kinks of a ReLU: correct contenders were up to 1.1e-4 apart after 20 rounds of
the MLP in float32, while a single other batch, of 6,400, made 2e-3.
"""


class Limits(NamedTuple):
    """Rounds per measurement, repetitions, threads; and the seconds a contender may spend, after which it rests."""

    rounds: int
    repeats: int
    threads: int
    patience: float


class Outcome(NamedTuple):
    """One contender's measurements in milliseconds per round, or why there are none."""

    contender: str
    times: list[float]
    difference: float | None = None
    versions: dict[str, str] = {}  # noqa: RUF012
    about: dict[str, Any] = {}  # noqa: RUF012
    failed: str | None = None

    @property
    def best(self) -> float:
        """The fastest repetition."""
        return min(self.times)

    @property
    def median(self) -> float:
        """The middle repetition."""
        return median(self.times)


class _Lane:
    """A contender's way through the race."""

    def __init__(self, contender: str) -> None:
        self.outcome = Outcome(contender, [])
        self.worker: Worker | None = None
        self.spent = 0.0

    def fail(self, reason: str) -> None:
        self.outcome = self.outcome._replace(failed=reason, times=[])
        print(f"  {self.outcome.contender}: {reason}", file=sys.stderr, flush=True)
        self.close()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def race_contenders(contenders: Sequence[str], work: Path, start: np.ndarray, limits: Limits) -> list[Outcome]:
    """Measure the contenders, `torch-loop` among them, whose result the others must give."""
    lanes = [_Lane(contender) for contender in contenders]
    try:
        for lane in lanes:
            _start_contender(lane, work, limits)
        reference = _reference_weights(lanes, limits)
        for lane in lanes:
            _measure_contender(lane, limits, reference, start, timed=False)
        for _ in range(limits.repeats):
            for lane in lanes:
                if lane.spent <= limits.patience or not lane.outcome.times:
                    _measure_contender(lane, limits, reference, start, timed=True)
    finally:
        for lane in lanes:
            lane.close()
    return [lane.outcome for lane in lanes]


def _start_contender(lane: _Lane, work: Path, limits: Limits) -> None:
    contender = lane.outcome.contender
    try:
        setup = WorkerSetup(python_of(contender), work, work.parent, limits.threads)
        lane.worker = Worker(contender, setup)
        said = lane.worker.wait_until_ready(seconds=180)
        lane.outcome = lane.outcome._replace(versions=said["versions"], about=said["about"])
    except NotInstalled as error:
        lane.fail(f"not installed: {error}")
    except WorkerFailed as error:
        lane.fail(f"failed: {error}")


def _reference_weights(lanes: list[_Lane], limits: Limits) -> np.ndarray:
    """The hand-written loop's weights, which depend on nothing of fedauc but the draws."""
    for lane in lanes:
        if lane.outcome.contender == "torch-loop" and lane.worker is not None:
            return lane.worker.run_rounds(limits.rounds, seconds=600)[1]
    raise SystemExit("the plain loop did not start, so there is nothing to compare with; see benchmarks/out/logs")


def _measure_contender(lane: _Lane, limits: Limits, reference: np.ndarray, start: np.ndarray, timed: bool) -> None:
    """One measurement, its result checked; a warm-up counts for the check only."""
    if lane.worker is None:
        return
    begun = time.monotonic()
    try:
        seconds, weights = lane.worker.run_rounds(limits.rounds, seconds=900)
    except WorkerFailed as error:
        lane.fail(f"failed: {error}")
        return
    lane.spent += time.monotonic() - begun
    difference = _relative_difference(weights, reference, start)
    if not difference <= TOLERANCE:
        lane.fail(f"another result: {difference:.1e} from the plain loop's, more than {TOLERANCE:.0e}")
        return
    times = [*lane.outcome.times, seconds / limits.rounds * 1e3] if timed else lane.outcome.times
    worst = max(difference, lane.outcome.difference or 0.0)
    lane.outcome = lane.outcome._replace(times=times, difference=worst)


def _relative_difference(weights: np.ndarray, reference: np.ndarray, start: np.ndarray) -> float:
    if weights.shape != reference.shape:
        return float("inf")
    wide = [vector.astype(np.float64) for vector in (weights, reference, start)]
    return float(np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1] - wide[2]))
