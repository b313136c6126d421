"""Settings of a process that handles messages with large models.

- **Freed memory is used again.** glibc gives blocks of 32 MB and more back when they are freed. The system
  clears every page of the next one, which takes longer than most operations on it: 17 ms for the 44 MB of 1.1e7
  parameters, where an addition takes 3 ms.
- **Parts of 12 MB instead of 5 MB.** Flower sends an array in parts, each of which costs requests and entries in the
  SuperLink's database.

Neither changes a number. This module imports neither torch nor Flower, which reads its setting when it is imported.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The numbers of `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` in glibc's malloc.h."""

LARGEST_KEPT, MOST_KEPT = 1 << 30, (1 << 31) - 1
"""Bytes of a block that is kept, and of freed memory at the end of the heap, beyond which the system gets it back."""

PART_BYTES = 12 << 20

PART_VARIABLE = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
"""Flower's environment variable for the size of parts; whoever sets it decides."""


def prepare_for_large_messages() -> None:
    """Let this process keep up to 2 GiB of freed memory, and Flower send larger parts; call it before importing Flower.

    Where the C library is not glibc, memory is freed as before.
    """
    os.environ.setdefault(PART_VARIABLE, str(PART_BYTES))
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, MOST_KEPT)
        mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
