"""Randomness as data: every draw is a pure function of (seed, purpose, round, client).

Nothing here touches a global generator, so engines agree, a run resumes without replay, and one client's draws do not
depend on who else takes part. Streams are raw Philox words, which numpy keeps stable across versions, turned into
indices here; numpy's own `permutation` and `choice` may change from one release to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np

SPARSE = 8
"""Draw distinct indices by rejection when at most 1/SPARSE of them is wanted; sort random words otherwise."""


def words(count: int, *key: Hashable) -> np.ndarray:
    """`count` random uint64 words of the stream that `key` names.

    >>> bool((words(3, 0, "batch", 5, 2) == words(3, 0, "batch", 5, 2)).all())
    True
    >>> bool((words(3, 0, "batch", 5, 2) == words(3, 0, "batch", 5, 3)).any())
    False
    """
    return np.asarray(_philox(key).random_raw(count), dtype=np.uint64)


def generator(*key: Hashable) -> np.random.Generator:
    """A numpy generator for the stream that `key` names, for one-off set-up draws (splits, partitions, noise)."""
    return np.random.Generator(_philox(key))


def integer(*key: Hashable) -> int:
    """A 63-bit integer named by `key`, to seed a generator of another library."""
    return int(words(1, *key)[0] >> np.uint64(1))


def sample(size: int, count: int, *key: Hashable) -> np.ndarray:
    """`count` indices below `size` without replacement, reshuffled each time all have been used.

    Costs O(count), not O(size), when few of many are wanted.

    >>> sorted(sample(3, 6, "example").tolist())
    [0, 0, 1, 1, 2, 2]
    """
    if size <= 0:
        raise ValueError(f"cannot draw {count} indices below {size}: size must be at least 1")
    if count * SPARSE <= size:
        return _distinct(size, count, key)
    passes = -(-count // size)
    stream = words(passes * size, *key).reshape(passes, size)
    # Two equal words of 64 bits will not be seen, so an unstable sort, several times faster, gives the same order.
    return np.argsort(stream, axis=1).reshape(-1)[:count]


def _distinct(size: int, count: int, key: tuple[Hashable, ...]) -> np.ndarray:
    stream = _philox(key)
    # Multiplying a 32-bit fraction by size is unbiased to size / 2**32, far below any sampling error here.
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < count:
        fresh = (stream.random_raw(2 * count) >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)
        drawn = np.concatenate([drawn, fresh.astype(np.int64)])
        first = np.unique(drawn, return_index=True)[1]
        drawn = drawn[np.sort(first)]
    return drawn[:count]


def _philox(key: tuple[Hashable, ...]) -> np.random.Philox:
    # str, not repr: a numpy integer and a Python one name the same stream.
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, dtype="<u8"))
