"""DeLong's paired test between two rows of a table, each the mean of several runs.

A row's wins in the test are averaged over its runs before the variance is taken, so that the test is of the mean AUCs.
To that variance, of the test rows, comes that of the mean over runs, of the seeds: a difference has to be larger than
both explain. With one run each it is `delong_test`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedauc.experiments.paper.records import Ranks

LEAST = 20
"""Rows of either class that a test needs: its variance is an estimate, and its normal law a limit."""

MANY = 1000
"""Degrees of freedom from which Student's law counts as the normal one."""

STEPS = (np.arange(20_000) + 0.5) / 20_000
"""Midpoints of a unit interval, to sum over."""


class Wins(NamedTuple):
    """Each positive's share of negatives beaten `[m]`, of each negative of positives that beat it `[n]`, and labels."""

    positives: np.ndarray
    negatives: np.ndarray
    labels: np.ndarray

    @property
    def auc(self) -> float:
        """The run's AUC on these rows."""
        return float(self.positives.mean())


Case = Sequence[Wins]
"""The runs of one row on one test part."""


def p_value(ours: Sequence[Case], theirs: Sequence[Case], overlap: float = 0.0) -> float | None:
    """Two-sided, for the mean over cases; None where test rows were not the same, or are too few.

    Cases with other labels are other test parts. Two of them share a part `overlap` of their rows: their differences
    have at most that correlation, which is what is taken.
    """
    differences, variances = list[float](), list[Variance]()
    for first, second in zip(_merged(ours), _merged(theirs), strict=True):
        fewest = min(len(first[0].positives), len(first[0].negatives))
        if not np.array_equal(first[0].labels, second[0].labels) or fewest < LEAST:
            return None
        differences.append(_auc(first) - _auc(second))
        # The largest variance that is possible stands in for none, as in `delong_test`.
        variances.append(Variance(_rows(first, second) or 1 / fewest))
        variances += [_seeds(case) for case in (first, second) if len(case) > 1]
    total, count = sum(each.value for each in variances), len(differences)
    error = math.sqrt(total * (1 + (count - 1) * overlap)) / count
    # Welch and Satterthwaite: a variance that a few runs tell is itself uncertain.
    freedom = total**2 / max(sum(each.value**2 / each.freedom for each in variances), 1e-300)
    return two_sided(abs(float(np.mean(differences))) / error, freedom)


class Variance(NamedTuple):
    """An estimate, and how many degrees of freedom it has: test rows are so many that theirs count as known."""

    value: float
    freedom: float = math.inf


def two_sided(value: float, freedom: float) -> float:
    """Student's tail in both directions.

    With x = √ν tan θ the density is cos^(ν-1) θ, which is summed over θ.

    >>> round(two_sided(2.0, 3.0), 4), round(two_sided(1.96, 1e9), 3)
    (0.1393, 0.05)
    """
    if freedom > MANY:
        return math.erfc(value / math.sqrt(2))
    start = math.atan(value / math.sqrt(freedom))
    tail, whole = (
        np.mean(np.cos(begin + (math.pi / 2 - begin) * STEPS) ** (freedom - 1)) * (math.pi / 2 - begin)
        for begin in (start, 0.0)
    )
    return float(tail / whole)


def _rows(first: Case, second: Case) -> float:
    """Of the difference of mean wins, by the test rows."""
    gains = [_mean(first, part) - _mean(second, part) for part in ("positives", "negatives")]
    return float(sum(np.var(gain, ddof=1) / len(gain) for gain in gains))


def _auc(runs: Case) -> float:
    return float(np.mean([run.auc for run in runs]))


def _mean(runs: Case, part: str) -> np.ndarray:
    found: np.ndarray = np.mean([getattr(run, part) for run in runs], axis=0)
    return found


def _seeds(runs: Case) -> Variance:
    """Of the mean AUC over several runs."""
    return Variance(float(np.var([run.auc for run in runs], ddof=1)) / len(runs), len(runs) - 1)


def wins(run: Ranks) -> Wins:
    """Shares of the other class below and above each row; a tie counts one half."""
    positives, negatives = (np.sort(run.ranks[run.labels == label]) for label in (1, 0))
    mine, others = run.ranks[run.labels == 1], run.ranks[run.labels == 0]
    below = np.searchsorted(negatives, mine, "left") + np.searchsorted(negatives, mine, "right")
    above = np.searchsorted(positives, others, "left") + np.searchsorted(positives, others, "right")
    return Wins(below / (2 * len(negatives)), 1 - above / (2 * len(positives)), run.labels)


def _merged(cases: Sequence[Case]) -> list[list[Wins]]:
    """Cases on the same test rows are repetitions of one."""
    found: list[list[Wins]] = []
    for case in cases:
        same = [mine for mine in found if np.array_equal(mine[0].labels, case[0].labels)]
        if same:
            same[0].extend(case)
        else:
            found.append(list(case))
    return found
