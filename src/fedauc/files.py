"""Files that are written completely or not at all."""

from __future__ import annotations

import functools
import glob
import os
import platform
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, *chunks: bytes | memoryview) -> None:
    """Write a file that is either complete or absent, even if the process is killed or several processes write it."""
    _remove_stale_parts(path.parent.absolute())
    part = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        # It exists only where the write has failed.
        part.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1024)
def _remove_stale_parts(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written; once per folder, since folders may be large."""
    for part in folder.glob(f".*.{glob.escape(platform.node())}-*.part"):
        process = part.stem.rpartition("-")[2]
        if process.isdecimal() and not _is_process_alive(int(process)):
            with suppress(OSError):
                part.unlink()


def _is_process_alive(process: int) -> bool:
    # Signal 0 only asks whether the process exists, but only POSIX systems treat it so.
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
