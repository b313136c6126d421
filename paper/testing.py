"""DeLong's paired test between two rows of a table, each the mean of several runs.

A row's wins in the test are averaged over its runs before the variance is taken, so that the test is of the mean AUCs.
To that variance, of the test rows, comes that of training: over seeds, or over draws of the data, whose differences are
paired. Where the cases of a column have test parts of their own, their differences must also pass a t-test over cases,
which knows of everything that changes from case to case. With one run each it is `delong_test`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paper.records import Ranks

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
"""The runs of one row on one draw of the data."""

Pair = tuple[Case, Case]
"""A case of both rows."""


def p_value(ours: Sequence[Case], theirs: Sequence[Case], overlap: float = 0.0, same: bool = False) -> float | None:
    """Two-sided, for the mean over cases; None where test rows were not the same, or are too few.

    Cases with other labels are other test parts. Two of them share a part `overlap` of their rows: their differences
    have at most that correlation, which is what is taken. With `same`, they are the same rows in the same order under
    other labels, so that what a row adds to every case is known.
    """
    parts = _parts(ours, theirs)
    for first, second in ((pairs[0][0][0], pairs[0][1][0]) for pairs in parts):
        fewest = min(len(first.positives), len(first.negatives))
        if not np.array_equal(first.labels, second.labels) or fewest < LEAST:
            return None
    differences = [float(np.mean([_auc(one) - _auc(two) for one, two in pairs])) for pairs in parts]
    trained = [variance for pairs in parts for variance in _training(pairs)]
    known = _together(parts) if same else sum(map(_rows, parts)) * (1 + (len(parts) - 1) * overlap)
    inside = _p_value(differences, [Variance(known), *trained])
    if len(parts) == 1 or not np.ptp(differences):
        return inside
    # Differences that share rows vary less among each other than their mean does.
    shared = 0.0 if same else overlap
    spread = float(np.var(differences, ddof=1)) * (1 + (len(parts) - 1) * shared) / (1 - shared)
    return max(inside, _p_value(differences, [Variance(spread * len(parts), len(parts) - 1)]))


def _p_value(differences: Sequence[float], variances: Sequence[Variance]) -> float:
    """Of the mean difference, given the variances that add up to that of their sum."""
    total = sum(each.value for each in variances)
    # Welch and Satterthwaite: a variance that a few runs tell is itself uncertain.
    freedom = total**2 / max(sum(each.value**2 / each.freedom for each in variances), 1e-300)
    return two_sided(abs(sum(differences)) / math.sqrt(total), freedom)


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


def _parts(ours: Sequence[Case], theirs: Sequence[Case]) -> list[list[Pair]]:
    """The cases of both rows side by side, those on the same test rows together."""
    found: list[list[Pair]] = []
    for first, second in zip(ours, theirs, strict=True):
        same = [part for part in found if np.array_equal(part[0][0][0].labels, first[0].labels)]
        if same:
            same[0].append((first, second))
        else:
            found.append([(first, second)])
    return found


def _training(pairs: Sequence[Pair]) -> list[Variance]:
    """Of a test part's difference: over draws of the data where there are several, else over both rows' seeds."""
    if len(pairs) > 1:
        drawn = [_auc(one) - _auc(two) for one, two in pairs]
        return [Variance(float(np.var(drawn, ddof=1)) / len(drawn), len(drawn) - 1)]
    return [_seeds(runs) for runs in pairs[0] if len(runs) > 1]


def _rows(pairs: Sequence[Pair]) -> float:
    """Of a test part's difference, by its rows; the largest that is possible stands in for none."""
    gains = _gains(pairs)
    return float(sum(np.var(gain, ddof=1) / len(gain) for gain in gains)) or 1 / min(map(len, gains))


def _together(parts: Sequence[Sequence[Pair]]) -> float:
    """Of the sum of differences by rows that all parts share: what a row adds to one it may take from another."""
    total = np.zeros(len(parts[0][0][0][0].labels))
    for pairs in parts:
        labels = pairs[0][0][0].labels
        for label, gain in zip((1, 0), _gains(pairs), strict=True):
            total[labels == label] += (gain - gain.mean()) / len(gain)
    return float((total**2).sum()) or 1 / min(len(gain) for pairs in parts for gain in _gains(pairs))


def _gains(pairs: Sequence[Pair]) -> list[np.ndarray]:
    """By how much the first row's mean wins exceed the second's, for every positive and every negative."""
    first, second = ([run for pair in pairs for run in pair[place]] for place in (0, 1))
    return [_mean(first, part) - _mean(second, part) for part in ("positives", "negatives")]


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
