"""How much memory a round needs, estimated before it is taken, so that a mistyped number ends in one line."""

from __future__ import annotations

import os

from fedauc.interfaces import BatchSize

BYTES_PER_DRAWN_ROW = 32
"""Numbers of drawn rows are 8 bytes, and drawing them takes about four such arrays at a time."""

GIB = 2**30


def estimate_draw_bytes(cohort: int, local_steps: int, batch: BatchSize) -> int:
    """The bytes that drawing the batches of a round takes: one row number per client, local step and row.

    >>> estimate_draw_bytes(10, 16, BatchSize(16, 16))
    163840
    """
    return cohort * local_steps * batch.total_rows * BYTES_PER_DRAWN_ROW


def physical_memory() -> int | None:
    """The bytes of memory that this machine has; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_draw_memory(cohort: int, local_steps: int, batch: BatchSize, available: int | None = None) -> None:
    """Refuse a round whose batches would not fit into the memory of this machine."""
    needed, present = estimate_draw_bytes(cohort, local_steps, batch), available or physical_memory()
    if present is None or needed <= present:
        return
    raise ValueError(
        f"a round draws {batch.positives:,} positives and {batch.negatives:,} negatives for {cohort} clients and "
        f"{local_steps} local steps, which needs about {needed / GIB:,.0f} GiB, and this machine has "
        f"{present / GIB:,.0f}: lower positives, negatives or local_steps"
    )
