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
    assert keys.random_words(9, 0, "batch", 5, 2).tolist() == twin_words(9, "0\x1fbatch\x1f5\x1f2")


def test_dense_sample_sorts_the_words_of_each_pass() -> None:
    stream = twin_words(10, "7\x1fbatch")
    first, second = stream[:5], stream[5:]
    ranks = sorted(range(5), key=first.__getitem__) + sorted(range(5), key=second.__getitem__)
    # 7 of 5: one whole pass and two indices of the next.
    assert keys.sample_indices(5, 7, 7, "batch").tolist() == ranks[:7]


def test_sparse_sample_scales_the_high_half_of_each_word() -> None:
    scaled = [(word >> 32) * 100 >> 32 for word in twin_words(10, "7\x1fbatch")]
    # 5 of 100 is below 1 in 8; first occurrences in order, repeats dropped.
    assert keys.sample_indices(100, 5, 7, "batch").tolist() == list(dict.fromkeys(scaled))[:5]


def test_streams_are_golden() -> None:
    # Written down once: a change here changes the result of every run ever published.
    assert keys.random_words(3, 0, "batch", 5, 2).tolist() == [
        6951571602260935482,
        992935774258105595,
        17852723413061786949,
    ]
    assert keys.sample_indices(10, 4, 0, "cohort", 0).tolist() == [4, 5, 8, 1]
    assert keys.sample_indices(1000, 4, 0, "cohort", 0).tolist() == [909, 251, 881, 509]
    assert keys.sample_indices(4, 10, 7, "batch", 3, 1).tolist() == [3, 0, 2, 1, 2, 3, 1, 0, 2, 0]
    assert keys.random_integer(0, "model") == 5927731656667693000


@pytest.mark.parametrize(
    "other",
    [(1, "batch", 5, 2), (0, "pool", 5, 2), (0, "batch", 6, 2), (0, "batch", 5, 3), (0, "batch", 52), (0, "batch", 5)],
)
def test_different_keys_name_different_streams(other: tuple[Hashable, ...]) -> None:
    assert not np.intersect1d(keys.random_words(8, 0, "batch", 5, 2), keys.random_words(8, *other)).size


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_and_words_name_the_same_stream_as_python_ones(kind: type[np.integer]) -> None:
    words = keys.random_words(4, kind(3), np.str_("batch"), kind(5))
    assert words.tolist() == keys.random_words(4, 3, "batch", 5).tolist()


def test_a_longer_draw_extends_a_shorter_one() -> None:
    assert keys.random_words(3, "a").tolist() == keys.random_words(10, "a")[:3].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_integer_seeds_any_generator(seed: int) -> None:
    # 63 bits: torch takes a signed 64-bit seed.
    assert 0 <= keys.random_integer(seed, "model") < 2**63
    torch.Generator().manual_seed(keys.random_integer(seed, "model"))


def test_generator_reads_the_stream_its_key_names() -> None:
    raw = keys.numpy_generator(3, "split").bit_generator.random_raw(5)
    assert np.asarray(raw).tolist() == keys.random_words(5, 3, "split").tolist()


# (size, count): sparse is count * 8 <= size, so 16 of 128 is the last sparse case and 17 of 128 the first dense one.
@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 0), (10, 7), (10, 10), (128, 16), (128, 17), (10**9, 50)])
def test_sample_is_distinct_and_in_range(size: int, count: int) -> None:
    indices = keys.sample_indices(size, count, "distinct", size, count)
    assert indices.dtype == np.int64
    assert len(indices) == len(set(indices.tolist())) == count
    assert ((indices >= 0) & (indices < size)).all()


def test_sparse_sample_survives_collisions() -> None:
    # 125 of 1000 from a first batch of 250 words: about 250**2 / 2000 = 31 repeats are dropped under each key.
    for key in range(50):
        assert len(set(keys.sample_indices(1000, 125, "collide", key).tolist())) == 125


def test_wrap_around_uses_each_index_once_per_pass_and_reshuffles() -> None:
    passes = keys.sample_indices(8, 80, "wrap").reshape(10, 8)
    assert (np.sort(passes, axis=1) == np.arange(8)).all()
    # Ten of 8! = 40320 orders: two agree with chance 45 / 40320, and the key is fixed.
    assert len({tuple(row) for row in passes.tolist()}) == 10


@pytest.mark.parametrize("size", [0, -1])
def test_sample_from_nothing_is_refused_in_one_line(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^cannot draw 2 indices below {size}: size must be at least 1$"):
        keys.sample_indices(size, 2, "nothing")


# 2 of 5 is dense (20 ordered pairs), 2 of 16 is sparse (240): 100 draws are expected of each ordered pair.
@pytest.mark.parametrize("size", [5, 16])
def test_every_ordered_pair_is_equally_likely(size: int) -> None:
    pairs = list(itertools.permutations(range(size), 2))
    draws = 100 * len(pairs)
    tally = Counter(tuple(keys.sample_indices(size, 2, "pairs", draw).tolist()) for draw in range(draws))
    counts = [tally[pair] for pair in pairs]
    # All draws are among the distinct pairs, and no pair is favoured: chi-square with (pairs - 1) degrees of freedom.
    assert sum(counts) == draws
    assert stats.chisquare(counts).pvalue > RARE


def splitmix_twin(counter: int, first: int, second: int) -> int:
    """SplitMix64 (Steele et al. 2014) in Python integers, with the second half of the key added between its rounds."""
    word = (counter * 0x9E3779B97F4A7C15 + first) % WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word + second) % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def twin_stream(count: int, name: str, client: int) -> list[int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(digest[half : half + 8], "little") for half in (0, 8))
    key = splitmix_twin(client, first, second), splitmix_twin(client, second, first)
    return [splitmix_twin(counter, *key) for counter in range(count)]


def test_a_cohorts_dense_rows_sort_the_words_of_each_pass() -> None:
    # 7 of 5: one whole pass and two of the next. Words are compared by their upper 36 bits.
    for client, row in zip(
        (3, 90), keys.sample_client_indices(np.array([5, 5]), 7, (3, 90), 7, "batch").tolist(), strict=True
    ):
        stream = [word >> 28 for word in twin_stream(10, "7\x1fbatch", client)]
        assert row == (sorted(range(5), key=stream[:5].__getitem__) + sorted(range(5), key=stream[5:].__getitem__))[:7]


def test_a_cohorts_sparse_rows_scale_the_high_half_of_each_word() -> None:
    for client, row in zip(
        (3, 90), keys.sample_client_indices(np.array([100, 100]), 5, (3, 90), 7, "batch").tolist(), strict=True
    ):
        scaled = [(word >> 32) * 100 >> 32 for word in twin_stream(13, "7\x1fbatch", client)]
        assert row == list(dict.fromkeys(scaled))[:5]


def test_cohort_streams_are_golden() -> None:
    # Written down once: a change here changes the result of every run ever published.
    assert keys.sample_client_indices(np.array([10, 4, 1000]), 4, (0, 1, 7), 0, "batch", 5, 2).tolist() == [
        [0, 3, 4, 2],
        [3, 0, 1, 2],
        [755, 865, 186, 48],
    ]


# Sizes of one kind, of several, sparse and dense; 600 is sparse for 9 and for 40, dense for 100.
@pytest.mark.parametrize("count", [0, 1, 9, 40, 100])
def test_a_row_does_not_depend_on_the_company_and_uses_every_index_once_a_pass(count: int) -> None:
    sizes, clients = np.array([1, 2, 3, 5, 40, 41, 63, 64, 100, 600, 5000]), np.arange(11) * 1000
    rows = keys.sample_client_indices(sizes, count, clients, "company")
    assert rows.shape == (11, count)
    assert rows.dtype == np.int64
    for position, size in enumerate(sizes.tolist()):
        alone = keys.sample_client_indices(
            sizes[position : position + 1], count, clients[position : position + 1], "company"
        )
        assert rows[position].tolist() == alone[0].tolist()
        for start in range(0, count, size):
            part = rows[position, start : start + size].tolist()
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(size))


def test_a_stream_is_read_on_until_enough_indices_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of 20 by rejection: the last comes after some 20 * (1 + 1/2 + ... + 1/20) = 72 words, far beyond the first 41.
    monkeypatch.setattr(keys, "SPARSE", 1)
    for client, row in zip(
        (3, 4), keys.sample_client_indices(np.array([20, 20]), 20, (3, 4), 7, "batch").tolist(), strict=True
    ):
        scaled = [(word >> 32) * 20 >> 32 for word in twin_stream(1000, "7\x1fbatch", client)]
        assert row == list(dict.fromkeys(scaled))


# 2 of 5 is dense (20 ordered pairs), 2 of 16 is sparse (240): 100 draws are expected of each ordered pair.
@pytest.mark.parametrize("size", [5, 16])
@pytest.mark.parametrize("vary", ["client", "round"])
def test_every_ordered_pair_is_equally_likely_for_a_cohort(size: int, vary: str) -> None:
    pairs = list(itertools.permutations(range(size), 2))
    draws = 100 * len(pairs)
    if vary == "client":
        rows = keys.sample_client_indices(np.full(draws, size), 2, range(draws), "pairs")
    else:
        rows = np.concatenate(
            [keys.sample_client_indices(np.full(20, size), 2, range(20), "pairs", r) for r in range(draws // 20)]
        )
    tally = Counter(map(tuple, rows.tolist()))
    assert stats.chisquare([tally[pair] for pair in pairs]).pvalue > RARE


def test_clients_side_by_side_and_their_later_words_are_independent() -> None:
    # 2^31 of which one is wanted: the index is the first word's upper 31 bits.
    clients = 20_000
    words = keys.sample_client_indices(np.full(clients, 2**31), 3, range(clients), "bits")
    for left, other in ((words[1:, 0], words[:-1, 0]), (words[:, 0], words[:, 1]), (words[:, 1], words[:, 2])):
        flips = (left ^ other)[:, None] >> np.arange(31) & 1
        # Every bit differs half of the time: 31 means with standard error 1/2 / sqrt(20,000), one of them in 6 sigma.
        np.testing.assert_allclose(flips.mean(axis=0), 0.5, atol=6 * 0.5 / np.sqrt(clients))
        cells = np.bincount((left >> 28) * 8 + (other >> 28), minlength=64)
        assert stats.chisquare(cells).pvalue > RARE


@pytest.mark.parametrize("sizes", [[3, 0], [-1, 4]])
def test_a_cohort_that_draws_from_nothing_is_refused_in_one_line(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"^cannot draw 2 indices below {min(sizes)}: size must be at least 1$"):
        keys.sample_client_indices(np.array(sizes), 2, (0, 1), "nothing")


def test_global_generators_are_untouched() -> None:
    states = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    keys.sample_indices(10, 5, "quiet")
    keys.sample_indices(1000, 5, "quiet")
    keys.sample_client_indices(np.array([10, 1000]), 5, (0, 1), "quiet")
    keys.numpy_generator("quiet").random()
    assert states == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
