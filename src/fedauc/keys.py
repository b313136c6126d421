"""Randomness as data: every draw is a pure function of (seed, purpose, round, client).

Nothing here touches a global generator. Engines therefore agree, a run resumes without replay, and the draws of one
client do not depend on the other clients. Streams are raw Philox words, which numpy keeps stable across versions, and
are turned into indices here; numpy's `permutation` and `choice` may change from one release to the next. The draws of a
whole cohort (`sample_client_indices`) use a counter-based hash instead, which takes a few array operations for all
clients: SplitMix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014) with a key of
128 bits, whose words depend only on the key and their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

SPARSE = 8
"""Distinct indices are drawn by rejection when at most 1/SPARSE of them are wanted, else by sorting random words."""

LOW_BITS, HIGH_BITS = (1 << 28) - 1, (1 << 64) - (1 << 28)
"""The low bits of a word are replaced by an index: sorting the words by their 36 high bits then shuffles."""

HALF_WORD = 32

# Plain integers take the type of the unsigned words they meet, and need no numpy at import.
SPLITMIX_GAMMA, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_words(count: int, *key: Hashable) -> np.ndarray:
    """`count` random uint64 words of the stream that `key` names.

    >>> bool((random_words(3, 0, "batch", 5, 2) == random_words(3, 0, "batch", 5, 2)).all())
    True
    >>> bool((random_words(3, 0, "batch", 5, 2) == random_words(3, 0, "batch", 5, 3)).any())
    False
    """
    return np.asarray(_philox_stream(key).random_raw(count), dtype=np.uint64)


def numpy_generator(*key: Hashable) -> np.random.Generator:
    """A numpy generator for the stream that `key` names, for draws at set-up (splits, partitions, noise)."""
    return np.random.Generator(_philox_stream(key))


def random_integer(*key: Hashable) -> int:
    """A random integer of 63 bits named by `key`, to seed a generator of another library."""
    return int(random_words(1, *key)[0] >> np.uint64(1))


def sample_indices(size: int, count: int, *key: Hashable) -> np.ndarray:
    """Draw `count` indices below `size` without replacement, reshuffling each time all have been used.

    The cost is O(count), not O(size), when few of many are wanted.

    >>> sorted(sample_indices(3, 6, "example").tolist())
    [0, 0, 1, 1, 2, 2]
    """
    if size <= 0:
        raise ValueError(f"cannot draw {count} indices below {size}: size must be at least 1")
    if count * SPARSE <= size:
        return _sample_distinct(size, count, key)
    passes = -(-count // size)
    stream = random_words(passes * size, *key).reshape(passes, size)
    # Two equal words of 64 bits practically never occur, so the unstable sort, which is faster, gives the same order.
    return np.argsort(stream, axis=1).reshape(-1)[:count]


def sample_client_indices(
    sizes: np.ndarray, count: int, clients: Sequence[int] | np.ndarray, *key: Hashable
) -> np.ndarray:
    """Draw for every client as `sample_indices` does for one: `count` indices below its size, `[M, count]`.

    A row depends on the key, the client and its size, and not on the other clients of the call.

    >>> np.sort(sample_client_indices(np.array([3, 2]), 6, (7, 4), "example")).tolist()
    [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]]
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    smallest, largest = int(sizes.min()), int(sizes.max())
    if smallest <= 0:
        raise ValueError(f"cannot draw {count} indices below {smallest}: size must be at least 1")
    # The key of each client's stream is two words, `[2, M]`.
    base = np.frombuffer(_hash_key(key), dtype="<u8").astype(np.uint64)[:, None]
    streams = _splitmix_words(np.asarray(clients, dtype=np.uint64), base, base[::-1])
    if smallest == largest:
        return (_take_first_distinct if count * SPARSE <= largest else _shuffle_equal_sizes)(sizes, count, streams)
    # Clients of similar size are shuffled together, padded to the largest, which is less than four times their size.
    size_classes = np.where(count * SPARSE <= sizes, 0, (np.frexp(sizes)[1] + 1) // 2)
    indices = np.empty((len(sizes), count), dtype=np.int64)
    for size_class in set(size_classes.tolist()):
        members = size_classes == size_class
        draw = _shuffle_any_sizes if size_class else _take_first_distinct
        indices[members] = draw(sizes[members], count, streams[:, members])
    return indices


def client_words(clients: Sequence[int] | np.ndarray, *key: Hashable) -> np.ndarray:
    """A random uint64 word for every client, `[M]`; it depends on the key and the client alone."""
    first, second = np.frombuffer(_hash_key(key), dtype="<u8").astype(np.uint64)
    return _splitmix_words(np.asarray(clients, dtype=np.uint64), first, second)


def count_words(size: int, count: int) -> int:
    """About how many random words a row of `sample_client_indices` takes; it may take twice as many."""
    return count + count // SPARSE + SPARSE if count * SPARSE <= size else max(size, count)


def _shuffle_equal_sizes(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """Shuffled passes over all indices, for clients of one size."""
    size, passes = int(sizes[0]), -(-count // int(sizes[0]))
    words = _splitmix_words(np.arange(passes * size, dtype=np.uint64), *streams[:, :, None])
    _sort_positions(words.reshape(-1, size), np.arange(size, dtype=np.uint64))
    return words.view(np.int64)[:, :count]


def _shuffle_any_sizes(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """Shuffled passes for clients of any size: a pass is a row as wide as the largest client, padded at its end."""
    passes = -(-count // sizes)
    owner = np.repeat(np.arange(len(sizes)), passes)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(passes) - passes, passes)
    positions = np.arange(sizes.max())
    inside = positions < sizes[owner, None]
    words = _splitmix_words(
        (number * sizes[owner])[:, None].astype(np.uint64) + positions.astype(np.uint64), *streams[:, owner, None]
    )
    words[~inside] = ~np.uint64(0)
    _sort_positions(words, positions.astype(np.uint64))
    starts = np.cumsum(passes * sizes) - passes * sizes
    taken: np.ndarray = words.view(np.int64)[inside][starts[:, None] + np.arange(count)]
    return taken


def _sort_positions(words: np.ndarray, positions: np.ndarray) -> None:
    """Replace the words of each row by their positions, sorted by all but the low bits of the words."""
    assert positions[-1] <= LOW_BITS
    words &= HIGH_BITS
    words |= positions
    # This is several times faster than argsort.
    words.sort(axis=1)
    words &= LOW_BITS


def _take_first_distinct(sizes: np.ndarray, count: int, streams: np.ndarray) -> np.ndarray:
    """The first `count` distinct indices of each client's stream."""
    # At most one index in SPARSE is wanted, so less than one word in 2 * SPARSE is expected to repeat an index.
    words = count_words(int(sizes.min()), count)
    while True:
        positions = np.arange(words, dtype=np.uint64)
        index = (_splitmix_words(positions, *streams[:, :, None]) >> HALF_WORD) * sizes[:, None].astype(
            np.uint64
        ) >> HALF_WORD
        ordered = np.sort(index << HALF_WORD | positions, axis=1)
        client, rank = np.nonzero(ordered[:, 1:] >> HALF_WORD == ordered[:, :-1] >> HALF_WORD)
        fresh = np.ones(index.shape, dtype=bool)
        fresh[client, ordered[client, rank + 1] & ~np.uint64(0) >> HALF_WORD] = False
        if np.count_nonzero(fresh, axis=1).min() >= count:
            fresh &= np.cumsum(fresh, axis=1) <= count
            return index[fresh].reshape(len(sizes), count).view(np.int64)
        words *= 2


def _splitmix_words(counters: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """SplitMix64's words of the stream that starts at `first`; `second` separates streams that would overlap."""
    words: np.ndarray = counters * SPLITMIX_GAMMA + first
    # Allocating memory for each of these operations would cost more than the arithmetic.
    spare = np.empty_like(words)
    words ^= np.right_shift(words, np.uint64(30), out=spare)
    words *= FIRST_FACTOR
    words += second
    words ^= np.right_shift(words, np.uint64(27), out=spare)
    words *= SECOND_FACTOR
    words ^= np.right_shift(words, np.uint64(31), out=spare)
    return words


def _sample_distinct(size: int, count: int, key: tuple[Hashable, ...]) -> np.ndarray:
    """Draw distinct indices from a Philox stream by rejection."""
    stream = _philox_stream(key)
    # Multiplying a fraction of 32 bits by size has a bias of at most size / 2**32, far below any sampling error here.
    indices = np.empty(0, dtype=np.int64)
    while len(indices) < count:
        more = (stream.random_raw(2 * count) >> HALF_WORD) * np.uint64(size) >> HALF_WORD
        indices = np.concatenate([indices, more.astype(np.int64)])
        first = np.unique(indices, return_index=True)[1]
        indices = indices[np.sort(first)]
    return indices[:count]


def _philox_stream(key: tuple[Hashable, ...]) -> np.random.Philox:
    return np.random.Philox(key=np.frombuffer(_hash_key(key), dtype="<u8"))


def _hash_key(key: tuple[Hashable, ...]) -> bytes:
    # str, not repr, so that a numpy integer and a Python integer name the same stream.
    return hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()
