"""One server per run: a ServerApp may outlive its SuperLink and must not write beside the one that resumes its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0
"""Seconds in which a server that lost its SuperLink gives up."""


@contextmanager
def alone(folder: Path, seconds: float = PATIENCE) -> Iterator[None]:
    """Hold a folder for this process. The system lets go of it when the process ends, however it ends."""
    import fcntl

    end = time.monotonic() + seconds
    with (folder / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    remedy = "stop it, or wait until it has ended"
                    raise ValueError(f"{folder} is in use by another server since {seconds:g} s; {remedy}") from None
                time.sleep(0.1)
        yield
