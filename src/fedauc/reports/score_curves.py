"""ROC and precision-recall curves of a finished run with bootstrap bands, and histograms of its scores.

A band comes from resampling the rows of each class separately, so that both class counts stay, as in DeLong's interval
of the AUC. Rows are first put into at most `BINS` bins of their scores; resampling bins by their counts is then the
same as resampling rows, and takes no longer for a million of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedauc import keys
from fedauc.metrics.curves import count_at_thresholds
from fedauc.metrics.ranks import check_rows

BINS = 1024
RESAMPLES = 400
MAX_POINTS = 600
"""Points of a drawn curve."""

GRID = np.concatenate([[0.0], np.geomspace(1e-3, 0.05, 25), np.linspace(0.06, 1.0, 95)])
"""Where a band is computed: closer together near 0, where ROC curves are steep."""


class CurveBand(NamedTuple):
    """A curve `[p]`, and its pointwise 95 % band on a grid `[g]`."""

    x: np.ndarray
    y: np.ndarray
    grid: np.ndarray
    low: np.ndarray
    high: np.ndarray


def roc_band(labels: np.ndarray, scores: np.ndarray) -> CurveBand:
    """True against false positive rate."""
    false_positives, true_positives = count_at_thresholds(labels, scores)
    x, y = false_positives / false_positives[-1], true_positives / true_positives[-1]
    negatives, positives = _resample_counts(labels, scores)
    curves = [np.interp(GRID, fpr, tpr) for fpr, tpr in zip(negatives, positives, strict=True)]
    low, high = np.quantile(curves, (0.025, 0.975), axis=0)
    return CurveBand(*_thin_points(x, y), GRID, low, high)


def precision_recall_band(labels: np.ndarray, scores: np.ndarray) -> CurveBand:
    """Precision against recall: the best precision among thresholds with at least that recall is not taken."""
    false_positives, true_positives = (counts[1:] for counts in count_at_thresholds(labels, scores))
    gains = np.diff(true_positives, prepend=0) > 0
    recall = true_positives[gains] / true_positives[-1]
    precision = true_positives[gains] / (true_positives[gains] + false_positives[gains])
    totals = float(false_positives[-1]), float(true_positives[-1])
    grid = np.linspace(max(0.01, 1 / totals[1]), 1.0, 100)
    curves = []
    for fpr, tpr in zip(*_resample_counts(labels, scores), strict=True):
        # The first threshold that reaches a recall; the tolerance absorbs rounding in the cumulative sums.
        index = np.minimum(np.searchsorted(tpr, grid - 1e-12), len(tpr) - 1)
        hits, alarms = tpr[index] * totals[1], fpr[index] * totals[0]
        curves.append(hits / (hits + alarms))
    low, high = np.quantile(curves, (0.025, 0.975), axis=0)
    return CurveBand(*_thin_points(recall, precision), grid, low, high)


def _resample_counts(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates of every resample at descending thresholds, `[RESAMPLES, bins + 1]` each."""
    positive, values = check_rows(labels, scores)
    edges = np.unique(values)
    if len(edges) > BINS:
        # Half of the bins follow the positives, which are few but decide where the curve bends.
        quantiles = np.linspace(0, 1, BINS // 2)
        edges = np.unique(np.concatenate([np.quantile(values[positive == side], quantiles) for side in (True, False)]))
    members = len(edges) - np.clip(np.searchsorted(edges, values, side="right"), 1, len(edges))
    generator = keys.numpy_generator("report", "bootstrap")
    rates = []
    for side in (~positive, positive):
        counts = np.bincount(members[side], minlength=len(edges))
        drawn = generator.multinomial(counts.sum(), counts / counts.sum(), size=RESAMPLES)
        cumulative = np.cumsum(drawn, axis=1) / counts.sum()
        rates.append(np.concatenate([np.zeros((RESAMPLES, 1)), cumulative], axis=1))
    return rates[0], rates[1]


def _thin_points(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS points; those on a straight horizontal or vertical stretch are left out first."""
    bends = np.ones(len(x), dtype=bool)
    bends[1:-1] = ~(((x[1:-1] == x[:-2]) & (x[1:-1] == x[2:])) | ((y[1:-1] == y[:-2]) & (y[1:-1] == y[2:])))
    chosen = np.flatnonzero(bends)
    if len(chosen) > MAX_POINTS:
        chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, MAX_POINTS).astype(int))]
    return x[chosen], y[chosen]


class ClassHistograms(NamedTuple):
    """The share of each class's rows in common bins; scores beyond the outermost edges count in the outermost bins."""

    edges: np.ndarray
    negatives: np.ndarray
    positives: np.ndarray


def histogram_scores(labels: np.ndarray, scores: np.ndarray, bins: int = 40) -> ClassHistograms:
    """Shares per class; the edges leave out one row in a thousand at both ends of a class, which may be far away."""
    positive, values = check_rows(labels, scores)
    ends = [np.quantile(values[side], (0.001, 0.999)) for side in (~positive, positive)]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    shares = [np.histogram(np.clip(values[side], edges[0], edges[-1]), edges)[0] for side in (~positive, positive)]
    return ClassHistograms(edges, shares[0] / shares[0].sum(), shares[1] / shares[1].sum())
