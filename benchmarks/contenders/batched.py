"""fedauc's batched engine, never compiled: what `auto` chooses for short runs."""

from __future__ import annotations

from collections.abc import Callable

from contenders.fedauc import run_engine
from harness.work import Work


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """The cohort as one stack."""
    run_engine(work, answer_requests, "batched")
