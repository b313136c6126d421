"""The statistics of `methods_summary.py`: intervals over splits that share rows, and tests over problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Difference(NamedTuple):
    """A mean difference with its 95 % interval and two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


class Ranking(NamedTuple):
    """Mean ranks (1 is best), Friedman's p-value, and the difference of mean ranks that Nemenyi's test asks for."""

    ranks: list[float]
    friedman_p: float
    critical_difference: float


def compare_splits(differences: Sequence[float], overlap: float) -> Difference:
    """The corrected resampled t-test of Nadeau and Bengio (2003): splits of the same rows are not independent.

    The variance of the mean of J differences is taken as (1/J + overlap) s², where overlap is test rows over training
    rows; with overlap 0 this is the usual t-test.
    """
    values = np.asarray(differences, dtype=float)
    center = float(values.mean())
    error = math.sqrt((1 / len(values) + overlap) * float(values.var(ddof=1)))
    if error == 0:
        return Difference(center, center, center, 1.0 if center == 0 else 0.0)
    width = error * float(stats.t.ppf(0.975, len(values) - 1))
    p = 2 * float(stats.t.sf(abs(center) / error, len(values) - 1))
    return Difference(center, center - width, center + width, p)


def correct_by_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the i-th smallest of m p-values times m - i, never falling and at most 1.

    >>> [round(p, 3) for p in correct_by_holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values)
    corrected = np.empty(len(p_values))
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - position) * p_values[index]))
        corrected[index] = largest
    return [float(p) for p in corrected]


def rank_contenders(values: np.ndarray) -> Ranking:
    """Ranks of values `[problems, contenders]`, of which the largest is best (Demšar, JMLR 2006).

    The critical difference is q sqrt(k (k + 1) / (6 N)), with the studentised range over sqrt 2 as q.
    """
    problems, contenders = values.shape
    ranks = stats.rankdata(-values, axis=1).mean(axis=0)
    quantile = float(stats.studentized_range.ppf(0.95, contenders, np.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(contenders * (contenders + 1) / (6 * problems))
    return Ranking([float(rank) for rank in ranks], float(stats.friedmanchisquare(*values.T).pvalue), critical)


def compare_problems(differences: Sequence[float]) -> float:
    """The p-value of Wilcoxon's signed-rank test that differences over problems are centred at zero."""
    if not any(differences):
        return 1.0
    return float(stats.wilcoxon(differences, zero_method="zsplit").pvalue)
