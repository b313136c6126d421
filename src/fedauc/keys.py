"""Randomness as data: every draw is a pure function of (seed, purpose, round, client).

Nothing here touches a global generator, so engines agree, a run resumes without replay, and one client's draws do not
depend on who else takes part. Streams are raw Philox words, which numpy keeps stable across versions, turned into
indices here; numpy's own `permutation` and `choice` may change from one release to the next. What a whole cohort draws
in every round (`samples`) comes from a counter-based hash instead, which is a few array operations for all clients:
SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014) with a key of 128 bits,
whose words depend on nothing but the key and their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

SPARSE = 8
"""Draw distinct indices by rejection when at most 1/SPARSE of them is wanted; sort random words otherwise."""

LOW = np.uint64((1 << 28) - 1)
"""The bits of a word that give way to an index, so that sorting the words themselves, by the 36 others, shuffles."""

HALF = np.uint64(32)

GAMMA, FIRST, SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def random_words(count: int, *key: Hashable) -> np.ndarray:
    """`count` random uint64 words of the stream that `key` names.

    >>> bool((random_words(3, 0, "batch", 5, 2) == random_words(3, 0, "batch", 5, 2)).all())
    True
    >>> bool((random_words(3, 0, "batch", 5, 2) == random_words(3, 0, "batch", 5, 3)).any())
    False
    """
    return np.asarray(_philox_stream(key).random_raw(count), dtype=np.uint64)


def numpy_generator(*key: Hashable) -> np.random.Generator:
    """A numpy generator for the stream that `key` names, for one-off set-up draws (splits, partitions, noise)."""
    return np.random.Generator(_philox_stream(key))


def random_integer(*key: Hashable) -> int:
    """A 63-bit integer named by `key`, to seed a generator of another library."""
    return int(random_words(1, *key)[0] >> np.uint64(1))


def sample_indices(size: int, count: int, *key: Hashable) -> np.ndarray:
    """`count` indices below `size` without replacement, reshuffled each time all have been used.

    Costs O(count), not O(size), when few of many are wanted.

    >>> sorted(sample_indices(3, 6, "example").tolist())
    [0, 0, 1, 1, 2, 2]
    """
    if size <= 0:
        raise ValueError(f"cannot draw {count} indices below {size}: size must be at least 1")
    if count * SPARSE <= size:
        return _sample_distinct(size, count, key)
    passes = -(-count // size)
    stream = random_words(passes * size, *key).reshape(passes, size)
    # Two equal words of 64 bits will not be seen, so an unstable sort, several times faster, gives the same order.
    return np.argsort(stream, axis=1).reshape(-1)[:count]


def sample_client_indices(
    sizes: np.ndarray, count: int, clients: Sequence[int] | np.ndarray, *key: Hashable
) -> np.ndarray:
    """For every client what `sample` gives one: `count` indices below its size, `[M, count]`.

    A row is a function of the key, the client and its size: who else is asked for makes no difference.

    >>> np.sort(sample_client_indices(np.array([3, 2]), 6, (7, 4), "example")).tolist()
    [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]]
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    smallest, largest = int(sizes.min()), int(sizes.max())
    if smallest <= 0:
        raise ValueError(f"cannot draw {count} indices below {smallest}: size must be at least 1")
    streams = _client_streams(key, clients)
    if smallest == largest:
        return (_take_first_distinct if count * SPARSE <= largest else _shuffle_equal_sizes)(sizes, count, streams)
    # Clients of like size are shuffled together, padded to the largest: none to four times its size.
    kinds = np.where(count * SPARSE <= sizes, 0, (np.frexp(sizes)[1] + 1) // 2)
    drawn = np.empty((len(sizes), count), dtype=np.int64)
    for kind in set(kinds.tolist()):
        mine = kinds == kind
        drawn[mine] = (_shuffle_any_sizes if kind else _take_first_distinct)(sizes[mine], count, streams[:, mine])
    return drawn


def count_words(size: int, count: int) -> int:
    """About as many random words as one client's row of `samples` takes: at most twice."""
    return count + count // SPARSE + SPARSE if count * SPARSE <= size else max(size, count)


def _shuffle_equal_sizes(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """Passes over all indices of clients of one size, each pass in a new order."""
    size, passes = int(sizes[0]), -(-count // int(sizes[0]))
    words = _splitmix_words(np.arange(passes * size, dtype=np.uint64), *streams[:, :, None])
    _sort_positions(words.reshape(-1, size), np.arange(size, dtype=np.uint64))
    return words.view(np.int64)[:, :count]


def _shuffle_any_sizes(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """The same for any sizes: a pass is a row as wide as the largest client, and what is beyond its own sorts last."""
    passes = -(-count // sizes)
    owner = np.repeat(np.arange(len(sizes)), passes)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(passes) - passes, passes)
    place = np.arange(sizes.max())
    inside = place < sizes[owner, None]
    words = _splitmix_words(
        (number * sizes[owner])[:, None].astype(np.uint64) + place.astype(np.uint64), *streams[:, owner, None]
    )
    words[~inside] = ~np.uint64(0)
    _sort_positions(words, place.astype(np.uint64))
    starts = np.cumsum(passes * sizes) - passes * sizes
    taken: np.ndarray = words.view(np.int64)[inside][starts[:, None] + np.arange(count)]
    return taken


def _sort_positions(words: np.ndarray, place: np.ndarray) -> None:
    """Put the order of each row's words, by all but their low bits, in their place."""
    assert place[-1] <= LOW
    words &= ~LOW
    words |= place
    # Several times faster than argsort.
    words.sort(axis=1)
    words &= LOW


def _take_first_distinct(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """The first indices of each client's stream that did not come before."""
    # At most one index in SPARSE is wanted, so that repeats are fewer than one in 2 * SPARSE, save by bad luck.
    words = count_words(int(sizes.min()), count)
    while True:
        place = np.arange(words, dtype=np.uint64)
        index = (_splitmix_words(place, *streams[:, :, None]) >> HALF) * sizes[:, None].astype(np.uint64) >> HALF
        ordered = np.sort(index << HALF | place, axis=1)
        client, rank = np.nonzero(ordered[:, 1:] >> HALF == ordered[:, :-1] >> HALF)
        fresh = np.ones(index.shape, dtype=bool)
        fresh[client, ordered[client, rank + 1] & ~np.uint64(0) >> HALF] = False
        if np.count_nonzero(fresh, axis=1).min() >= count:
            fresh &= np.cumsum(fresh, axis=1) <= count
            return index[fresh].reshape(len(sizes), count).view(np.int64)
        words *= 2


def _client_streams(key: tuple[Hashable, ...], clients: Sequence[int] | np.ndarray) -> np.ndarray:
    """Two words for each client `[2, M]`: its key."""
    base = np.frombuffer(_hash_key(key), dtype="<u8").astype(np.uint64)[:, None]
    return _splitmix_words(np.asarray(clients, dtype=np.uint64), base, base[::-1])


def _splitmix_words(counters: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """SplitMix64's words of the stream that starts at `first`; `second` keeps streams that meet apart."""
    words: np.ndarray = counters * GAMMA + first
    # Fresh memory for each of these would cost more than the arithmetic.
    spare = np.empty_like(words)
    words ^= np.right_shift(words, np.uint64(30), out=spare)
    words *= FIRST
    words += second
    words ^= np.right_shift(words, np.uint64(27), out=spare)
    words *= SECOND
    words ^= np.right_shift(words, np.uint64(31), out=spare)
    return words


def _sample_distinct(size: int, count: int, key: tuple[Hashable, ...]) -> np.ndarray:
    stream = _philox_stream(key)
    # Multiplying a 32-bit fraction by size is unbiased to size / 2**32, far below any sampling error here.
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < count:
        fresh = (stream.random_raw(2 * count) >> HALF) * np.uint64(size) >> HALF
        drawn = np.concatenate([drawn, fresh.astype(np.int64)])
        first = np.unique(drawn, return_index=True)[1]
        drawn = drawn[np.sort(first)]
    return drawn[:count]


def _philox_stream(key: tuple[Hashable, ...]) -> np.random.Philox:
    return np.random.Philox(key=np.frombuffer(_hash_key(key), dtype="<u8"))


def _hash_key(key: tuple[Hashable, ...]) -> bytes:
    # str, not repr: a numpy integer and a Python one name the same stream.
    return hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()
