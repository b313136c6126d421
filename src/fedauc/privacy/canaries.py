"""Canary clients: random directions whose traces in the released rounds measure what a run leaks, in one run.

A run releases x_t + y_t in round t: x_t `[d]` is the sum of the clipped uploads (norm at most C each) and y = B⁻¹ z is
the noise, with z ~ N(0, (σC)²) independent per round and coordinate, and B the lower-triangular banded Toeplitz matrix
of the coefficients c_0 … c_{b-1} (c = [1.0]: independent noise). A canary i has a direction u_i and a group, as any
client. A keyed coin decides whether it takes part. Those that do upload C·u_i (after clipping) in their turns; those
that do not are the null sample. The adversary guesses the coins from the releases.

**Statistic.** B whitens the releases: w = B(x + y) = Bx + z. A canary that attends the rounds J adds C·a_i[t]·u_i to
w_t, where a_i[t] = Σ_{j in J} c_{t-j}. The best linear statistic is the matched filter

    S_i = Σ_t a_i[t] ⟨w_t, u_i⟩ / (σC ‖a_i‖),

which is N(0, 1) from noise alone and has mean ‖a_i‖/σ for a canary that takes part. That mean is the μ of Gaussian
differential privacy that the proof grants its group, so a correct mechanism attains the bound and cannot exceed it.

**Other clients and other canaries** are independent of u_i, and ⟨x, u_i⟩ has mean zero and variance ‖x‖²/d. They only
add variance, which hides canaries, so estimates fall and stay valid lower bounds. The deviation of the null sample
contains that variance. The adversary of the definition knows all other clients: an auditor who does may subtract their
sum from the releases.

**Poisson draws.** When a client is drawn with probability q in each of its turns, the scores over *attended* rounds
belong to an adversary who knows the draws. They test noise and clip sharply, but against the μ without amplification.
The amplified ε is proven against an adversary who does not know them; the scores over *all turns* use only what that
adversary knows. A linear statistic is not the best one against a mixture, so these scores give a lower bound only.

References: Andrew et al., One-shot empirical privacy estimation for federated learning, ICLR 2024; Steinke, Nasr and
Jagielski, Privacy auditing with one (1) training run, NeurIPS 2023.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedauc import keys

BLOCK_VALUES = 1 << 24
"""Directions are held in memory in blocks of at most this many numbers (64 MiB)."""

UPLOAD_FACTOR = 10.0
"""The norm of a canary's upload over the clip norm: large, so that a missing clip shows."""


@dataclass(frozen=True)
class Canaries:
    """Canary clients, all of whose properties are keyed by a seed: coin, group, direction and draws.

    The directions are vectors of random signs over √d: unit vectors that are almost orthogonal (inner products have
    mean 0 and variance 1/d) and cost one random bit per coordinate, so that blocks of them can be drawn anew in every
    round instead of stored. With `orthogonal` they are orthonormal instead, a uniformly random frame, so that canaries
    do not disturb each other in models with few parameters; that needs at most d of them, all in memory.

    Canary i belongs to group i mod K, which takes part in the rounds that are i modulo K.
    """

    seed: int
    count: int
    dimension: int
    groups: int
    probability: float = 1.0
    orthogonal: bool = False

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("dimension", self.dimension), ("groups", self.groups)):
            if value < 1:
                raise ValueError(f"{name} of the canaries is {value}; it must be at least 1")
        if not 0 < self.probability <= 1:
            raise ValueError(
                f"probability of a canary is {self.probability}; it must lie in (0, 1]: use 1 for no draws"
            )
        if self.orthogonal and self.count > self.dimension:
            raise ValueError(
                f"count of the canaries is {self.count}; at most {self.dimension} directions can be orthogonal in "
                f"{self.dimension} dimensions: use fewer canaries"
            )

    def flip_coins(self) -> np.ndarray:
        """Which canaries take part, bool `[n]`: a fair coin each."""
        words = keys.client_words(range(self.count), self.seed, "canary coin")
        return np.asarray(words >> np.uint64(63), dtype=bool)

    def list_groups(self) -> np.ndarray:
        """The group of each canary, `[n]`."""
        return np.arange(self.count) % self.groups

    def find_turns(self, round: int) -> np.ndarray:
        """Whether it is the turn of each canary's group in a round, bool `[n]`."""
        return np.asarray(self.list_groups() == round % self.groups)

    def draw_attendance(self, round: int) -> np.ndarray:
        """Whose turn it is and who is drawn, bool `[n]`, for all canaries: those outside the run are drawn as well."""
        words = keys.client_words(range(self.count), self.seed, "canary draw", round)
        # The 53 high bits of a word are a number in [0, 1).
        return self.find_turns(round) & ((words >> np.uint64(11)) * 2.0**-53 < self.probability)

    def draw_directions(self, start: int, stop: int) -> np.ndarray:
        """The unit directions of the canaries start ≤ i < stop, float32 `[stop - start, d]`."""
        if self.orthogonal:
            return _draw_frame(self.seed, self.count, self.dimension)[start:stop]
        words = -(-self.dimension // 64)
        bits = np.stack([keys.random_words(words, self.seed, "canary direction", i) for i in range(start, stop)])
        signs = np.unpackbits(bits.astype("<u8").view(np.uint8), axis=1, count=self.dimension).astype(np.float32)
        signs *= np.float32(2 / math.sqrt(self.dimension))
        signs -= np.float32(1 / math.sqrt(self.dimension))
        return signs

    def make_upload(self, canary: int, clip_norm: float) -> np.ndarray:
        """What a canary uploads before clipping, `[d]`: its direction, with a norm far above the clip norm."""
        return np.asarray(self.draw_directions(canary, canary + 1)[0] * np.float32(UPLOAD_FACTOR * clip_norm))


@functools.lru_cache(maxsize=2)
def _draw_frame(seed: int, count: int, dimension: int) -> np.ndarray:
    """Orthonormal rows, float32 `[count, d]`, read-only: a Gaussian matrix whose columns are made orthonormal (QR)."""
    gaussian = keys.numpy_generator(seed, "canary frame").standard_normal((dimension, count))
    basis, triangle = np.linalg.qr(gaussian)
    # Only with positive diagonal entries of R is the frame uniformly distributed.
    frame = np.ascontiguousarray((basis * np.sign(np.diag(triangle))).T.astype(np.float32))
    frame.flags.writeable = False
    return frame


class NullProjections(NamedTuple):
    """Second moments of the projections ⟨w_t, u_i⟩ / (σC) of whitened rounds on canaries outside the run.

    Under the declared noise alone these are independent N(0, 1) over the rounds; over canaries the correlation has
    mean zero and variance 1/`dimension`: d, or infinity for orthogonal canaries. `variances` `[T]` is the mean square
    in each round, and `autocovariances` `[L]` the mean over all T rounds of products with the projection 1 … L rounds
    earlier (the first rounds count as zeros).
    """

    variances: np.ndarray
    autocovariances: np.ndarray
    canaries: int
    dimension: float


class CanaryStatistics(NamedTuple):
    """What a run reveals about its canaries.

    `in_scores` and `out_scores` are the matched filters over attended rounds of the canaries in the run and outside;
    `in_scores_all_turns` and `out_scores_all_turns` those over all turns of their groups (the same without draws).
    Canaries that were never drawn have no score. `declared_mu` is the largest μ = ‖a_i‖/σ that the declared mechanism
    grants any of the canaries against an adversary who knows the draws.
    """

    in_scores: np.ndarray
    out_scores: np.ndarray
    in_scores_all_turns: np.ndarray
    out_scores_all_turns: np.ndarray
    declared_mu: float
    null_projections: NullProjections


class CanaryFilter:
    """The matched filter of every canary, computed one round at a time.

    It holds the last b released rounds `[b, d]`, one block of directions and a few numbers per canary.
    """

    def __init__(
        self,
        canaries: Canaries,
        coefficients: Sequence[float],
        noise_multiplier: float,
        clip_norm: float,
        lags: int | None = None,
    ) -> None:
        """Declare the mechanism: coefficients c_0 … c_{b-1}, σ and C. `lags` is the number of autocovariances (b)."""
        for name, value in (("noise_multiplier", noise_multiplier), ("clip_norm", clip_norm)):
            if not value > 0 or math.isinf(value):
                raise ValueError(f"{name} is {value}; it must be positive and finite: a run without noise has no audit")
        if not len(coefficients) or coefficients[0] == 0:
            raise ValueError(f"coefficients are {list(coefficients)}; the first must not be 0: use [1.0] for one band")
        self._canaries = canaries
        self._coefficients = np.asarray(coefficients, dtype=np.float64)
        self._noise_multiplier = noise_multiplier
        self._noise_deviation = noise_multiplier * clip_norm
        self._is_in = canaries.flip_coins()
        self._round = 0
        self._sums, self._energies = np.zeros((2, canaries.count)), np.zeros((2, canaries.count))
        bands = len(coefficients)
        # The newest entry stands first, so that entry l of each is l rounds old.
        self._releases: deque[np.ndarray] = deque(maxlen=bands)
        self._presences: deque[np.ndarray] = deque(maxlen=bands)
        self._past_projections: deque[np.ndarray] = deque(maxlen=lags or bands)
        self._products = np.zeros(lags or bands)
        self._variances: list[float] = []
        self._outside = int((~self._is_in).sum())
        fits = canaries.count * canaries.dimension <= BLOCK_VALUES
        self._directions = canaries.draw_directions(0, canaries.count) if fits else None

    def observe_round(self, released: np.ndarray, attended: np.ndarray | None = None) -> None:
        """Take in the release x_t + y_t `[d]` of the next round, in units of a sum of uploads.

        `attended` `[n]` says which canaries were drawn, and for those outside the run, which would have been; without
        it, the draws are those of `Canaries.draw_attendance`.
        """
        shape = (self._canaries.dimension,)
        if released.shape != shape:
            raise ValueError(f"round {self._round} has shape {released.shape}; the canaries have shape {shape}")
        turns = self._canaries.find_turns(self._round)
        present = self._canaries.draw_attendance(self._round) if attended is None else np.asarray(attended, dtype=bool)
        if present.shape != turns.shape:
            raise ValueError(f"attended has shape {present.shape}; it must have one entry per canary, {turns.shape}")
        self._releases.appendleft(np.array(released, dtype=np.float32))
        self._presences.appendleft(np.stack([present, turns]).astype(np.float64))
        whitened = np.zeros(shape, dtype=np.float32)
        gains = np.zeros_like(self._sums)
        for coefficient, release, presence in zip(self._coefficients, self._releases, self._presences, strict=False):
            whitened += np.float32(coefficient) * release
            gains += coefficient * presence
        projections = self._project_round(whitened)
        if not np.isfinite(projections).all():
            raise ValueError(f"round {self._round} has values that are not finite; an audit needs finite releases")
        self._sums += gains * projections
        self._energies += gains**2
        null = projections[~self._is_in]
        self._variances.append(float(null @ null) / max(self._outside, 1))
        for lag, past in enumerate(self._past_projections):
            self._products[lag] += null @ past
        self._past_projections.appendleft(null)
        self._round += 1

    def summarize_statistics(self) -> CanaryStatistics:
        """The statistics of the rounds so far. With no rounds yet, no canary has a score."""
        scored = self._energies > 0
        scores = np.divide(self._sums, np.sqrt(self._energies), out=np.zeros_like(self._sums), where=scored)
        attended, all_turns = scored
        return CanaryStatistics(
            in_scores=scores[0, attended & self._is_in],
            out_scores=scores[0, attended & ~self._is_in],
            in_scores_all_turns=scores[1, all_turns & self._is_in],
            out_scores_all_turns=scores[1, all_turns & ~self._is_in],
            declared_mu=math.sqrt(float(self._energies[0].max())) / self._noise_multiplier,
            null_projections=NullProjections(
                np.array(self._variances),
                self._products / max(self._outside * self._round, 1),
                self._outside,
                math.inf if self._canaries.orthogonal else float(self._canaries.dimension),
            ),
        )

    def _project_round(self, whitened: np.ndarray) -> np.ndarray:
        """⟨w_t, u_i⟩ / (σC) for all canaries, `[n]`."""
        products = [directions @ whitened for directions in self._iterate_directions()]
        return np.concatenate(products).astype(np.float64) / self._noise_deviation

    def _iterate_directions(self) -> Iterator[np.ndarray]:
        if self._directions is not None:
            yield self._directions
            return
        size = max(1, BLOCK_VALUES // self._canaries.dimension)
        for start in range(0, self._canaries.count, size):
            yield self._canaries.draw_directions(start, min(start + size, self._canaries.count))


def combine_statistics(repeats: Sequence[CanaryStatistics]) -> CanaryStatistics:
    """The statistics of several runs of one mechanism, with other noise and other canaries each, as of one run.

    Scores are put side by side. The second moments are means over all canaries outside. The noise of different runs is
    independent, so that the dimensions add up: n canaries in each of R runs overlap as n R of them in d R dimensions.
    """
    if not repeats:
        raise ValueError("repeats is empty; give the statistics of at least 1 run")
    projections = [repeat.null_projections for repeat in repeats]
    counts = np.array([part.canaries for part in projections], dtype=np.float64)
    weights = counts / max(counts.sum(), 1)
    return CanaryStatistics(
        in_scores=np.concatenate([repeat.in_scores for repeat in repeats]),
        out_scores=np.concatenate([repeat.out_scores for repeat in repeats]),
        in_scores_all_turns=np.concatenate([repeat.in_scores_all_turns for repeat in repeats]),
        out_scores_all_turns=np.concatenate([repeat.out_scores_all_turns for repeat in repeats]),
        declared_mu=max(repeat.declared_mu for repeat in repeats),
        null_projections=NullProjections(
            weights @ np.stack([part.variances for part in projections]),
            weights @ np.stack([part.autocovariances for part in projections]),
            int(counts.sum()),
            sum(part.dimension for part in projections),
        ),
    )
