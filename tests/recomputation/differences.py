"""AUC from ranks, and the paired test of two rows, written from its description on the page.

With V the share of the other class that an example is ranked correctly against (ties one half), DeLong's variance of a
difference of AUCs is var(V₁⁺ - V₂⁺)/m + var(V₁⁻ - V₂⁻)/n. V is averaged over a row's runs; the variance of training,
over seeds or over versions of the data, is added, with Welch's degrees of freedom.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

FEWEST = 20
"""Positives and negatives that a test needs."""


class Shares(NamedTuple):
    """V of every positive and of every negative, and the labels."""

    positives: np.ndarray
    negatives: np.ndarray
    labels: np.ndarray

    @property
    def auc(self) -> float:
        """The mean of V over positives, which is the AUC."""
        return float(np.mean(self.positives))


class Interval(NamedTuple):
    """Half the width of a 95 % interval, and the p-value."""

    half_width: float
    p_value: float


def rank_shares(labels: np.ndarray, ranks: np.ndarray) -> Shares:
    """V by counting: how many of the other class have a lower rank, and half of those with the same.

    >>> rank_shares(np.array([True, True, False]), np.array([2, 1, 1])).positives
    array([1. , 0.5])
    """
    size = int(ranks.max()) + 1
    positives, negatives = (np.bincount(ranks[labels == label], minlength=size) for label in (True, False))
    negatives_below = np.cumsum(negatives) - negatives / 2
    positives_above = positives.sum() - (np.cumsum(positives) - positives / 2)
    return Shares(
        negatives_below[ranks[labels]] / negatives.sum(), positives_above[ranks[~labels]] / positives.sum(), labels
    )


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the largest of (n - k) p₍ₖ₎ up to each rank, counted from 0.

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1, np.maximum.accumulate(scaled))
    return [float(value) for value in corrected]


def compare(
    first: list[list[Shares]], second: list[list[Shares]], overlap: float, same_examples: bool
) -> Interval | None:
    """The test between two rows, given their runs by case; None where a test part is too small or not the same."""
    parts: dict[bytes, list[int]] = {}
    for case, runs in enumerate(first):
        if not np.array_equal(runs[0].labels, second[case][0].labels):
            return None
        parts.setdefault(runs[0].labels.tobytes(), []).append(case)
    labels = [first[cases[0]][0].labels for cases in parts.values()]
    if min(min(part.sum(), (~part).sum()) for part in labels) < FEWEST:
        return None
    sums, variances, test_variances = [], list[tuple[float, float]](), []
    added = np.zeros(len(labels[0]))
    for part, cases in zip(labels, parts.values(), strict=True):
        mean_aucs = [[np.mean([run.auc for run in row[case]]) for row in (first, second)] for case in cases]
        by_case = [one - other for one, other in mean_aucs]
        sums.append(np.mean(by_case))
        if len(cases) > 1:
            variances.append((float(np.var(by_case, ddof=1)) / len(cases), len(cases) - 1))
        else:
            for runs in (first[cases[0]], second[cases[0]]):
                if len(runs) > 1:
                    variances.append((float(np.var([run.auc for run in runs], ddof=1)) / len(runs), len(runs) - 1))
        gains = _gains(first, second, cases)
        total = sum(np.var(gain, ddof=1) / len(gain) for gain in gains)
        test_variances.append(total or 1 / min(map(len, gains)))
        if same_examples:
            added[part] += (gains[0] - gains[0].mean()) / len(gains[0])
            added[~part] += (gains[1] - gains[1].mean()) / len(gains[1])
    count = len(sums)
    of_test = float(np.sum(added**2)) if same_examples else sum(test_variances) * (1 + (count - 1) * overlap)
    within = _student(sums, [(of_test, np.inf), *variances])
    if count == 1 or len(set(sums)) == 1:
        return within
    shared = 0.0 if same_examples else overlap
    spread = np.var(sums, ddof=1) * count * (1 + (count - 1) * shared) / (1 - shared)
    between = _student(sums, [(spread, count - 1)])
    return Interval(max(within[0], between[0]), max(within[1], between[1]))


def _gains(first: list[list[Shares]], second: list[list[Shares]], cases: list[int]) -> list[np.ndarray]:
    """For positives and for negatives: V of the first row less V of the second, each averaged over its runs."""
    gains = []
    for side in (0, 1):
        ours, theirs = (np.mean([run[side] for case in cases for run in row[case]], axis=0) for row in (first, second))
        gains.append(ours - theirs)
    return gains


def _student(sums: list[float], variances: list[tuple[float, float]]) -> Interval:
    values, freedoms = np.array(variances).T
    denominator = np.sum(values**2 / freedoms)
    freedom = np.sum(values) ** 2 / denominator if denominator else np.inf
    error = np.sqrt(np.sum(values))
    reference = stats.t(freedom) if np.isfinite(freedom) else stats.norm()
    return Interval(float(reference.isf(0.025) * error / len(sums)), float(2 * reference.sf(abs(np.sum(sums)) / error)))
