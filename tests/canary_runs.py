"""The mechanism that audits are tested on, in numpy: clipped canaries and banded noise, with faults on request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedauc.privacy.canaries import Canaries, CanaryFilter, CanaryStatistics

ROUNDS, GROUPS, DIMENSION, CANARIES = 60, 5, 2000, 200
CLIP_NORM = 2.0
ONE_BAND = (1.0,)
# The square-root factor of the prefix-sum matrix: c_l = C(2l, l) / 4^l.
FIVE_BANDS = (1.0, 0.5, 0.375, 0.3125, 0.2734375)


class Mechanism(NamedTuple):
    """The declared coefficients and what really happens."""

    coefficients: Sequence[float] = ONE_BAND
    real_coefficients: Sequence[float] | None = None
    mu: float = 1.0
    probability: float = 1.0
    clips: bool = True
    noise: str = "every round"
    client_norm: float = 0.0
    """Norm, over the clip norm, of a sum of honest clients that is the same in every round."""

    def noise_multiplier(self) -> float:
        """σ such that a client that attends all turns of its group has the wanted μ."""
        return math.sqrt(ROUNDS / GROUPS * np.square(self.coefficients).sum()) / self.mu


def band_matrix(coefficients: Sequence[float], rounds: int = ROUNDS) -> np.ndarray:
    matrix = np.zeros((rounds, rounds))
    for lag, coefficient in enumerate(coefficients):
        matrix += coefficient * np.eye(rounds, k=-lag)
    return matrix


def release_rounds(seed: int, mechanism: Mechanism, canaries: Canaries) -> np.ndarray:
    """The rounds `[T, d]` that a server would release."""
    generator = np.random.default_rng(seed)
    deviation = mechanism.noise_multiplier() * CLIP_NORM
    white = generator.normal(scale=deviation, size=(ROUNDS, canaries.dimension))
    if mechanism.noise == "one draw reused":
        white[:] = white[0]
    noise = np.linalg.solve(band_matrix(mechanism.real_coefficients or mechanism.coefficients), white)
    if mechanism.noise == "added once":
        noise[1:] = 0
    if mechanism.noise == "last round missing":
        noise[-1] = 0
    uploads = np.stack([canaries.make_upload(canary, CLIP_NORM) for canary in range(canaries.count)])
    if mechanism.clips:
        uploads *= CLIP_NORM / np.linalg.norm(uploads, axis=1, keepdims=True)
    attended = np.stack([canaries.draw_attendance(round) for round in range(ROUNDS)]) & canaries.flip_coins()
    honest = generator.normal(size=canaries.dimension)
    honest *= mechanism.client_norm * CLIP_NORM / np.linalg.norm(honest)
    return np.asarray(attended @ uploads + honest + noise)


def observe_run(seed: int, mechanism: Mechanism) -> CanaryStatistics:
    """The statistics of one run with 200 canaries."""
    canaries = Canaries(seed, CANARIES, DIMENSION, GROUPS, mechanism.probability)
    canary_filter = CanaryFilter(canaries, mechanism.coefficients, mechanism.noise_multiplier(), CLIP_NORM)
    for release in release_rounds(seed, mechanism, canaries):
        canary_filter.observe_round(release)
    return canary_filter.summarize_statistics()
