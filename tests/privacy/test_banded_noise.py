"""Banded noise: the matrix, its inverse by streaming, its sensitivity by brute force, and the errors it leaves."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedauc.privacy.banded_noise import expected_rmse, materialize_matrix, next_noise, optimize_bands, sensitivity

JAX_PRIVACY_RMSE = {2: 15.920, 5: 10.308, 10: 7.591}
"""Prefix-sum errors at unit noise that jax_privacy's optimization reaches for 1,000 rounds, by bands."""


def stream_noise(coefficients: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """The noise of all rounds, `[rounds, d]`, one round at a time."""
    previous = np.zeros((len(coefficients) - 1, fresh.shape[1]))
    noise = []
    for row in fresh:
        current, previous = next_noise(coefficients, row, previous)
        noise.append(current)
    return np.stack(noise)


def rmse_by_matrices(coefficients: np.ndarray, rounds: int) -> float:
    """The error as it is defined: the rows of A C⁻¹ and the columns of C."""
    matrix = materialize_matrix(coefficients, rounds)
    decoder = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix)
    return float(np.sqrt((decoder**2).sum(1).mean()) * np.linalg.norm(matrix, axis=0).max())


def separated_patterns(rounds: int, separation: int) -> Iterator[tuple[int, ...]]:
    """Every non-empty set of rounds that lie at least `separation` apart."""
    for size in range(1, rounds + 1):
        for pattern in itertools.combinations(range(rounds), size):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(pattern)):
                yield pattern


def test_matrix_is_banded_lower_triangular_toeplitz() -> None:
    expected = [[3.0, 0, 0, 0], [2, 3, 0, 0], [1, 2, 3, 0], [0, 1, 2, 3]]
    assert materialize_matrix([3.0, 2.0, 1.0], 4).tolist() == expected
    assert materialize_matrix([3.0, 2.0, 1.0], 2).tolist() == [[3, 0], [2, 3]]


@pytest.mark.parametrize("bands", [1, 2, 5, 10])
def test_streaming_solves_the_matrix_equation(bands: int) -> None:
    fresh = np.random.default_rng(bands).normal(size=(40, 7))
    coefficients = optimize_bands(40, bands)
    noise = stream_noise(coefficients, fresh)
    np.testing.assert_allclose(materialize_matrix(coefficients, 40) @ noise, fresh, atol=1e-12)
    np.testing.assert_allclose(noise, np.linalg.solve(materialize_matrix(coefficients, 40), fresh), atol=1e-11)


def test_torch_and_numpy_stream_the_same_bits() -> None:
    coefficients = optimize_bands(30, 4)
    fresh = np.random.default_rng(0).normal(size=(30, 5))
    previous = torch.zeros(3, 5, dtype=torch.float64)
    for row, expected in zip(fresh, stream_noise(coefficients, fresh), strict=True):
        noise, previous = next_noise(coefficients, torch.from_numpy(row), previous)
        assert noise.numpy().tobytes() == expected.tobytes()


def test_float32_noise_stays_float32() -> None:
    noise, previous = next_noise(optimize_bands(30, 3), torch.ones(4), torch.zeros(2, 4))
    assert noise.dtype == previous.dtype == torch.float32
    assert previous.shape == (2, 4)
    assert torch.equal(previous[0], noise)
    assert torch.equal(previous[1], torch.zeros(4))


def test_one_band_is_plain_noise_to_the_bit() -> None:
    fresh = np.random.default_rng(1).normal(size=(20, 3))
    assert stream_noise(optimize_bands(20, 1), fresh).tobytes() == fresh.tobytes()


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="previous has 3 rows; 3 bands need 2"):
        next_noise([0.8, 0.5, 0.3], np.zeros(2), np.zeros((3, 2)))


@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (7, 3), (50, 10), (1000, 10), (12, 12)])
def test_no_column_is_longer_than_one_and_the_first_attains_it(rounds: int, bands: int) -> None:
    norms = np.linalg.norm(materialize_matrix(optimize_bands(rounds, bands), rounds), axis=0)
    assert norms.max() <= 1 + 1e-12
    assert norms[0] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("bands", "rmse"), JAX_PRIVACY_RMSE.items())
def test_errors_of_a_thousand_rounds_are_those_of_jax_privacy(bands: int, rmse: float) -> None:
    coefficients = optimize_bands(1000, bands)
    assert round(expected_rmse(coefficients, 1000), 3) == rmse
    assert round(rmse_by_matrices(coefficients, 1000), 3) == rmse


def test_errors_at_the_noise_of_a_budget() -> None:
    """σ = 4.80 (ε = 8, δ = 1e-3, 100 whole groups) and .937 (δ = 1e-5, q = .1): 107.4 → 36.4 and 21.0 → 7.1."""
    plain, banded = expected_rmse(optimize_bands(1000, 1), 1000), expected_rmse(optimize_bands(1000, 10), 1000)
    assert plain == pytest.approx(math.sqrt(1001 / 2), rel=1e-12)
    assert [round(4.80 * plain, 1), round(4.80 * banded, 1)] == [107.4, 36.4]
    assert [round(0.937 * plain, 1), round(0.937 * banded, 1)] == [21.0, 7.1]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_expected_error_equals_that_of_the_matrices(scale: float) -> None:
    for rounds, bands in [(1, 1), (9, 2), (30, 7), (5, 8)]:
        coefficients = scale * np.random.default_rng(bands).uniform(0.1, 0.5, bands)
        coefficients[0] = scale
        assert expected_rmse(coefficients, rounds) == pytest.approx(rmse_by_matrices(coefficients, rounds), rel=1e-10)


@pytest.mark.parametrize("rounds", [1, 2, 3, 10, 24, 200])
def test_more_bands_are_never_worse(rounds: int) -> None:
    errors = [expected_rmse(optimize_bands(rounds, bands), rounds) for bands in range(1, min(rounds, 24) + 3)]
    assert all(later <= earlier * (1 + 1e-14) for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize(("rounds", "bands"), [(60, 2), (60, 6), (1000, 10)])
def test_no_random_step_improves_the_optimum(rounds: int, bands: int) -> None:
    best = optimize_bands(rounds, bands)
    error = expected_rmse(best, rounds)
    generator = np.random.default_rng(3)
    for size in (1e-1, 1e-2, 1e-3):
        for _ in range(50):
            assert expected_rmse(best + size * generator.normal(size=bands), rounds) >= error * (1 - 1e-12)


def test_a_truncated_square_root_is_worse() -> None:
    """The optimization's start, 1/√(1-x), leaves more error than its end."""
    start = np.cumprod([1, *((2 * i - 1) / (2 * i) for i in range(1, 10))])
    assert expected_rmse(optimize_bands(1000, 10), 1000) < 0.95 * expected_rmse(start, 1000)


def test_a_thousand_rounds_take_no_time() -> None:
    optimize_bands.cache_clear()
    start = time.process_time()
    optimize_bands(1000, 10)
    assert time.process_time() - start < 2


def test_the_cached_coefficients_cannot_be_overwritten() -> None:
    with pytest.raises(ValueError, match="read-only"):
        optimize_bands(10, 2)[0] = 5.0


@pytest.mark.parametrize(("rounds", "bands", "name"), [(0, 1, "rounds"), (5, 0, "bands")])
def test_sizes_below_one_are_refused(rounds: int, bands: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be a whole number of at least 1"):
        optimize_bands(rounds, bands)


@pytest.mark.parametrize(("rounds", "separation"), [(12, 3), (12, 4), (11, 4), (7, 7), (5, 9)])
def test_columns_of_one_client_are_orthogonal(rounds: int, separation: int) -> None:
    matrix = materialize_matrix(optimize_bands(rounds, separation), rounds)
    gram = matrix.T @ matrix
    for first, second in itertools.combinations(range(rounds), 2):
        if second - first >= separation:
            assert gram[first, second] == 0
    # One band more and they are not.
    if separation + 1 < rounds:
        wider = materialize_matrix(optimize_bands(rounds, separation + 1), rounds)
        assert (wider.T @ wider)[0, separation] > 0.01


@pytest.mark.parametrize(("rounds", "separation", "bands"), [(12, 3, 3), (12, 4, 2), (11, 4, 4), (10, 5, 5), (9, 2, 1)])
def test_sensitivity_bounds_every_participation_pattern(rounds: int, separation: int, bands: int) -> None:
    """Any rounds at least K apart, any vectors of norm at most 1; that includes all subsets of a group's rounds."""
    coefficients = optimize_bands(rounds, bands)
    matrix = materialize_matrix(coefficients, rounds)
    bound = sensitivity(coefficients, rounds, separation)
    generator = np.random.default_rng(0)
    largest = 0.0
    for pattern in separated_patterns(rounds, separation):
        columns = matrix[:, list(pattern)]
        vectors = generator.normal(size=(4, len(pattern), 3))
        vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
        moves = np.concatenate([np.linalg.norm(columns @ vectors, axis=(-2, -1)), [np.linalg.norm(columns.sum(1))]])
        assert moves.max() <= bound + 1e-12
        largest = max(largest, float(moves.max()))
    if rounds % separation == 0:
        assert largest == pytest.approx(bound, abs=1e-12)


def test_cyclic_participation_attains_the_sensitivity() -> None:
    coefficients = optimize_bands(1000, 10)
    matrix = materialize_matrix(coefficients, 1000)
    assert sensitivity(coefficients, 1000, 10) == pytest.approx(10, abs=1e-12)
    assert np.linalg.norm(matrix[:, ::10].sum(1)) == pytest.approx(10, abs=1e-9)


def test_more_bands_than_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bands is 4; it must be at most 3, .*: lower bands to 3"):
        sensitivity(optimize_bands(12, 4), 12, 3)


def test_streamed_noise_has_the_covariance_of_the_inverse() -> None:
    """Cov(y) = C⁻¹ C⁻ᵀ; an entry's standard error over 200,000 draws is below .01."""
    coefficients = optimize_bands(8, 3)
    noise = stream_noise(coefficients, np.random.default_rng(5).normal(size=(8, 200_000)))
    inverse = np.linalg.inv(materialize_matrix(coefficients, 8))
    np.testing.assert_allclose(np.cov(noise), inverse @ inverse.T, atol=0.05)
    assert np.abs(np.cov(noise)[0, 1]) > 0.3, "the noise of neighbouring rounds is correlated"
    prefix_sums = noise.cumsum(0)
    assert np.sqrt((prefix_sums**2).mean()) == pytest.approx(expected_rmse(coefficients, 8), rel=0.005)
