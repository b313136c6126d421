"""The AUC from histograms: against the metrics on binned scores, against matrices, and against simulated truth."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from fedauc import metrics
from fedauc.metrics.histogram_auc import choose_bins, histogram_auc, merge_bins


def draw_counts(rows: tuple[int, int], bins: int, seed: int) -> np.ndarray:
    """Counts `[2, bins]` of so many negatives and positives, the positives further up."""
    generator = np.random.default_rng(seed)
    weights = np.stack([np.linspace(2, 0.1, bins), np.linspace(0.3, 2, bins)]) * generator.random((2, bins))
    shares = weights / weights.sum(axis=1, keepdims=True)
    return np.stack([generator.multinomial(count, share) for count, share in zip(rows, shares, strict=True)])


def spread_rows(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores with these counts; the score of a row is the number of its bin."""
    bins = counts.shape[1]
    scores = np.concatenate([np.repeat(np.arange(bins), side) for side in counts])
    return np.repeat([0, 1], counts.sum(axis=1)), scores


def normal_shares(mean: float, bins: int) -> np.ndarray:
    """The probability of each of `bins` equal bins of h / (1 + |h|) for normal scores h with this mean."""
    mapped = np.arange(1, bins) / bins * 2 - 1
    edges = mapped / (1 - np.abs(mapped))
    return np.diff([0.0, *(NormalDist(mean).cdf(edge) for edge in edges), 1.0])


# ------------------------------------------------------------------------------------------------------- without noise


@pytest.mark.parametrize("rows", [(2, 2), (40, 10), (3000, 30), (17, 900)])
@pytest.mark.parametrize("bins", [1, 2, 7, 64])
def test_without_noise_it_is_delong_of_the_binned_scores(rows: tuple[int, int], bins: int) -> None:
    counts = draw_counts(rows, bins, seed=bins)
    labels, scores = spread_rows(counts)
    result = histogram_auc(counts)
    assert result is not None
    assert result.estimate == metrics.auc(labels, scores)
    assert result == pytest.approx(metrics.delong_interval(labels, scores), abs=1e-9)
    ninety = histogram_auc(counts, level=0.9)
    assert ninety == pytest.approx(metrics.delong_interval(labels, scores, level=0.9), abs=1e-9)


@pytest.mark.parametrize("counts", [[[5, 4, 0], [0, 0, 3]], [[0, 0, 3], [5, 4, 0]], [[0, 6, 0], [0, 4, 0]]])
def test_separated_and_tied_classes_are_not_certain(counts: list[list[int]]) -> None:
    labels, scores = spread_rows(np.array(counts))
    assert histogram_auc(counts) == pytest.approx(metrics.delong_interval(labels, scores), abs=1e-12)


def test_separated_weights_are_not_certain_either() -> None:
    """Sums of weights round, so that neither the AUC of separated classes is exactly 1 nor its variance exactly 0."""
    for seed in range(50):
        weights = np.random.default_rng(seed).random((2, 40))
        weights[0, 20:] = weights[1, :20] = 0
        result = histogram_auc(weights)
        assert result is not None
        assert result == pytest.approx((1.0, 0.025 ** (1 / weights.sum(axis=1).min()), 1.0, result.error), abs=1e-12)


def test_a_class_with_one_row_leaves_the_interval_open() -> None:
    result = histogram_auc([[3, 1], [0, 1]])
    assert result is not None
    assert result[:3] == (0.875, 0.0, 1.0)


def test_an_absent_class_leaves_the_auc_unknown() -> None:
    assert histogram_auc([[3, 1], [0, 0]]) is None
    assert histogram_auc([[0, 0], [3, 1]]) is None


# ---------------------------------------------------------------------------------------------------------- with noise


def matrix_twin(counts: np.ndarray, noise: float) -> tuple[float, float, float]:
    """The estimate, the sampling variance and the noise variance of the docstring, with W as a matrix."""
    negatives, positives = counts
    bins = len(positives)
    total, opposite = positives.sum(), negatives.sum()
    wins = np.tri(bins, k=-1) + np.eye(bins) / 2
    area = positives @ wins @ negatives / (total * opposite)
    values, losses = wins @ negatives / opposite, positives @ wins / total
    gradient = np.concatenate([(values - area) / total, (losses - area) / opposite])
    product = noise**4 * np.square(wins - area).sum() / (total * opposite) ** 2
    noise_variance = max(noise**2 * gradient @ gradient - product, product)
    value_noise = noise**2 * np.square(wins - values[:, None]).sum(axis=1) / opposite**2
    loss_noise = noise**2 * np.square(wins - losses[None, :]).sum(axis=0) / total**2
    first = positives @ np.square(values - area) / total + noise_variance - positives @ value_noise / total
    second = negatives @ np.square(losses - area) / opposite + noise_variance - negatives @ loss_noise / opposite
    estimate = area + noise**2 * ((values - area).sum() / total**2 + (losses - area).sum() / opposite**2)
    return float(estimate), float(first / (total - 1) + second / (opposite - 1)), float(noise_variance)


@pytest.mark.parametrize("noise", [0.2, 1.0, 3.0])
def test_the_error_has_the_documented_parts(noise: float) -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        counts = draw_counts((400, 120), 12, seed) + noise * generator.standard_normal((2, 12))
        estimate, sampling, added = matrix_twin(counts, noise)
        result = histogram_auc(counts, noise)
        assert result is not None
        assert result.estimate == pytest.approx(estimate, abs=1e-12)
        assert result.error == pytest.approx(math.sqrt(sampling + added), rel=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    counts = draw_counts((400, 120), 12, seed=3).astype(float)

    def area(values: np.ndarray) -> float:
        result = histogram_auc(values)
        assert result is not None
        return result.estimate

    base, gradient = area(counts), np.zeros_like(counts)
    for cell in np.ndindex(*counts.shape):
        moved = counts.copy()
        moved[cell] += 1e-4
        gradient[cell] = (area(moved) - base) / 1e-4
    # For small noise, nothing but the delta method remains of the noise variance.
    noise = 1e-3
    _, _, added = matrix_twin(counts, noise)
    assert added == pytest.approx(noise**2 * np.square(gradient).sum(), rel=1e-3)


# Positives, negatives, distance of the classes, bins, noise. Where noise is 5, 50 positives allow only few bins.
SETTINGS = [
    (50, 4950, 1.0, 64, 0.0),
    (50, 4950, 1.0, 8, 1.0),
    (50, 4950, 1.0, 32, 1.0),
    (50, 4950, 1.0, 4, 5.0),
    (50, 4950, 1.5, 64, 0.1),
    (500, 4500, 1.0, 16, 5.0),
    (500, 4500, 2.0, 64, 1.0),
    (5000, 5000, 1.5, 32, 20.0),
]


@pytest.mark.parametrize(("positives", "negatives", "distance", "bins", "noise"), SETTINGS)
def test_the_interval_covers_the_truth_and_the_estimate_is_unbiased(
    positives: int, negatives: int, distance: float, bins: int, noise: float
) -> None:
    generator = np.random.default_rng(11)
    shares = normal_shares(0.0, bins), normal_shares(distance, bins)
    truth = float(shares[1] @ (np.cumsum(shares[0]) - shares[0] / 2))
    repetitions, covered, estimates = 1500, 0, []
    for _ in range(repetitions):
        counts = np.stack([generator.multinomial(negatives, shares[0]), generator.multinomial(positives, shares[1])])
        result = histogram_auc(counts + noise * generator.standard_normal(counts.shape), noise)
        if result is not None:
            covered += result.low <= truth <= result.high
            estimates.append(result.estimate)
    # The class total is significant but for 2 % of the draws of 50 positives with four bins of noise 5.
    assert len(estimates) >= 0.97 * repetitions
    assert 0.92 <= covered / len(estimates) <= 0.985
    # Higher orders of the ratio's bias remain where the noise of a class total is a fifth of the total.
    remaining = 0.012 if noise * math.sqrt(bins) > 0.15 * positives else 0.0
    bias, error = np.mean(estimates) - truth, np.std(estimates) / math.sqrt(len(estimates))
    assert abs(bias) <= 3 * error + remaining


def test_negative_counts_are_not_clamped() -> None:
    """Clamping bins at zero would add rows where there are none, and pull the AUC towards 1/2."""
    generator = np.random.default_rng(2)
    counts = np.zeros((2, 64))
    # A quarter of the 200 positives lies above all negatives, the others below them.
    counts[0, 8:16], counts[1, 40:42], counts[1, 0:6] = 500, 25, 25
    estimates: list[float] = []
    clamped: list[float] = []
    for _ in range(300):
        noised = counts + 2 * generator.standard_normal(counts.shape)
        for values, results in ((noised, estimates), (np.maximum(noised, 0), clamped)):
            result = histogram_auc(values, noise=2.0)
            assert result is not None
            results.append(result.estimate)
    assert np.mean(estimates) == pytest.approx(0.25, abs=float(3 * np.std(estimates) / math.sqrt(300)))
    assert np.mean(clamped) > 0.3


def test_the_interval_widens_with_noise_and_stays_inside_0_and_1() -> None:
    counts = draw_counts((400, 120), 12, seed=0)
    widths = []
    for noise in (0.0, 1e-6, 1.0, 3.0, 6.0):
        result = histogram_auc(counts, noise)
        assert result is not None
        assert 0 <= result.low <= result.estimate <= result.high <= 1
        widths.append(result.high - result.low)
    assert widths[0] == pytest.approx(widths[1], rel=1e-6)
    assert widths[1] < widths[2] < widths[3] < widths[4]


def test_an_estimate_beyond_1_is_moved_to_1() -> None:
    counts = np.array([[500.0, 0.0, 0.0, -9.0], [-3.0, 0.0, 2.0, 90.0]])
    result = histogram_auc(counts, noise=4.0)
    assert result is not None
    assert result.estimate == result.high == 1.0
    assert 0.85 < result.low < 1.0


def test_insignificant_totals_leave_the_auc_unknown() -> None:
    counts = np.array([[500.0] * 4, [11.0, 11.0, 11.0, 9.0]])
    # The threshold is 3 * 7 * sqrt(4) = 42 positives.
    assert histogram_auc(counts, noise=7.0) is not None
    counts[1, 0] -= 0.1
    assert histogram_auc(counts, noise=7.0) is None
    assert histogram_auc(counts, noise=math.inf) is None
    assert histogram_auc(-counts, noise=1.0) is None


# ---------------------------------------------------------------------------------------------------------------- bins


def test_merging_bins_keeps_the_counts() -> None:
    counts = draw_counts((900, 50), 64, seed=1)
    merged = merge_bins(counts, 16)
    assert merged.shape == (2, 16)
    for number in range(16):
        assert merged[:, number].tolist() == counts[:, 4 * number : 4 * number + 4].sum(axis=1).tolist()


def test_merging_noised_bins_does_not_lower_the_noise_but_merging_first_does() -> None:
    generator = np.random.default_rng(4)
    fine = 0.5 * generator.standard_normal((400, 64)) + 2
    coarse = 0.5 * generator.standard_normal((400, 8)) + 16
    assert merge_bins(fine, 8).std() == pytest.approx(0.5 * math.sqrt(8), rel=0.05)
    assert coarse.std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("positives", "negatives", "noise"), [(50, 5000, 1.0), (50, 5000, 5.0), (500, 5000, 5.0), (5000, 5000, 20.0)]
)
def test_the_chosen_bins_are_close_to_the_best(positives: int, negatives: int, noise: float) -> None:
    """The root mean square error against the AUC of the scores themselves, where an unknown AUC counts as 1/2."""
    truth = NormalDist().cdf(1.5 / math.sqrt(2))
    errors = {}
    for bins in (2, 4, 8, 16, 32, 64):
        generator = np.random.default_rng(5)
        shares = normal_shares(0.0, bins), normal_shares(1.5, bins)
        squares = []
        for _ in range(250):
            counts = np.stack(
                [generator.multinomial(negatives, shares[0]), generator.multinomial(positives, shares[1])]
            )
            result = histogram_auc(counts + noise * generator.standard_normal(counts.shape), noise)
            squares.append(((0.5 if result is None else result.estimate) - truth) ** 2)
        errors[bins] = math.sqrt(np.mean(squares))
    assert errors[choose_bins(noise, positives, negatives)] <= 1.3 * min(errors.values())
    assert max(errors.values()) > 1.5 * min(errors.values())


def test_the_number_of_bins_has_limits() -> None:
    assert choose_bins(0.0, 10, 10, most=64) == 64
    assert choose_bins(1e-9, 1e6, 1e6) == 4096
    assert choose_bins(1000.0, 10, 10) == 2
    assert choose_bins(math.inf, 10, 10) == 2
    chosen = [choose_bins(noise, 300, 3000) for noise in np.geomspace(0.01, 100, 30)]
    assert chosen == sorted(chosen, reverse=True)
    assert {bins & (bins - 1) for bins in chosen} == {0}


def test_errors_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"counts have shape \(3,\); they must be \(2, bins\)"):
        histogram_auc([1, 2, 3])
    with pytest.raises(ValueError, match="counts hold NaN or infinity"):
        histogram_auc([[1.0, math.nan], [1.0, 2.0]])
    with pytest.raises(ValueError, match="noise is -1; it must be at least 0"):
        histogram_auc([[1, 2], [1, 2]], noise=-1)
    with pytest.raises(ValueError, match=r"counts hold -2\.0; they must be at least 0 without noise"):
        histogram_auc([[1, -2], [1, 2]])
    with pytest.raises(ValueError, match="level is 1; it must lie strictly between 0 and 1"):
        histogram_auc([[1, 2], [1, 2]], level=1)
    with pytest.raises(ValueError, match="bins is 3; it must divide the 4 bins"):
        merge_bins([[1, 2, 3, 4]], 3)
    with pytest.raises(ValueError, match="noise is -1, positives 5, negatives 6; noise must be at least 0"):
        choose_bins(-1, 5, 6)
