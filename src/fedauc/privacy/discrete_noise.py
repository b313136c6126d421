"""Discrete Gaussian noise for secure sums: every client adds a part, and the server never sees an unnoised sum.

The discrete Gaussian with deviation s takes the integer x with probability proportional to exp(-x² / (2 s²)). A client
that adds it to its integers (`fixed_point.py`) makes them private before they are masked. If at least `clients`
clients that do not collude survive, each with deviation s, the sum holds noise of deviation s · sqrt(clients) or more;
with secure sums that number is threshold - colluding sites.

Formal guarantees
-----------------
Sensitivity. Rounding to the nearest integer moves each of d numbers by at most 1/2, so that a client whose update has
norm at most `clip` changes the integer sum by at most clip · scale + sqrt(d) / 2 in Euclidean norm
(`integer_sensitivity`; adding or removing a client).

Sum. The sum of n discrete Gaussians is not one, but its probabilities differ from those of the discrete Gaussian of
deviation s · sqrt(n) by a factor of at most exp(tau), with

    tau = 10 · sum over k = 1 .. n - 1 of exp(-2 π² s² k / (k + 1))                            (`convolution_gap`)

for s >= 1/2; at s = 4 and 100 clients tau is below 10^-66. The mechanism is (1/2) e²-concentrated DP with
e = sensitivity / (s · sqrt(n)) + tau · sqrt(d), as the Gaussian mechanism with noise multiplier 1 / e is, so that
accountants of Gaussian noise in terms of concentrated or Rényi DP apply (`accounting.sum_discrete_noise`).

Sampler. Integers are drawn from 64-bit words by a table of blocks and rejection, without floating-point error beyond
2^-64 per decision: a number is within total variation distance 2^-55 of the discrete Gaussian (`SAMPLER_ERROR`). If the
guarantee rests on m such numbers, they add at most m (1 + exp(epsilon)) 2^-55 to its delta: replacing the noise of
either neighbour by the ideal one moves a probability by m · 2^-55, and that of one of them counts exp(epsilon) times.

References: Canonne, Kamath and Steinke, The discrete Gaussian for differential privacy, NeurIPS 2020; Kairouz, Liu and
Steinke, The distributed discrete Gaussian mechanism for federated learning with secure aggregation, ICML 2021
(Theorem 1 and Proposition 14).
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedauc.privacy.ciphers import RandomWords

SAMPLER_ERROR = 2.0**-55
"""Total variation distance between a drawn number and the discrete Gaussian, at most."""

LARGEST_DEVIATION = 2.0**28
"""Up to here every product below fits 63 bits; noise beyond it would not fit a ring of 32 bits anyway."""

BLOCKS_PER_DEVIATION = 16
"""Blocks of the proposal per deviation: with 16, rejection by the Gaussian's slope takes under 3 % of the draws."""

TAIL_DEVIATIONS = 9.75
"""The proposal ends here: exp(-9.75² / 2) is below 2^-68."""

UNCERTAIN = 2.0**-46
"""A uniform number this close to an acceptance probability is compared again in decimal arithmetic."""

WORD = 1 << 64

DECIMAL_DIGITS = 60


class _BlockTable(NamedTuple):
    """Blocks of `width` integers from 0 on; a word below `thresholds[v]` chooses block v or an earlier one."""

    width: int
    thresholds: np.ndarray


def sample_discrete_gaussian(deviation: float, count: int, words: RandomWords) -> np.ndarray:
    """Discrete Gaussian integers, int64 `[count]`; `words` returns random uint64 words (`ciphers.stream_words`).

    Method. Magnitudes are proposed as x = v · w + u, with block v from a table with probabilities proportional to
    exp(-(v w)² / (2 s²)) and u uniform in 0 .. w - 1, and accepted with probability exp(-(2 v w u + u²) / (2 s²)),
    so that an accepted x has weight exp(-x² / (2 s²)). A random sign follows; minus zero is rejected, because zero
    would otherwise count twice.

    Error. Each threshold of the table is rounded to a multiple of 2^-64, which with B blocks moves the proposal by at
    most B · 2^-65 in total variation. The acceptance probability is rounded to 2^-64: floating-point numbers decide
    only where they are certain to agree with that, and decimal arithmetic of 60 digits does otherwise. Draws of u are
    exact. Dividing by the share a of accepted proposals gives an error of at most (B + 1) · 2^-64 / a. B / a is largest
    for s just below 32, about 320, hence 2^-55.

    >>> from fedauc.privacy.ciphers import stream_words
    >>> sample_discrete_gaussian(4.0, 5, stream_words(bytes(32))).tolist()
    [3, -5, -3, 1, 3]
    """
    _check_deviation(deviation)
    table = _build_table(deviation)
    drawn = [np.zeros(0, np.int64)]
    missing = count
    while missing:
        # A few more than are likely to be rejected, so that one or two passes suffice.
        accepted = _propose_integers(deviation, table, missing + missing // 4 + 64, words)[:missing]
        drawn.append(accepted)
        missing -= len(accepted)
    return np.concatenate(drawn)


def integer_sensitivity(clip: float, scale: float, dimension: int) -> float:
    """How much one client changes a sum of rounded updates at most, in integer steps (Euclidean norm).

    >>> integer_sensitivity(1.0, 1024.0, 10_000)
    1074.0
    """
    for name, value in (("clip", clip), ("scale", scale), ("dimension", dimension)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be a finite number above 0: correct {name}")
    return clip * scale + math.sqrt(dimension) / 2


def noise_deviation(noise_multiplier: float, sensitivity: float, clients: int) -> float:
    """The deviation, in integer steps, that each client adds so that `clients` of them reach the noise multiplier.

    Their sum has deviation noise_multiplier · sensitivity. `clients` is the least number of survivors that do not
    collude.

    >>> noise_deviation(1.5, 1074.0, 9)
    537.0
    """
    if clients < 1:
        raise ValueError(f"clients is {clients}; it must be at least 1: give the least number of survivors")
    deviation = noise_multiplier * sensitivity / math.sqrt(clients)
    _check_deviation(deviation)
    return deviation


def convolution_gap(deviation: float, clients: int) -> float:
    """The bound tau: log-probabilities of the sum of `clients` discrete Gaussians are this close to those of one."""
    _check_deviation(deviation)
    numbers = np.arange(1, clients)
    return float(10 * np.exp(-2 * math.pi**2 * deviation**2 * numbers / (numbers + 1)).sum())


def _propose_integers(deviation: float, table: _BlockTable, count: int, words: RandomWords) -> np.ndarray:
    """The accepted ones of `count` proposals, in order."""
    block = np.minimum(np.searchsorted(table.thresholds, words(count), side="right"), len(table.thresholds) - 1)
    start = block.astype(np.int64) * table.width
    offset = _draw_below(table.width, count, words)
    sign_words, accept_words = words(count), words(count)
    magnitude, is_negative = start + offset, (sign_words & np.uint64(1)).astype(bool)
    accepted = _accept_offsets(deviation, offset * (2 * start + offset), accept_words)
    accepted &= ~(is_negative & (magnitude == 0))
    proposed: np.ndarray = np.where(is_negative, -magnitude, magnitude)
    integers: np.ndarray = proposed[accepted]
    return integers


def _accept_offsets(deviation: float, exponents: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Whether each word is below 2^64 · exp(-exponent / (2 s²)), rounded down; exponents are integers."""
    probability = np.exp(-exponents / (2 * deviation**2))
    uniform = words * 2.0**-64
    accepted: np.ndarray = uniform < probability
    for index in np.flatnonzero(np.abs(uniform - probability) < UNCERTAIN):
        accepted[index] = int(words[index]) < _scaled_weight(int(exponents[index]), deviation)
    return accepted


def _draw_below(bound: int, count: int, words: RandomWords) -> np.ndarray:
    """Uniform integers from 0 to below the bound; words that would make the small ones likelier are drawn again."""
    if bound == 1:
        return np.zeros(count, np.int64)
    drawn = words(count)
    largest = np.uint64(WORD - WORD % bound - 1)
    while (too_large := np.flatnonzero(drawn > largest)).size:
        drawn[too_large] = words(too_large.size)
    below: np.ndarray = (drawn % np.uint64(bound)).astype(np.int64)
    return below


@lru_cache(maxsize=8)
def _build_table(deviation: float) -> _BlockTable:
    width = max(1, int(deviation / BLOCKS_PER_DEVIATION))
    count = math.ceil(TAIL_DEVIATIONS * deviation / width) + 1
    with localcontext(Context(prec=DECIMAL_DIGITS)):
        weights = [(-Decimal((number * width) ** 2) / (2 * Decimal(deviation) ** 2)).exp() for number in range(count)]
        total, cumulative, thresholds = sum(weights, Decimal(0)), Decimal(0), []
        for weight in weights:
            cumulative += weight
            thresholds.append(min(int(cumulative / total * WORD + Decimal("0.5")), WORD - 1))
    return _BlockTable(width, np.array(thresholds, dtype=np.uint64))


def _scaled_weight(exponent: int, deviation: float) -> int:
    """2^64 · exp(-exponent / (2 s²)), rounded down."""
    with localcontext(Context(prec=DECIMAL_DIGITS)):
        return int((-Decimal(exponent) / (2 * Decimal(deviation) ** 2)).exp() * WORD)


def _check_deviation(deviation: float) -> None:
    if not 0.5 <= deviation <= LARGEST_DEVIATION:
        bound = f"it must be from 0.5 to {LARGEST_DEVIATION:g} integer steps"
        remedy = "raise the scale" if deviation < 0.5 else "lower the scale"
        raise ValueError(f"deviation is {deviation:g}; {bound}: {remedy} of the fixed-point numbers")
