"""Operating points: the threshold above which a row is an alert, chosen by what alerts cost or how many can be handled.

A row is an alert if its score is at least the threshold. Rows of equal score are all alerts or none. A threshold lies
halfway between two neighbouring scores, so that the last digits of a score do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedauc.metrics.ranks import check_rows, require_classes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

DEFAULT_FPR = 0.01
"""The false positive rate of the operating point that a new model starts with."""

TABLE_FPRS = (0.001, 0.01, 0.05, 0.1)
TABLE_RECALLS = (0.5, 0.8, 0.9, 0.95)
"""The rows of a table of operating points."""


class Rate(NamedTuple):
    """A share of rows and its 95 % interval; the estimate is NaN where there are no rows."""

    estimate: float
    low: float
    high: float


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Rate:
    """Wilson's score interval of a binomial share (Wilson 1927): it stays in [0, 1] and works for 0 successes.

    >>> tuple(round(x, 4) for x in wilson_interval(0, 50))
    (0.0, 0.0, 0.0713)
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes is {successes}; it must be at least 0 and at most the {trials} trials")
    if trials == 0:
        return Rate(math.nan, 0.0, 1.0)
    share, z = successes / trials, NormalDist().inv_cdf((1 + level) / 2)
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    width = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At the ends the exact bounds are 0 and 1; rounding would miss them.
    low = 0.0 if successes == 0 else center - width
    high = 1.0 if successes == trials else center + width
    return Rate(share, low, high)


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, the rule that chose it, and what it did on the rows it was chosen on.

    Intervals are Wilson's, at 95 %, for the given threshold; they do not include that the threshold was chosen on the
    same rows. Precision and alerts hold for data with the same share of positives.
    """

    rule: str
    threshold: float
    true_positives: int
    false_positives: int
    positives: int
    negatives: int

    @property
    def alerts(self) -> int:
        """Rows at or above the threshold."""
        return self.true_positives + self.false_positives

    @property
    def fpr(self) -> Rate:
        """The share of negatives that are alerts."""
        return wilson_interval(self.false_positives, self.negatives)

    @property
    def recall(self) -> Rate:
        """The share of positives that are alerts."""
        return wilson_interval(self.true_positives, self.positives)

    @property
    def precision(self) -> Rate:
        """The share of alerts that are positives."""
        return wilson_interval(self.true_positives, self.alerts)

    @property
    def alerts_per_1000(self) -> Rate:
        """Alerts among 1,000 rows."""
        return Rate(*(1000 * value for value in wilson_interval(self.alerts, self.positives + self.negatives)))

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> OperatingPoint:
        """The operating point that `to_document` has written."""
        return OperatingPoint(**document)


class ThresholdCounts(NamedTuple):
    """Every threshold that tells the rows apart, from the one without alerts to the lowest, with what it finds."""

    thresholds: np.ndarray
    true_positives: np.ndarray
    false_positives: np.ndarray

    @staticmethod
    def of(labels: ArrayLike, scores: ArrayLike) -> ThresholdCounts:
        """Counts at each distinct score, from the highest."""
        positive, values = check_rows(labels, scores)
        require_classes(positive)
        distinct, members = np.unique(-values, return_inverse=True)
        distinct = -distinct
        true_positives = np.concatenate([[0], np.cumsum(np.bincount(members, weights=positive))]).astype(np.int64)
        rows = np.concatenate([[0], np.cumsum(np.bincount(members))])
        halfway = distinct[1:] + (distinct[:-1] - distinct[1:]) / 2
        # Between neighbouring floats there is no third one.
        halfway = np.where(halfway > distinct[1:], halfway, distinct[:-1])
        thresholds = np.concatenate([[np.nextafter(distinct[0], np.inf)], halfway, distinct[-1:]])
        return ThresholdCounts(thresholds, true_positives, rows - true_positives)

    def make_point(self, index: int, rule: str) -> OperatingPoint:
        """The operating point of one threshold."""
        counts = (self.true_positives[index], self.false_positives[index])
        totals = (self.true_positives[-1], self.false_positives[-1])
        return OperatingPoint(rule, float(self.thresholds[index]), *map(int, counts), *map(int, totals))


def choose_by_fpr(labels: ArrayLike, scores: ArrayLike, fpr: float = DEFAULT_FPR) -> OperatingPoint:
    """The lowest threshold whose false positive rate is at most this: it finds the most positives.

    >>> choose_by_fpr([0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 3.5, 5], fpr=0.25).threshold
    3.25
    """
    _check_share("fpr", fpr, 0.01)
    counts = ThresholdCounts.of(labels, scores)
    return counts.make_point(_last_within(counts.false_positives, fpr), f"fpr {fpr:g}")


def choose_by_recall(labels: ArrayLike, scores: ArrayLike, recall: float) -> OperatingPoint:
    """The fewest alerts that find at least this share of the positives.

    >>> choose_by_recall([0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 3.5, 5], recall=0.5).threshold
    4.5
    """
    _check_share("recall", recall, 0.9)
    counts = ThresholdCounts.of(labels, scores)
    needed = recall * counts.true_positives[-1]
    # The share may be a decimal such as 0.7, whose product is slightly above 7 of 10.
    index = int(np.argmax(counts.true_positives >= needed - 1e-9 * max(1.0, needed)))
    return counts.make_point(index, f"recall {recall:g}")


def choose_by_cost(labels: ArrayLike, scores: ArrayLike, cost_fn: float, cost_fp: float) -> OperatingPoint:
    """The least cost, where a missed positive costs `cost_fn` and a false alert `cost_fp`; of ties, the fewest alerts.

    >>> choose_by_cost([0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 3.5, 5], cost_fn=5, cost_fp=1).threshold
    3.25
    """
    for name, cost in (("cost_fn", cost_fn), ("cost_fp", cost_fp)):
        if not (cost > 0 and math.isfinite(cost)):
            raise ValueError(f"{name} is {cost}; it must be a positive number: give what one such error costs")
    counts = ThresholdCounts.of(labels, scores)
    costs = cost_fn * (counts.true_positives[-1] - counts.true_positives) + cost_fp * counts.false_positives
    return counts.make_point(int(np.argmin(costs)), f"cost-fn {cost_fn:g}, cost-fp {cost_fp:g}")


def choose_by_alerts(labels: ArrayLike, scores: ArrayLike, alerts: float, rows: float) -> OperatingPoint:
    """The lowest threshold with at most so many alerts among so many rows, for example those of a day.

    >>> choose_by_alerts([0, 0, 0, 0, 1, 1], [1, 2, 3, 4, 3.5, 5], alerts=20, rows=60).threshold
    3.75
    """
    if not 0 < alerts <= rows:
        raise ValueError(f"alerts is {alerts:g} of {rows:g} rows; it must be above 0 and at most the number of rows")
    counts = ThresholdCounts.of(labels, scores)
    index = _last_within(counts.true_positives + counts.false_positives, alerts / rows)
    return counts.make_point(index, f"alerts-per-day {alerts:g}, rows-per-day {rows:g}")


def measure_threshold(labels: ArrayLike, scores: ArrayLike, threshold: float, rule: str) -> OperatingPoint:
    """What a given threshold does on rows, for example on new ones."""
    positive, values = check_rows(labels, scores)
    alerts = values >= threshold
    counts = (alerts & positive, alerts & ~positive, positive, ~positive)
    return OperatingPoint(rule, threshold, *(int(rows.sum()) for rows in counts))


def list_operating_points(labels: ArrayLike, scores: ArrayLike) -> list[OperatingPoint]:
    """The table that reports and model cards show."""
    points = [choose_by_fpr(labels, scores, fpr) for fpr in TABLE_FPRS]
    return points + [choose_by_recall(labels, scores, recall) for recall in TABLE_RECALLS]


def _last_within(counts: np.ndarray, share: float) -> int:
    """The last of ascending counts that is at most this share of the largest count."""
    allowed = share * counts[-1]
    return int(np.searchsorted(counts, allowed + 1e-9 * max(1.0, allowed), side="right")) - 1


def _check_share(name: str, share: float, example: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"{name} is {share}; it must be above 0 and at most 1: use for example {example}")
