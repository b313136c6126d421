"""Seeded stand-ins for the module `secrets`, so that tests repeat."""

from __future__ import annotations

import random


class SeededSource:
    """Numbers that look random and repeat."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token_bytes(self, nbytes: int, /) -> bytes:
        return self._random.randbytes(nbytes)

    def randbelow(self, exclusive_upper_bound: int, /) -> int:
        return self._random.randrange(exclusive_upper_bound)
