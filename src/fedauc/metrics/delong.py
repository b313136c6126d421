"""DeLong's confidence interval of an AUC, and his paired test of two AUCs."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedauc.metrics.ranks import check_rows, mid_ranks, require_classes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Interval(NamedTuple):
    """An estimate, its confidence interval and its standard error."""

    estimate: float
    low: float
    high: float
    error: float


class PairedTest(NamedTuple):
    """The first AUC minus the second, its standard error, their ratio, and the two-sided p-value."""

    difference: float
    error: float
    z: float
    p_value: float


def delong_interval(labels: ArrayLike, scores: ArrayLike, level: float = 0.95) -> Interval:
    """DeLong's standard error of the AUC, and a confidence interval that stays inside [0, 1].

    The variance is S₊/m + S₋/n, with S₊ and S₋ the sample variances over the rows of a class of their mean wins
    (DeLong et al. 1988), from mid-ranks (Sun & Xu 2014). The interval is symmetric in logit(AUC). A 95 % interval
    covers 94-96 % of the time, but 93 % for high AUCs from few rows (AUC 0.92 with 30 positives).

    That variance is zero exactly when the classes are separated (AUC 0 or 1) or all scores are tied, which does not
    mean that the AUC is certain. In that case k = min(m, n) disjoint pairs all had one outcome, whose probability is at
    least q = ((1 - level) / 2)^(1/k) at the given level (Clopper & Pearson 1934), so that the AUC lies in
    [q·estimate, 1 - q·(1 - estimate)]; the error is that width over twice the normal quantile.

    >>> tuple(round(x, 3) for x in delong_interval([0, 0, 0, 1, 1, 1], [1, 2, 4, 3, 5, 6]))
    (0.889, 0.261, 0.995, 0.157)
    >>> tuple(round(x, 3) for x in delong_interval([0, 0, 0, 1, 1, 1], [1, 2, 3, 4, 5, 6]))
    (1.0, 0.292, 1.0, 0.181)
    """
    check_level(level)
    positive, values = check_rows(labels, scores)
    require_classes(positive, least=2)
    wins = _count_wins(positive, values)
    return build_interval(wins.mean_wins(), wins.standard_error(), wins.disjoint_pairs(), level)


def check_level(level: float) -> None:
    """Refuse a confidence level that is not strictly between 0 and 1."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie strictly between 0 and 1: use for example 0.95")


def build_interval(area: float, error: float, disjoint_pairs: float, level: float) -> Interval:
    """The interval of `delong_interval` from an AUC, its standard error and the number of disjoint pairs."""
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    if error == 0:
        probability = ((1 - level) / 2) ** (1 / disjoint_pairs)
        low, high = probability * area, 1 - probability * (1 - area)
        return Interval(area, low, high, (high - low) / (2 * quantile))
    center, width = math.log(area / (1 - area)), quantile * error / (area * (1 - area))
    return Interval(area, _inverse_logit(center - width), _inverse_logit(center + width), error)


def delong_test(labels: ArrayLike, first: ArrayLike, second: ArrayLike) -> PairedTest:
    """DeLong's two-sided paired test that two scorers of the same rows have the same AUC.

    The variance is that of `delong_interval`, with the difference of the two mean wins of each row. Where it is zero
    but the difference is not (for example, one scorer separates the classes and the other is constant), it is replaced
    by the largest variance of differences in [-1, 1], which is 1 / min(m, n).

    >>> delong_test([0, 0, 1, 1], [1, 2, 3, 4], [10, 20, 30, 40])
    PairedTest(difference=0.0, error=0.0, z=0.0, p_value=1.0)
    """
    positive, first_scores = check_rows(labels, first)
    second_scores = check_rows(labels, second)[1]
    require_classes(positive, least=2)
    first_wins, second_wins = _count_wins(positive, first_scores), _count_wins(positive, second_scores)
    gain = _Wins(first_wins.positives - second_wins.positives, first_wins.negatives - second_wins.negatives)
    difference, error = gain.mean_wins(), gain.standard_error()
    if difference == 0:
        return PairedTest(0.0, error, 0.0, 1.0)
    error = error or 1 / math.sqrt(gain.disjoint_pairs())
    z = difference / error
    # erfc keeps its digits far in the tail, where 1 - cdf would cancel to 0.
    return PairedTest(difference, error, z, math.erfc(abs(z) / math.sqrt(2)))


class _Wins(NamedTuple):
    """The wins of each positive over the n negatives `[m]`, and the losses of each negative to positives `[n]`."""

    positives: np.ndarray
    negatives: np.ndarray

    def mean_wins(self) -> float:
        """The AUC."""
        return float(self.positives.sum() / (len(self.positives) * len(self.negatives)))

    def disjoint_pairs(self) -> int:
        """How many pairs have no row in common, and are therefore independent."""
        return min(len(self.positives), len(self.negatives))

    def standard_error(self) -> float:
        """DeLong's standard error of the AUC."""
        m, n = len(self.positives), len(self.negatives)
        # Wins are multiples of one half, so equal wins have variance 0 exactly; their means would not.
        return math.sqrt(np.var(self.positives, ddof=1) / (n * n * m) + np.var(self.negatives, ddof=1) / (m * m * n))


def _count_wins(positive: np.ndarray, scores: np.ndarray) -> _Wins:
    # The rank of a row among all rows minus its rank in its class counts the rows of the other class below it.
    ranks = mid_ranks(scores)
    below_positives = ranks[positive] - mid_ranks(scores[positive])
    below_negatives = ranks[~positive] - mid_ranks(scores[~positive])
    return _Wins(below_positives, len(below_positives) - below_negatives)


def _inverse_logit(logit: float) -> float:
    # Unlike 1 / (1 + exp(-x)), tanh never overflows.
    return (1 + math.tanh(logit / 2)) / 2
