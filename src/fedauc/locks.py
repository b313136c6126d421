"""One process at a time: a lock file that the system lets go of when its process ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Busy(ValueError):
    """Another holds the lock."""


@contextmanager
def locked(path: Path, busy: str, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a lock file and remove it afterwards; `Busy(busy)` where another holds it still after so many seconds.

    `{pid}` in the message becomes the number of the process that does. Tells whether the lock is sure: where a system
    or a file system has no locks, everybody is let in.
    """
    end = time.monotonic() + seconds
    while True:
        stream = path.open("a+")
        try:
            sure = _lock(stream)
            # Who had it may have removed it meanwhile; then the next to come locks a new file of that name.
            if not sure or _is(path, stream):
                break
            stream.close()
        except BlockingIOError:
            stream.close()
            if time.monotonic() >= end:
                raise Busy(busy.replace("{pid}", _owner(path))) from None
            time.sleep(0.05)
    with stream:
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        try:
            yield sure
        finally:
            path.unlink(missing_ok=True)


def _lock(stream: IO[str]) -> bool:
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):
        return False
    return True


def _owner(path: Path) -> str:
    try:
        return path.read_text() or "unknown"
    except OSError:
        return "unknown"


def _is(path: Path, stream: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False
