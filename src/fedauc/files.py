"""Files that are written completely or not at all, and that are still there when the power has failed.

A file is durable once it is synced and the folder that names it is synced as well: until then a new name may be lost
with the power, though the process that gave it has long sent a message about it.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import pickle
import platform
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PROBE_BYTES = 65536
"""What `check_writable` writes: about the size of a small run folder."""


DAMAGE_ERRORS = (
    *(KeyError, IndexError, TypeError, AttributeError, OverflowError, EOFError, RecursionError, AssertionError),
    *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError),
)
"""What a reader raises if a file has the right format and the wrong content, besides ValueError and OSError."""


def write_atomically(
    path: Path, *chunks: bytes | memoryview, is_private: bool = False, is_durable: bool = True
) -> None:
    """Write a file that is either complete or absent, even if the process is killed or several processes write it.

    When this returns, the file is on the disk under its name. One that is not durable may be lost or empty after the
    machine itself has crashed, and is written without waiting for the disk. A private one is readable by its owner
    alone, from its first byte on.
    """
    with open_atomically(path, is_private, is_durable) as file:
        file.writelines(chunks)


@contextmanager
def open_atomically(path: Path, is_private: bool = False, is_durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which gets its name when the block ends without an error."""
    _remove_stale_parts(path.parent.absolute())
    part = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.part")
    try:
        mode = 0o600 if is_private else 0o666
        with naming_path(path), open(part, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        part.replace(path)
        if is_durable:
            sync_folder(path.parent)
    finally:
        # It exists only where the write has failed.
        part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive the loss of power, where the system offers that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents where they do not exist, and let their names survive the loss of power."""
    # An empty one may be what a process made that was killed before it could sync the name.
    if folder.is_dir() and any(folder.iterdir()):
        return
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
    sync_folder(folder.parent)


def move_folder(folder: Path, target: Path) -> None:
    """Give a finished folder its name, for good."""
    folder.rename(target)
    sync_folder(target.parent)


@contextmanager
def append_durably(path: Path, is_private: bool = False) -> Iterator[BinaryIO]:
    """A file to append to, which is on the disk under its name when the block ends without an error."""
    is_new = not path.exists()
    mode = 0o600 if is_private else 0o666
    with naming_path(path), open(path, "ab", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


@contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Let the errors of writing to an open file name it, as those of opening it do: a full disk has no name of its own.

    >>> with naming_path(Path("scores.csv")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'scores.csv'
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def check_writable(path: Path) -> None:
    """Refuse a path where nothing can be written: a file is written beside it, or in its nearest existing parent.

    It is as large as a small run folder, so that a full disk is noticed too, and removed at once.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        write_atomically(folder / f".{path.name}.probe", bytes(PROBE_BYTES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{path} cannot be written: {folder} says {reason!r}; choose another folder") from error
    (folder / f".{path.name}.probe").unlink()


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn what a damaged file of a folder does to its readers into one line.

    A file that is JSON still, but lacks a value or has one of another kind, breaks whoever uses the value.
    """
    try:
        yield
    except DAMAGE_ERRORS as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{path} cannot be read, because a file in it is damaged ({what}); `fedauc verify {path}` names the file"
        ) from error


@functools.lru_cache(maxsize=1024)
def _remove_stale_parts(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written; once per folder, since folders may be large."""
    for part in folder.glob(f".*.{glob.escape(platform.node())}-*.part"):
        process = part.stem.rpartition("-")[2]
        if process.isdecimal() and not is_process_alive(int(process)):
            with suppress(OSError):
                part.unlink()


def is_process_alive(process: int) -> bool:
    """Whether a process of this machine exists; systems other than POSIX cannot tell, and say yes."""
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
