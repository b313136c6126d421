"""Large arrays a few rows at a time, so that temporaries stay small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

WORDS = 1 << 16
"""Random words that clients draw together; those who need more go in smaller blocks, down to one at a time."""


def row_blocks(shape: Sequence[int], values: int) -> Iterator[slice]:
    """Slices of rows that cover an array of that shape, each with at most so many values, or one row.

    >>> list(row_blocks((5, 3), 6))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, values // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def index_type(count: int) -> type[np.signedinteger[Any]]:
    """The integers that number so many things: int32 where that is enough, for it is half of what an index takes."""
    return np.int32 if count <= 2**31 else np.int64
