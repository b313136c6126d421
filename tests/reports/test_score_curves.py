"""Curves and their bands against scikit-learn and against resampling row by row."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_curve, roc_curve

from fedauc.metrics import delong_interval
from fedauc.reports.score_curves import GRID, histogram_scores, precision_recall_band, roc_band
from fedauc.reports.site_quality import measure_sites

RNG = np.random.default_rng(0)
LABELS = (np.arange(400) % 8 == 0).astype(int)
SCORES = np.round(RNG.normal(size=400) + 1.5 * LABELS, 2)


def test_the_roc_curve_is_that_of_scikit_learn() -> None:
    band = roc_band(LABELS, SCORES)
    fpr, tpr, _ = roc_curve(LABELS, SCORES)
    assert np.interp(fpr, band.x, band.y) == pytest.approx(np.interp(fpr, fpr, tpr), abs=1e-12)


def test_the_precision_recall_curve_passes_through_scikit_learns_points() -> None:
    band = precision_recall_band(LABELS, SCORES)
    precision, recall, _ = precision_recall_curve(LABELS, SCORES)
    known = set(zip(recall.round(10).tolist(), precision.round(10).tolist(), strict=True))
    assert set(zip(band.x.round(10).tolist(), band.y.round(10).tolist(), strict=True)) <= known


def test_the_roc_band_agrees_with_resampling_rows() -> None:
    """Both are percentiles of random curves: at most .06 apart where the curve is not steep."""
    positives, negatives = SCORES[LABELS == 1], SCORES[LABELS == 0]
    curves = []
    for _ in range(200):
        drawn = RNG.choice(positives, len(positives)), RNG.choice(negatives, len(negatives))
        labels = np.repeat([1, 0], [len(positives), len(negatives)])
        fpr, tpr, _ = roc_curve(labels, np.concatenate(drawn))
        curves.append(np.interp(GRID, fpr, tpr))
    low, high = np.quantile(curves, (0.025, 0.975), axis=0)
    band, flat = roc_band(LABELS, SCORES), GRID > 0.1
    assert np.abs(band.low - low)[flat].max() < 0.06
    assert np.abs(band.high - high)[flat].max() < 0.06


def test_a_band_is_the_same_every_time() -> None:
    assert (roc_band(LABELS, SCORES).low == roc_band(LABELS, SCORES).low).all()


def test_many_distinct_scores_are_binned_without_moving_the_band() -> None:
    """20,000 rows have more distinct scores than bins; the area between the ends of the band stays DeLong's width."""
    labels = (np.arange(20_000) % 10 == 0).astype(int)
    scores = RNG.normal(size=20_000) + labels
    band, interval = roc_band(labels, scores), delong_interval(labels, scores)
    low, high = (float(np.trapezoid(side, GRID)) for side in (band.low, band.high))
    assert low < interval.low < interval.high < high
    # Pointwise ends are reached at different resamples, so their area is wider, but not by much.
    assert high - low < 3 * (interval.high - interval.low)


def test_histograms_count_every_row_once() -> None:
    counted = histogram_scores(LABELS, SCORES)
    assert counted.negatives.sum() == pytest.approx(1)
    assert counted.positives.sum() == pytest.approx(1)


def test_sites_have_delongs_interval_and_the_lowest_comes_first() -> None:
    owners = np.arange(400) % 3
    lines = measure_sites(LABELS, SCORES, owners)
    assert [line.auc for line in lines] == sorted(line.auc or 0 for line in lines)
    for line in lines:
        rows = owners == int(line.name)
        assert (line.auc, line.low, line.high) == delong_interval(LABELS[rows], SCORES[rows])[:3]
