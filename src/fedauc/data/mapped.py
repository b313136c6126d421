"""Rows in a memory-mapped file: handed to torch without a copy, so that a table may be larger than memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

LARGE = 1 << 20
"""Float32 numbers that take 4 MB."""


def writable(array: np.ndarray) -> np.ndarray:
    """The rows of a read-only mapping through a new, private one of the same file; any other array as it is.

    Torch takes writable memory only. What is written to a private mapping never reaches the file, and no page of it is
    in memory before it is used. The file must still be the one that was mapped.
    """
    root = _root(array)
    if root is None or root.filename is None or array.flags.writeable or not array.flags.c_contiguous:
        return array
    try:
        fresh = np.memmap(root.filename, np.uint8, "c", root.offset, (root.nbytes,))
    except (OSError, ValueError):
        # The file has been moved since, or is another; the old mapping still shows its rows, for the caller to copy.
        return array
    return np.ndarray(array.shape, array.dtype, buffer=fresh, offset=array.ctypes.data - root.ctypes.data)


def zeros(count: int) -> np.ndarray:
    """Float32 zeros that take memory only where something is written, 4 KB at a time.

    Numpy's own do so up to 4 MB; of larger ones it asks the system for pages of 2 MB, so that a few ones fill them all.
    """
    private = getattr(mmap, "MAP_PRIVATE", 0)
    if count < LARGE or not private:
        return np.zeros(count, dtype=np.float32)
    room = mmap.mmap(-1, 4 * count, private | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(room, dtype=np.float32)


def give_back() -> None:
    """Hand memory that has been freed back to the system, where the C library can be asked to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _root(array: np.ndarray) -> np.memmap | None:
    """The read-only mapping that an array is a view of, if it is one."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    return root if isinstance(root, np.memmap) and root.mode == "r" else None
