"""Discrete Gaussian noise: its distribution, its error bound, its sums, and what it costs in privacy."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from fedauc.privacy import discrete_noise
from fedauc.privacy.accounting import sum_discrete_noise
from fedauc.privacy.ciphers import stream_words
from fedauc.privacy.discrete_noise import (
    SAMPLER_ERROR,
    convolution_gap,
    integer_sensitivity,
    noise_deviation,
    sample_discrete_gaussian,
)

SIGNIFICANCE = 1e-4
"""Draws are seeded, so that a test passes always or never; a correct sampler would pass with this exception."""


def exact_probabilities(deviation: float, reach: int) -> np.ndarray:
    """Probabilities of -reach .. reach; the reach must hold nearly everything."""
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def draw_noise(deviation: float, count: int, seed: int = 0) -> np.ndarray:
    return sample_discrete_gaussian(deviation, count, stream_words(seed.to_bytes(32, "big")))


def chi_square_p_value(drawn: np.ndarray, deviation: float) -> float:
    """The p-value over all integers with at least 10 expected draws; the rest is one class."""
    reach = math.ceil(12 * deviation)
    expected = len(drawn) * exact_probabilities(deviation, reach)
    observed = np.bincount(drawn + reach, minlength=len(expected))
    common = expected >= 10
    expected_classes = np.r_[expected[common], expected[~common].sum()]
    observed_classes = np.r_[observed[common], observed[~common].sum()]
    statistic = ((observed_classes - expected_classes) ** 2 / expected_classes).sum()
    return float(stats.chi2.sf(statistic, len(expected_classes) - 1))


@pytest.mark.parametrize("deviation", [0.5, 0.75, 1.0, 3.3, 4.0, 15.9, 31.99, 32.0, 50.5])
def test_draws_follow_the_probabilities(deviation: float) -> None:
    assert chi_square_p_value(draw_noise(deviation, 200_000), deviation) > SIGNIFICANCE


def test_a_slightly_different_deviation_is_noticed() -> None:
    """So that the tests above can fail: two percent more are seen."""
    assert chi_square_p_value(draw_noise(4.08, 200_000), 4.0) < SIGNIFICANCE


@pytest.mark.parametrize("deviation", [1000.0, 123_456.7, 2.0**28])
def test_wide_noise_is_gaussian(deviation: float) -> None:
    """Kolmogorov-Smirnov against the normal distribution, from which it differs by about 1 / (2.5 s)."""
    drawn = draw_noise(deviation, 100_000)
    assert stats.kstest((drawn + 0.5) / deviation, "norm").pvalue > SIGNIFICANCE
    assert len(set((drawn % 2).tolist())) == 2


@pytest.mark.parametrize("deviation", [0.5, 1.0, 4.0, 20.0, 40.0, 1e6])
def test_mean_and_variance_are_those_of_the_probabilities(deviation: float) -> None:
    count = 200_000
    drawn = draw_noise(deviation, count, seed=1).astype(float)
    variance = deviation**2
    if deviation < 100:
        reach = math.ceil(12 * deviation)
        variance = float((np.arange(-reach, reach + 1) ** 2) @ exact_probabilities(deviation, reach))
    assert variance <= deviation**2 * (1 + 1e-9)
    # Five standard errors: those of a mean, and of a variance with fourth moment at most 3 s^4 (6 s^4 for s = 1/2).
    assert abs(drawn.mean()) < 5 * math.sqrt(variance / count)
    assert abs(drawn.var() / variance - 1) < 5 * math.sqrt(6 / count)


def test_one_key_gives_the_same_noise_and_others_other_noise() -> None:
    assert np.array_equal(draw_noise(10.0, 1000, 5), draw_noise(10.0, 1000, 5))
    first, second = draw_noise(10.0, 20_000, 5), draw_noise(10.0, 20_000, 6)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(20_000)
    assert draw_noise(10.0, 0).shape == (0,)


@pytest.mark.parametrize("deviation", [0.5, 1.0, 4.0, 7.3, 31.99])
def test_the_table_is_within_the_stated_error(deviation: float) -> None:
    """Blocks of one integer are always accepted, so that the table alone decides: its exact distance from the truth.

    A word w chooses v with probability (threshold[v] - threshold[v - 1]) / 2^64; sign and minus zero halve v = 0.
    The truth is computed by Fractions of 40-digit decimals, independently of the table.
    """
    table = discrete_noise._build_table(deviation)
    assert table.width == 1
    thresholds = [0, *map(int, table.thresholds[:-1]), 1 << 64]
    chosen = [Fraction(high - low, 1 << 64) for low, high in pairwise(thresholds)]
    with localcontext() as context:
        context.prec = 40
        variance = Decimal(deviation) ** 2
        weights = [
            Fraction((-Decimal(value * value) / (2 * variance)).exp()) for value in range(math.ceil(13 * deviation))
        ]
    magnitudes = [chosen[0] / 2, *chosen[1:]]
    truth = [weights[0] / 2, *weights[1:]]
    magnitudes += [Fraction(0)] * (len(truth) - len(magnitudes))
    distance = sum(
        abs(drawn / sum(magnitudes) - exact / sum(truth)) for drawn, exact in zip(magnitudes, truth, strict=True)
    )
    assert distance / 2 < SAMPLER_ERROR


def test_blocks_and_acceptance_give_the_stated_error_at_every_deviation() -> None:
    """The bound (B + 1) · 2^-64 / a of the docstring, with the share a of accepted proposals computed here."""
    for deviation in np.r_[np.geomspace(0.5, 2000, 60), 31.999, 47.999]:
        table = discrete_noise._build_table(float(deviation))
        blocks = len(table.thresholds)
        starts = np.arange(blocks) * table.width
        proposed = table.width * np.exp(-(starts**2) / (2 * deviation**2)).sum()
        accepted = np.exp(-(np.arange(starts[-1] + table.width) ** 2) / (2 * deviation**2)).sum() - 0.5
        assert (blocks + 1) * 2.0**-64 / (accepted / proposed) < SAMPLER_ERROR
        tail = np.exp(-((starts[-1] + table.width) ** 2) / (2 * deviation**2)) * (deviation + 1)
        assert tail / accepted < 2.0**-64


@pytest.mark.parametrize("deviation", [40.0, 1e5])
def test_decimal_and_floating_point_arithmetic_decide_alike(monkeypatch: pytest.MonkeyPatch, deviation: float) -> None:
    """With a wide band of uncertain comparisons nearly half the draws go through decimal arithmetic."""
    expected = draw_noise(deviation, 2000)
    calls, scaled_weight = [], discrete_noise._scaled_weight

    def count_calls(exponent: int, spread: float) -> int:
        calls.append(exponent)
        return scaled_weight(exponent, spread)

    monkeypatch.setattr(discrete_noise, "UNCERTAIN", 0.5)
    monkeypatch.setattr(discrete_noise, "_scaled_weight", count_calls)
    assert np.array_equal(draw_noise(deviation, 2000), expected)
    assert len(calls) > 800


def test_a_uniform_number_next_to_the_probability_is_decided_exactly() -> None:
    """The two words around the exact threshold: floating-point numbers cannot tell them apart."""
    exponent, deviation = 12_345, 100.0
    threshold = discrete_noise._scaled_weight(exponent, deviation)
    words = np.array([threshold - 1, threshold, threshold + 1], dtype=np.uint64)
    accepted = discrete_noise._accept_offsets(deviation, np.full(3, exponent), words)
    assert accepted.tolist() == [True, False, False]
    assert threshold * 2.0**-64 == pytest.approx(math.exp(-exponent / (2 * deviation**2)), rel=1e-14)


def test_integers_below_a_bound_are_uniform() -> None:
    """Words at the end of the range, which would favour small integers, are drawn again."""
    queue = [np.array([5, (1 << 64) - 1, 7], dtype=np.uint64), np.array([2], dtype=np.uint64)]
    assert discrete_noise._draw_below(3, 3, lambda count: queue.pop(0)).tolist() == [2, 2, 1]
    drawn = discrete_noise._draw_below(7, 70_000, stream_words(bytes(32)))
    assert stats.chisquare(np.bincount(drawn, minlength=7)).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("deviation", "clients"), [(4.0, 10), (30.0, 50)])
def test_the_sum_of_clients_is_a_wider_discrete_gaussian(deviation: float, clients: int) -> None:
    total = np.sum([draw_noise(deviation, 20_000, seed) for seed in range(clients)], axis=0)
    wide = deviation * math.sqrt(clients)
    assert chi_square_p_value(total, wide) > SIGNIFICANCE
    assert abs(np.var(total) / wide**2 - 1) < 5 * math.sqrt(2 / 20_000)


@pytest.mark.parametrize("deviation", [0.6, 0.7, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("clients", [2, 3, 8])
def test_the_gap_bounds_the_exact_convolution(deviation: float, clients: int) -> None:
    """The largest log-ratio between the convolution and one discrete Gaussian, where both exceed 1e-12."""
    reach = 40
    convolution = single = exact_probabilities(deviation, reach)
    for _ in range(clients - 1):
        convolution = np.convolve(convolution, single)
    wide = exact_probabilities(deviation * math.sqrt(clients), reach * clients)
    visible = wide > 1e-12
    ratio = np.abs(np.log(convolution[visible] / wide[visible])).max()
    assert ratio <= convolution_gap(deviation, clients)
    if deviation <= 0.7:
        assert ratio > 1e-6, "the gap is real where the bound is not negligible"


def test_the_gap_is_negligible_from_a_deviation_of_four() -> None:
    for clients in (2, 10, 1000, 100_000):
        assert convolution_gap(4.0, clients) < 1e-60
    assert convolution_gap(4.0, 1) == 0
    by_hand = 10 * (math.exp(-(math.pi**2)) + math.exp(-2 * math.pi**2 * 2 / 3))
    assert convolution_gap(1.0, 3) == pytest.approx(by_hand, rel=1e-12)


def test_rounding_stays_within_the_integer_sensitivity() -> None:
    draw = np.random.default_rng(0)
    for dimension in (1, 10, 1000):
        for scale in (0.5, 16.0, 1024.0):
            update = draw.normal(size=dimension)
            update *= 0.7 / np.linalg.norm(update)
            assert np.linalg.norm(np.round(update * scale)) <= integer_sensitivity(0.7, scale, dimension)
    # The bound is met where every number is rounded up by one half: 1.5 becomes 2.
    assert integer_sensitivity(1.5 * math.sqrt(9), 1.0, 9) == pytest.approx(np.linalg.norm(np.full(9, 2.0)))


def test_the_clients_noise_adds_up_to_the_noise_multiplier() -> None:
    sensitivity = integer_sensitivity(1.0, 2.0**16, 10_000)
    deviation = noise_deviation(1.3, sensitivity, 7)
    assert deviation * math.sqrt(7) / sensitivity == pytest.approx(1.3)
    assert sum_discrete_noise(deviation, 7, sensitivity, 10_000) == pytest.approx(1.3, rel=1e-12)
    assert sum_discrete_noise(0.6, 7, 1.0, 10_000) < 0.6 * math.sqrt(7) / 10, "small noise pays for the gap"


def test_noise_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"deviation is 0.4; .*: raise the scale"):
        sample_discrete_gaussian(0.4, 3, stream_words(bytes(32)))
    with pytest.raises(ValueError, match=r"deviation is 1e\+09; .*: lower the scale"):
        noise_deviation(1.0, 1e9, 1)
    with pytest.raises(ValueError, match="deviation is nan"):
        convolution_gap(math.nan, 2)
    with pytest.raises(ValueError, match="clients is 0"):
        noise_deviation(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="clip is -1"):
        integer_sensitivity(-1.0, 1.0, 1)
