"""Keyed draws: streams that never change, indices that are uniform, nothing global."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Hashable

import numpy as np
import pytest
import torch
from scipy import stats

from fedauc import keys

RARE = 1e-6
"""Chi-square tests fail below this p-value. Keys are fixed, so they pass for ever or fail for ever."""

WORD = 2**64


def philox_words(count: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011) in Python integers; numpy counts blocks from 1."""
    blocks = range(1, -(-count // 4) + 1)
    return [word for block in blocks for word in philox_block([block, 0, 0, 0], key)][:count]


def philox_block(counter: list[int], key: tuple[int, int]) -> list[int]:
    a, b = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], WORD)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], WORD)
        counter = [high1 ^ counter[1] ^ a, low1, high0 ^ counter[3] ^ b, low0]
        a, b = (a + 0x9E3779B97F4A7C15) % WORD, (b + 0xBB67AE8584CAA73B) % WORD
    return counter


def twin_words(count: int, name: str) -> list[int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return philox_words(count, (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")))


def test_words_equal_a_pure_python_philox() -> None:
    # Nine words span three blocks of four, so the block counter is checked too.
    assert keys.words(9, 0, "batch", 5, 2).tolist() == twin_words(9, "0\x1fbatch\x1f5\x1f2")


def test_dense_sample_sorts_the_words_of_each_pass() -> None:
    stream = twin_words(10, "7\x1fbatch")
    first, second = stream[:5], stream[5:]
    ranks = sorted(range(5), key=first.__getitem__) + sorted(range(5), key=second.__getitem__)
    # 7 of 5: one whole pass and two indices of the next.
    assert keys.sample(5, 7, 7, "batch").tolist() == ranks[:7]


def test_sparse_sample_scales_the_high_half_of_each_word() -> None:
    scaled = [(word >> 32) * 100 >> 32 for word in twin_words(10, "7\x1fbatch")]
    # 5 of 100 is below 1 in 8; first occurrences in order, repeats dropped.
    assert keys.sample(100, 5, 7, "batch").tolist() == list(dict.fromkeys(scaled))[:5]


def test_streams_are_golden() -> None:
    # Written down once: a change here changes the result of every run ever published.
    assert keys.words(3, 0, "batch", 5, 2).tolist() == [
        6951571602260935482,
        992935774258105595,
        17852723413061786949,
    ]
    assert keys.sample(10, 4, 0, "cohort", 0).tolist() == [4, 5, 8, 1]
    assert keys.sample(1000, 4, 0, "cohort", 0).tolist() == [909, 251, 881, 509]
    assert keys.sample(4, 10, 7, "batch", 3, 1).tolist() == [3, 0, 2, 1, 2, 3, 1, 0, 2, 0]
    assert keys.integer(0, "model") == 5927731656667693000


@pytest.mark.parametrize(
    "other",
    [(1, "batch", 5, 2), (0, "pool", 5, 2), (0, "batch", 6, 2), (0, "batch", 5, 3), (0, "batch", 52), (0, "batch", 5)],
)
def test_different_keys_name_different_streams(other: tuple[Hashable, ...]) -> None:
    assert not np.intersect1d(keys.words(8, 0, "batch", 5, 2), keys.words(8, *other)).size


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_and_words_name_the_same_stream_as_python_ones(kind: type[np.integer]) -> None:
    mine = keys.words(4, kind(3), np.str_("batch"), kind(5))
    assert mine.tolist() == keys.words(4, 3, "batch", 5).tolist()


def test_a_longer_draw_extends_a_shorter_one() -> None:
    assert keys.words(3, "a").tolist() == keys.words(10, "a")[:3].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_integer_seeds_any_generator(seed: int) -> None:
    # 63 bits: torch takes a signed 64-bit seed.
    assert 0 <= keys.integer(seed, "model") < 2**63
    torch.Generator().manual_seed(keys.integer(seed, "model"))


def test_generator_reads_the_stream_its_key_names() -> None:
    raw = keys.generator(3, "split").bit_generator.random_raw(5)
    assert np.asarray(raw).tolist() == keys.words(5, 3, "split").tolist()


# (size, count): sparse is count * 8 <= size, so 16 of 128 is the last sparse case and 17 of 128 the first dense one.
@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 0), (10, 7), (10, 10), (128, 16), (128, 17), (10**9, 50)])
def test_sample_is_distinct_and_in_range(size: int, count: int) -> None:
    drawn = keys.sample(size, count, "distinct", size, count)
    assert drawn.dtype == np.int64
    assert len(drawn) == len(set(drawn.tolist())) == count
    assert ((drawn >= 0) & (drawn < size)).all()


def test_sparse_sample_survives_collisions() -> None:
    # 125 of 1000 from a first batch of 250 words: about 250**2 / 2000 = 31 repeats are dropped under each key.
    for key in range(50):
        assert len(set(keys.sample(1000, 125, "collide", key).tolist())) == 125


def test_wrap_around_uses_each_index_once_per_pass_and_reshuffles() -> None:
    passes = keys.sample(8, 80, "wrap").reshape(10, 8)
    assert (np.sort(passes, axis=1) == np.arange(8)).all()
    # Ten of 8! = 40320 orders: two agree with chance 45 / 40320, and the key is fixed.
    assert len({tuple(row) for row in passes.tolist()}) == 10


@pytest.mark.parametrize("size", [0, -1])
def test_sample_from_nothing_is_refused_in_one_line(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^cannot draw 2 indices below {size}: size must be at least 1$"):
        keys.sample(size, 2, "nothing")


# 2 of 5 is dense (20 ordered pairs), 2 of 16 is sparse (240): 100 draws are expected of each ordered pair.
@pytest.mark.parametrize("size", [5, 16])
def test_every_ordered_pair_is_equally_likely(size: int) -> None:
    pairs = list(itertools.permutations(range(size), 2))
    draws = 100 * len(pairs)
    seen = Counter(tuple(keys.sample(size, 2, "pairs", draw).tolist()) for draw in range(draws))
    counts = [seen[pair] for pair in pairs]
    # All draws are among the distinct pairs, and no pair is favoured: chi-square with (pairs - 1) degrees of freedom.
    assert sum(counts) == draws
    assert stats.chisquare(counts).pvalue > RARE


def test_global_generators_are_untouched() -> None:
    before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    keys.sample(10, 5, "quiet")
    keys.sample(1000, 5, "quiet")
    keys.generator("quiet").random()
    assert before == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
