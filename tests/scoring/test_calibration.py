"""Calibration from summed histograms agrees with scikit-learn's fits on the rows themselves."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss

from fedauc.scoring.calibration import (
    CALIBRATIONS,
    IsotonicCalibration,
    PlattCalibration,
    count_scores,
    fit_calibration,
    measure_brier_score,
    measure_calibration_error,
    pool_adjacent_violators,
    read_calibration,
    reliability_bins,
    sum_histograms,
)


def draw_rows(rows: int = 6000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rare positives whose probability is a logistic function of half the score, minus 3, on 12 uneven sites."""
    draws = np.random.default_rng(seed)
    scores = draws.normal(size=rows) * 3
    labels = (draws.random(rows) < 1 / (1 + np.exp(3 - scores / 2))).astype(np.int8)
    return labels, scores, np.minimum(draws.geometric(0.2, rows), 12)


def fit_platt_with_sklearn(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Platt's smoothed targets as weighted rows of an unpenalised logistic regression, on the rows themselves."""
    positives, negatives = int(labels.sum()), int((1 - labels).sum())
    targets = np.where(labels == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    twice = np.concatenate([scores, scores])[:, None]
    model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
    model.fit(twice, np.repeat([1, 0], len(scores)), sample_weight=np.concatenate([targets, 1 - targets]))
    probabilities: np.ndarray = model.predict_proba(scores[:, None])[:, 1]
    return probabilities


def test_platt_scaling_agrees_with_logistic_regression_on_the_rows() -> None:
    labels, scores, clients = draw_rows()
    probabilities = fit_calibration(labels, scores, clients).probabilities(scores)
    np.testing.assert_allclose(probabilities, fit_platt_with_sklearn(labels, scores), atol=1e-4)


def test_platt_scaling_agrees_with_logistic_regression_despite_a_long_tail() -> None:
    """One score of a million would put every other row into one bin of equal width."""
    labels, scores, clients = draw_rows()
    scores[np.argmax(labels)] = 1e6
    probabilities = fit_calibration(labels, scores, clients).probabilities(scores)
    np.testing.assert_allclose(probabilities, fit_platt_with_sklearn(labels, scores), atol=2e-3)


def test_isotonic_calibration_agrees_with_isotonic_regression_on_the_rows() -> None:
    labels, scores, clients = draw_rows(20000)
    probabilities = fit_calibration(labels, scores, clients, "isotonic").probabilities(scores)
    twin = IsotonicRegression(out_of_bounds="clip").fit(scores, labels).predict(scores)
    # The curves differ inside bins only.
    assert np.abs(probabilities - twin).mean() < 0.005
    assert abs(probabilities.mean() - labels.mean()) < 0.001


def test_isotonic_calibration_of_few_distinct_scores_is_exact() -> None:
    labels, scores, clients = draw_rows()
    levels = np.round(scores)
    probabilities = fit_calibration(labels, levels, clients, "isotonic").probabilities(levels)
    twin = IsotonicRegression(out_of_bounds="clip").fit(levels, labels).predict(levels)
    np.testing.assert_allclose(probabilities, twin, atol=1e-12)


def test_pooled_violators_are_those_of_scikit_learn() -> None:
    draws = np.random.default_rng(1)
    values, weights = draws.normal(size=200) + np.arange(200) / 50, draws.random(200)
    twin = IsotonicRegression().fit_transform(np.arange(200), values, sample_weight=weights)
    np.testing.assert_allclose(pool_adjacent_violators(values, weights), twin)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_the_histograms_of_sites_add_up_to_those_of_all_rows(name: str) -> None:
    labels, scores, clients = draw_rows()
    by_site, together = fit_calibration(labels, scores, clients, name), fit_calibration(labels, scores, None, name)
    np.testing.assert_allclose(by_site.probabilities(scores), together.probabilities(scores), atol=1e-9)


def test_a_site_sends_counts_and_sums_of_its_rows_only() -> None:
    labels, scores, _ = draw_rows(100)
    edges = np.linspace(scores.min(), scores.max(), 5)
    counted = count_scores(labels == 1, scores, edges)
    np.testing.assert_array_equal(counted.rows, np.histogram(scores, edges)[0])
    np.testing.assert_array_equal(counted.positives, np.histogram(scores[labels == 1], edges)[0])
    np.testing.assert_allclose(counted.mean_scores * counted.rows, np.histogram(scores, edges, weights=scores)[0])


def test_no_row_is_lost_in_the_last_pass() -> None:
    labels, scores, clients = draw_rows()
    summed = sum_histograms(labels, scores, clients, bins=16)
    assert (summed.positives.sum(), summed.negatives.sum()) == (labels.sum(), (1 - labels).sum())
    assert summed.positive_sums.sum() == pytest.approx(scores[labels == 1].sum())
    assert summed.negative_sums.sum() == pytest.approx(scores[labels == 0].sum())
    assert 8 <= len(summed.rows) <= 16


def test_separated_classes_have_a_finite_slope() -> None:
    calibration = fit_calibration([0, 0, 0, 1, 1], [0.0, 1.0, 2.0, 10.0, 11.0])
    assert isinstance(calibration, PlattCalibration)
    assert 0 < calibration.slope < 10
    # Platt's targets for 2 positives and 3 negatives are 3/4 and 1/5.
    np.testing.assert_allclose(calibration.probabilities([1.0, 10.5]), [0.2, 0.75], atol=0.02)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_equal_scores_get_the_share_of_positives(name: str) -> None:
    calibration = fit_calibration([0] * 90 + [1] * 10, np.full(100, 2.5), name=name)
    # Platt's targets move the share from 0.1 to (10·11/12 + 90/92) / 100.
    expected = (10 * 11 / 12 + 90 / 92) / 100 if name == "platt" else 0.1
    np.testing.assert_allclose(calibration.probabilities([-1.0, 2.5, 7.0]), expected)


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_calibration_is_read_back_from_its_document(name: str) -> None:
    labels, scores, _ = draw_rows(500)
    calibration = fit_calibration(labels, scores, name=name)
    assert read_calibration(calibration.to_document()) == calibration


def test_isotonic_probabilities_never_decrease_and_stay_constant_outside() -> None:
    calibration = IsotonicCalibration((0.0, 1.0), (0.1, 0.9))
    np.testing.assert_allclose(calibration.probabilities([-5.0, 0.0, 0.5, 1.0, 7.0]), [0.1, 0.1, 0.5, 0.9, 0.9])


def test_brier_score_and_reliability_are_those_of_scikit_learn() -> None:
    labels, scores, _ = draw_rows()
    probabilities = 1 / (1 + np.exp(2 - scores / 2))
    assert measure_brier_score(labels, probabilities) == pytest.approx(brier_score_loss(labels, probabilities))
    rates, means = calibration_curve(labels, probabilities, n_bins=10, strategy="quantile")
    grouped = reliability_bins(labels, probabilities)
    np.testing.assert_allclose(grouped.positive_rates, rates)
    np.testing.assert_allclose(grouped.probabilities, means)
    expected = np.average(np.abs(rates - means), weights=grouped.rows)
    assert measure_calibration_error(labels, probabilities) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("labels", "scores", "settings", "message"),
    [
        ([0, 1], [1.0, np.inf], {}, "scores hold inf in row 1; a calibration needs finite numbers"),
        ([0, 0], [1.0, 2.0], {}, "labels hold 0 positives and 2 negatives"),
        ([0, 1], [1.0, 2.0], {"name": "spline"}, "unknown calibration 'spline'"),
        ([0, 1], [1.0, 2.0], {"bins": 1}, "bins is 1; a calibration needs at least 2"),
        ([0, 1], [1.0, 2.0], {"clients": ["a"]}, r"clients have shape \(1,\); give one name for each of the 2 rows"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_one_line(
    labels: list[int], scores: list[float], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_calibration(labels, scores, **settings)  # type: ignore[arg-type]
