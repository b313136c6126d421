"""Large arrays in little memory: blocks of rows, memory-mapped files, and zeros that cost nothing until written."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

WORDS_PER_BLOCK = 1 << 16
"""How many random words are drawn at once for several clients; fewer clients are taken at once if they need more."""

LARGE = 1 << 20
"""Float32 numbers that take 4 MB."""


def row_blocks(shape: Sequence[int], values: int) -> Iterator[slice]:
    """Slices of rows that cover an array of that shape, each with at most `values` values, but at least one row.

    >>> list(row_blocks((5, 3), 6))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, values // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integer type for indices below `count`: int32 where it suffices, since it halves the size of an index."""
    return np.int32 if count <= 2**31 else np.int64


def make_writable(array: np.ndarray) -> np.ndarray:
    """The rows of a read-only memory-mapped file through a new private mapping; any other array is returned unchanged.

    Torch accepts writable memory only. What is written to a private mapping never reaches the file, and none of its
    pages is in memory before it is used. The file must not have changed since it was mapped.
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root, np.memmap) or root.mode != "r" or root.filename is None:
        return array
    if array.flags.writeable or not array.flags.c_contiguous:
        return array
    try:
        private = np.memmap(root.filename, np.uint8, "c", root.offset, (root.nbytes,))
    except (OSError, ValueError):
        # The file was moved or replaced. The old mapping still shows its rows, and the caller copies them.
        return array
    return np.ndarray(array.shape, array.dtype, buffer=private, offset=array.ctypes.data - root.ctypes.data)


def sparse_zeros(count: int) -> np.ndarray:
    """Float32 zeros that take memory only where something is written, 4 KB at a time.

    Numpy's zeros do so up to 4 MB. For larger arrays numpy asks for pages of 2 MB, so that a few ones occupy them all.
    """
    private = getattr(mmap, "MAP_PRIVATE", 0)
    if count < LARGE or not private:
        return np.zeros(count, dtype=np.float32)
    buffer = mmap.mmap(-1, 4 * count, private | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(buffer, dtype=np.float32)


def release_freed_memory() -> None:
    """Return freed memory to the operating system, where the C library supports it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
