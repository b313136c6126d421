"""Lock files: one process at a time; the operating system releases a lock when its process ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class LockBusy(ValueError):
    """Another process holds the lock."""


@contextmanager
def hold_lock(path: Path, busy: str, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a lock file and remove it afterwards; raises `LockBusy(busy)` if it is still held after so many seconds.

    `{pid}` in the message becomes the number of the process that holds it. Yields whether the lock is exclusive: on
    systems and file systems without locks, every process gets in.
    """
    deadline = time.monotonic() + seconds
    while True:
        stream = path.open("a+")
        try:
            exclusive = _try_lock(stream)
            # The previous holder may have removed the file meanwhile; then the next process would lock a new file.
            if not exclusive or os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                break
            stream.close()
        except FileNotFoundError:
            stream.close()
        except BlockingIOError:
            with stream:
                stream.seek(0)
                owner = stream.read() or "unknown"
            if time.monotonic() >= deadline:
                raise LockBusy(busy.replace("{pid}", owner)) from None
            time.sleep(0.05)
    with stream:
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        try:
            yield exclusive
        finally:
            path.unlink(missing_ok=True)


def _try_lock(stream: IO[str]) -> bool:
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):
        return False
    return True
