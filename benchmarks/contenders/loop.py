"""fedauc's reference engine."""

from __future__ import annotations

from collections.abc import Callable

from contenders.fedauc import run_engine
from harness.work import Work


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """The plain loop of `engines/loop.py`."""
    run_engine(work, answer_requests, "loop")
