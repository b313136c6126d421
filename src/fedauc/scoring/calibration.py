"""Federated calibration: from raw scores to probabilities, fitted on histograms that sites add up.

A site never sends a row. It sends the range of its scores, and then, for bins that all sites share, how many of its
negatives and positives fall into each bin and the sums of their scores. These add up, and the server fits Platt scaling
or an isotonic curve to the sums. Scores often have long tails, so that most rows would share a few bins of equal width;
the server therefore moves half of the edges to the quantiles of the summed counts, and asks again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fedauc.discovery import lookup
from fedauc.metrics.ranks import check_rows, require_classes, to_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BINS = 256
"""Bins of a histogram."""

PASSES = 3
"""How often the sites count: once with bins of equal width, and twice with half of the edges at quantiles."""

NEWTON_STEPS = 100
"""More than Platt scaling ever needs: the loss is convex and smooth in two numbers."""


class ScoreHistogram(NamedTuple):
    """Counts of negatives and positives and the sums of their scores, per bin `[b]`: what a site sends."""

    negatives: np.ndarray
    positives: np.ndarray
    negative_sums: np.ndarray
    positive_sums: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Rows per bin."""
        rows: np.ndarray = self.negatives + self.positives
        return rows

    @property
    def mean_scores(self) -> np.ndarray:
        """The mean score of the rows of a bin."""
        means: np.ndarray = (self.negative_sums + self.positive_sums) / self.rows
        return means


def count_scores(positive: np.ndarray, scores: np.ndarray, edges: np.ndarray) -> ScoreHistogram:
    """The histogram of one site. A bin includes its lower edge; the last one includes its upper edge too."""
    bins = len(edges) - 1
    members = np.clip(np.searchsorted(edges, scores, side="right") - 1, 0, bins - 1)
    classes = (~positive, positive)
    counts = [np.bincount(members[rows], minlength=bins) for rows in classes]
    sums = [np.bincount(members[rows], weights=scores[rows], minlength=bins) for rows in classes]
    return ScoreHistogram(*counts, *sums)


def move_edges_to_quantiles(edges: np.ndarray, counted: ScoreHistogram, bins: int) -> np.ndarray:
    """Half of the edges at equal distances, which divide the tails, and half between equal shares of the rows.

    Each class counts one half of the rows. Inside a bin, rows are taken to be spread evenly.
    """
    shares = counted.negatives / counted.negatives.sum() + counted.positives / counted.positives.sum()
    cumulative = np.concatenate([[0.0], np.cumsum(shares)]) / 2
    quantiles = np.interp(np.linspace(0, cumulative[-1], bins // 2 + 1), cumulative, edges)
    return np.unique(np.concatenate([np.linspace(edges[0], edges[-1], bins - bins // 2 + 1), quantiles[1:-1]]))


def sum_histograms(labels: ArrayLike, scores: ArrayLike, clients: ArrayLike | None, bins: int = BINS) -> ScoreHistogram:
    """The summed histogram of all sites after the last pass; bins without rows are left out.

    `clients` names the site of each row. Without it all rows are one site's. Counts add up, so the result is the same.
    """
    if bins < 2:
        raise ValueError(f"bins is {bins}; a calibration needs at least 2: use for example {BINS}")
    positive, values = check_rows(labels, scores)
    require_classes(positive)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise ValueError(f"scores hold {values[row]} in row {row}; a calibration needs finite numbers: check the model")
    sites = _split_by_site(clients, len(values))
    ranges = [(values[rows].min(), values[rows].max()) for rows in sites]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    # Where all scores are the same, one bin next to them keeps the edges apart.
    edges = np.linspace(lowest, max(highest, np.nextafter(lowest, np.inf)), bins + 1)
    for count_pass in range(PASSES):
        counted = [count_scores(positive[rows], values[rows], edges) for rows in sites]
        summed = ScoreHistogram(*(np.sum(parts, axis=0) for parts in zip(*counted, strict=True)))
        if count_pass < PASSES - 1:
            edges = move_edges_to_quantiles(edges, summed, bins)
    filled = summed.rows > 0
    return ScoreHistogram(*(part[filled] for part in summed))


@dataclass(frozen=True)
class Calibration(ABC):
    """A fitted map from raw scores to probabilities of the positive class."""

    name: ClassVar[str]

    @staticmethod
    @abstractmethod
    def fit(counted: ScoreHistogram) -> Calibration:
        """The calibration of a summed histogram."""

    @abstractmethod
    def probabilities(self, scores: ArrayLike) -> np.ndarray:
        """The probability that a row is positive, `[n]` float64."""

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {"name": self.name, **values}


@dataclass(frozen=True)
class PlattCalibration(Calibration):
    """Platt scaling: p = 1 / (1 + exp(-(slope·score + intercept))), with two numbers to fit.

    The targets are Platt's (1999): (m + 1) / (m + 2) for the m positives and 1 / (n + 2) for the n negatives, so that
    separated classes do not send the slope to infinity. Newton's method on the summed histogram, in whose loss only
    the curved part takes all rows of a bin to have the bin's mean score.
    """

    name: ClassVar[str] = "platt"

    slope: float
    intercept: float

    @staticmethod
    def fit(counted: ScoreHistogram) -> PlattCalibration:
        """Minimise the cross-entropy of the smoothed targets."""
        positives, negatives = counted.positives.sum(), counted.negatives.sum()
        high, low = (positives + 1) / (positives + 2), 1 / (negatives + 2)
        weights, scores = counted.rows.astype(np.float64), counted.mean_scores
        # Standardised scores make the two unknowns equally large, whatever the scale of the model's outputs.
        center = float(np.average(scores, weights=weights))
        spread = math.sqrt(np.average((scores - center) ** 2, weights=weights)) or 1.0
        design = np.stack([(scores - center) / spread, np.ones_like(scores)])
        target = positives * high + negatives * low
        target_sum = counted.positive_sums.sum() * high + counted.negative_sums.sum() * low
        moments = np.array([(target_sum - target * center) / spread, target])
        solution = _minimize_cross_entropy(design, weights, moments)
        slope = float(solution[0] / spread)
        return PlattCalibration(slope, float(solution[1] - slope * center))

    def probabilities(self, scores: ArrayLike) -> np.ndarray:
        """The logistic function of the scaled score."""
        return _logistic(self.slope * to_numpy(scores).astype(np.float64) + self.intercept)


@dataclass(frozen=True)
class IsotonicCalibration(Calibration):
    """The best non-decreasing curve: pool-adjacent-violators on the bins, linear between knots, constant outside.

    It can follow any shape, but needs many positives; with few it turns chance into steps.
    """

    name: ClassVar[str] = "isotonic"

    knots: tuple[float, ...]
    values: tuple[float, ...]

    @staticmethod
    def fit(counted: ScoreHistogram) -> IsotonicCalibration:
        """Knots at the bins' mean scores."""
        scores, rows = counted.mean_scores, counted.rows
        fitted = pool_adjacent_violators(counted.positives / rows, rows.astype(np.float64))
        # Inside a flat stretch only its two ends matter.
        bends = np.ones(len(fitted), dtype=bool)
        bends[1:-1] = (fitted[1:-1] != fitted[:-2]) | (fitted[1:-1] != fitted[2:])
        return IsotonicCalibration(tuple(scores[bends].tolist()), tuple(fitted[bends].tolist()))

    def probabilities(self, scores: ArrayLike) -> np.ndarray:
        """Linear interpolation between the knots."""
        return np.interp(to_numpy(scores).astype(np.float64), self.knots, self.values)


CALIBRATIONS: Mapping[str, type[PlattCalibration] | type[IsotonicCalibration]] = {
    "platt": PlattCalibration,
    "isotonic": IsotonicCalibration,
}
"""Calibrations by name. Platt scaling is the default, because positives are few."""


def fit_calibration(
    labels: ArrayLike, scores: ArrayLike, clients: ArrayLike | None = None, name: str = "platt", bins: int = BINS
) -> Calibration:
    """A calibration from the histograms of all sites.

    >>> calibration = fit_calibration([0, 0, 0, 1, 1], [-2.0, -1.0, 0.5, 0.0, 3.0], clients=["a", "a", "b", "b", "b"])
    >>> calibration.probabilities([-2.0, 3.0]).round(2)
    array([0.2 , 0.74])
    """
    kind = lookup("calibration", name, CALIBRATIONS)
    return kind.fit(sum_histograms(labels, scores, clients, bins))


def read_calibration(document: Mapping[str, Any]) -> Calibration:
    """The calibration that `Calibration.to_document` has written."""
    kind = lookup("calibration", str(document.get("name")), CALIBRATIONS)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
    }
    values.pop("name")
    return kind(**values)


def pool_adjacent_violators(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence that is closest to the values in weighted least squares.

    >>> pool_adjacent_violators(np.array([0.0, 1.0, 0.5, 2.0]), np.ones(4))
    array([0.  , 0.75, 0.75, 2.  ])
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            earlier_mean, earlier_total, earlier_length = blocks.pop()
            mean = (earlier_mean * earlier_total + mean * total) / (earlier_total + total)
            total, length = total + earlier_total, length + earlier_length
        blocks.append((mean, total, length))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])


def measure_brier_score(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """The mean squared difference between probability and label (Brier 1950); 0 is perfect.

    >>> measure_brier_score([0, 1], [0.5, 0.5])
    0.25
    """
    positive, values = check_rows(labels, probabilities)
    return float(np.mean((values - positive) ** 2))


class ReliabilityBins(NamedTuple):
    """Groups of rows by probability: their mean probability, share of positives and number of rows, `[b]` each."""

    probabilities: np.ndarray
    positive_rates: np.ndarray
    rows: np.ndarray


def reliability_bins(labels: ArrayLike, probabilities: ArrayLike, bins: int = 10) -> ReliabilityBins:
    """Rows in groups of about equal size, ordered by probability; rows of one probability stay together.

    Groups of equal width would put nearly all rows into the first one where positives are rare.
    """
    positive, values = check_rows(labels, probabilities)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)))
    members = np.searchsorted(edges[1:-1], values, side="left")
    rows = np.bincount(members)
    filled = rows > 0
    means = np.bincount(members, weights=values)[filled] / rows[filled]
    rates = np.bincount(members, weights=positive)[filled] / rows[filled]
    return ReliabilityBins(means, rates, rows[filled])


def measure_calibration_error(labels: ArrayLike, probabilities: ArrayLike, bins: int = 10) -> float:
    """The mean distance between probability and share of positives over `reliability_bins`, weighted by rows.

    >>> measure_calibration_error([0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5])
    0.0
    """
    grouped = reliability_bins(labels, probabilities, bins)
    gaps = np.abs(grouped.probabilities - grouped.positive_rates)
    return float(np.average(gaps, weights=grouped.rows))


def _split_by_site(clients: ArrayLike | None, rows: int) -> list[np.ndarray | slice]:
    if clients is None:
        return [slice(None)]
    names = np.asarray(clients)
    if names.shape != (rows,):
        raise ValueError(f"clients have shape {names.shape}; give one name for each of the {rows} rows")
    _, numbers = np.unique(names.astype(str), return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    return list(np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1))


def _minimize_cross_entropy(design: np.ndarray, weights: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Newton's method with halved steps for Σ weights·log(1 + exp(solution @ design)) - solution·moments."""

    def measure_loss(solution: np.ndarray) -> float:
        return float(weights @ np.logaddexp(0, solution @ design) - solution @ moments)

    share = moments[1] / weights.sum()
    solution = np.array([0.0, math.log(share / (1 - share))])
    loss = measure_loss(solution)
    for _ in range(NEWTON_STEPS):
        predicted = _logistic(solution @ design)
        gradient = design @ (weights * predicted) - moments
        curvature = (design * (weights * predicted * (1 - predicted))) @ design.T
        # Where all scores are the same, the slope has no curvature and stays 0.
        step = np.linalg.lstsq(curvature, gradient)[0]
        if gradient @ step < 1e-12 * weights.sum():
            return solution
        length = 1.0
        while measure_loss(solution - length * step) > loss and length > 1e-10:
            length /= 2
        solution = solution - length * step
        loss = measure_loss(solution)
    return solution


def _logistic(logits: np.ndarray) -> np.ndarray:
    # Unlike 1 / (1 + exp(-x)), tanh never overflows.
    result: np.ndarray = (1 + np.tanh(logits / 2)) / 2
    return result
