"""fedauc as a user runs it, on one core."""

from __future__ import annotations

import os
from collections.abc import Callable

from contenders.fedauc import run_engine
from harness.work import Work


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """The same engine; the system keeps its threads on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    run_engine(work, answer_requests, "auto")
