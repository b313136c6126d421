"""Noise that is correlated over rounds, so that sums over rounds are less noisy: banded-Toeplitz factorization.

The server wants the prefix sums A x of the rounds' sums x_0, ..., x_{n-1} (A is the lower-triangular matrix of ones; a
model is its start plus a prefix sum of updates). With A = (A C⁻¹) C it may release C x + z, z ~ N(0, σ²), and decode it
as x + C⁻¹ z: round r gets the noise y = C⁻¹ z, and the prefix sums get A C⁻¹ z. C is a lower-triangular Toeplitz matrix
with b bands: C[r, j] = c_{r-j} for 0 ≤ r - j < b. Its coefficients are scaled to Σ c_i² = 1, so that σ is the noise of
one participation whatever the number of bands; b = 1 is independent noise.

Formal guarantees:
    Column j of C is non-zero in rows j, ..., j + b - 1 only. A client of K groups takes part at rounds k, k + K, ...
    With b ≤ K its columns do not overlap, so that whatever vectors of norm at most 1 it adds,
    ‖C x‖² = Σ_j ‖C[:, j]‖² ‖x_j‖² ≤ (participations) · max_j ‖C[:, j]‖². See `accounting.py` for what this costs.

References: McKenna, "Scaling up the banded matrix factorization mechanism for large scale differentially private ML",
ICLR 2025 (banded Toeplitz); Choquette-Choo et al., "(Amplified) banded matrix factorization", NeurIPS 2023; Denisov et
al., "Improved differential privacy for SGD via optimal private linear operators on adaptive streams", NeurIPS 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from fedauc.privacy import import_privacy_package

Vector = TypeVar("Vector", bound=Any)
"""Vectors of numpy or of torch."""


@functools.lru_cache(maxsize=64)
def optimize_bands(rounds: int, bands: int) -> np.ndarray:
    """The coefficients c_0, ..., c_{b-1} with the least `expected_rmse`, float64, Σ c_i² = 1; read-only.

    The error does not change when C is scaled, so c_0 = 1 is held fixed while L-BFGS-B moves the others in [0, 1], from
    the coefficients of 1/√(1-x), which are near the best without a bound on the bands (Fichtenberger,
    Henzinger and Upadhyay, 2023). 1,000 rounds and 10 bands take about 2 ms. Coefficients beyond the last round would
    never act and are left out: the result has min(bands, rounds) entries.

    >>> optimize_bands(1000, 1)
    array([1.])
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be a whole number of at least 1: raise rounds")
    if bands < 1:
        raise ValueError(f"bands is {bands}; it must be a whole number of at least 1: raise bands")
    index = np.arange(1, min(bands, rounds))
    others = np.cumprod((2 * index - 1) / (2 * index))
    if len(others):
        optimize = import_privacy_package("scipy.optimize")
        others = optimize.minimize(
            _log_error,
            others,
            args=(rounds,),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, 1.0)] * len(others),
            options={"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10},
        ).x
    coefficients = np.concatenate([[1.0], others])
    coefficients /= np.linalg.norm(coefficients)
    coefficients.flags.writeable = False
    return coefficients


def _log_error(others: np.ndarray, rounds: int) -> tuple[float, np.ndarray]:
    """The logarithm of the mean squared error for c = (1, others), and its gradient, in O(rounds · bands).

    A C⁻¹ is the Toeplitz matrix of w = 1/((1-x) c(x)), so that the mean of its squared row norms is L = Σ_j (1 - j/n)
    w_j². From ∂w/∂c_i = -xⁱ v with v = w/c(x) follows ∂L/∂c_i = -2 Σ_j (1 - j/n) w_j v_{j-i}. A division by c(x) is the
    recursion that `lfilter` runs.
    """
    signal = import_privacy_package("scipy.signal")
    coefficients = np.concatenate([[1.0], others])
    sums = signal.lfilter([1.0], coefficients, np.ones(rounds))
    divided = signal.lfilter([1.0], coefficients, sums)
    weighted = (1 - np.arange(rounds) / rounds) * sums
    loss, squares = float(weighted @ sums), float(coefficients @ coefficients)
    slopes = np.array([-2 * weighted[lag:] @ divided[: rounds - lag] for lag in range(1, len(coefficients))])
    return math.log(loss) + math.log(squares), slopes / loss + 2 * others / squares


def expected_rmse(coefficients: Sequence[float] | np.ndarray, rounds: int) -> float:
    """The root mean squared error of the prefix sums at unit noise: √(1/n Σ_t ‖(A C⁻¹)_t‖²) · max_j ‖C[:, j]‖.

    That is the error of one coordinate, averaged over the squares of all n prefix sums, when σ = max_j ‖C[:, j]‖, which
    is a noise multiplier of 1 for a single participation. Independent noise has √((n+1)/2).

    >>> round(expected_rmse([1.0], 1000), 2)
    22.37
    """
    signal = import_privacy_package("scipy.signal")
    values = np.asarray(coefficients, dtype=np.float64)
    sums = signal.lfilter([1.0], values, np.ones(rounds))
    mean_square = float((1 - np.arange(rounds) / rounds) @ sums**2)
    return math.sqrt(mean_square) * _largest_column_norm(values, rounds)


def materialize_matrix(coefficients: Sequence[float] | np.ndarray, rounds: int) -> np.ndarray:
    """The matrix C, `[rounds, rounds]`, float64; for tests and audits."""
    values = np.asarray(coefficients, dtype=np.float64)
    matrix = np.zeros((rounds, rounds))
    for lag, value in enumerate(values[:rounds]):
        matrix += value * np.eye(rounds, k=-lag)
    return matrix


def sensitivity(coefficients: Sequence[float] | np.ndarray, rounds: int, separation: int) -> float:
    """How far C x can move, in L2 norm, by one client: √(participations) · max_j ‖C[:, j]‖.

    The client adds a vector of norm at most 1 at any rounds that lie at least `separation` = K apart, such as k, k + K,
    k + 2K, ...; that is at most ⌈rounds / K⌉ participations. The value is attained where K divides `rounds`; otherwise
    the last column may be cut off by the end, and the value is an upper bound.
    """
    bands = len(coefficients)
    if bands > separation:
        raise ValueError(
            f"bands is {bands}; it must be at most {separation}, the rounds between two participations of a client, "
            f"because its columns overlap otherwise: lower bands to {separation}"
        )
    values = np.asarray(coefficients, dtype=np.float64)
    return math.sqrt(math.ceil(rounds / separation)) * _largest_column_norm(values, rounds)


def _largest_column_norm(coefficients: np.ndarray, rounds: int) -> float:
    """The first column has every coefficient; columns near the end are cut off and shorter."""
    return float(np.linalg.norm(coefficients[:rounds]))


def next_noise(coefficients: Sequence[float] | np.ndarray, fresh: Vector, previous: Vector) -> tuple[Vector, Vector]:
    """The noise of round r, y_r = (z_r - Σ_{i=1}^{b-1} c_i y_{r-i}) / c_0, and the memory for round r + 1.

    Solves C y = z row by row. `fresh` is z_r `[d]`; `previous` is `[b - 1, d]`, the latest round first, zeros before
    round 0. Every number keeps its type, and b = 1 returns `fresh` to the bit. The terms are subtracted one at a time,
    in the order of i, so that a coordinate's noise does not depend on how many coordinates there are.
    """
    first, *others = (float(value) for value in coefficients)
    if len(previous) != len(others):
        raise ValueError(
            f"previous has {len(previous)} rows; {len(others) + 1} bands need {len(others)}: "
            "begin with zeros of that shape"
        )
    noise = fresh
    for value, earlier in zip(others, previous, strict=True):
        noise = noise - value * earlier
    noise = noise / first
    if not others:
        return noise, previous
    join: Any = torch.cat if isinstance(noise, torch.Tensor) else np.concatenate
    return noise, join([noise[None], previous[:-1]])
