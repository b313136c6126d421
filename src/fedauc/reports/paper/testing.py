"""DeLong's paired test between two rows of a table, each the mean of several runs.

A row's wins in the test are averaged over its runs before the variance is taken, so that the test is of the mean AUCs
on these test rows; what seeds add is shown by the spread beside the mean. With one run each it is `delong_test`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedauc.experiments.paper.records import Ranks


class Wins(NamedTuple):
    """Each positive's share of negatives beaten `[m]`, and of each negative of positives that beat it `[n]`."""

    positives: np.ndarray
    negatives: np.ndarray


Case = Sequence[Ranks]
"""The runs of one row on one test part."""


def p_value(ours: Sequence[Case], theirs: Sequence[Case]) -> float | None:
    """Two-sided, for the mean over cases; None where test rows were not the same.

    Cases with other labels (other positive classes) are taken as independent.
    """
    differences, variances = [], []
    for first, second in zip(_merged(ours), _merged(theirs), strict=True):
        if not np.array_equal(first[0].labels, second[0].labels):
            return None
        one, two = mean_wins(first), mean_wins(second)
        gain = Wins(one.positives - two.positives, one.negatives - two.negatives)
        differences.append(float(gain.positives.mean()))
        # The largest variance that is possible stands in for none, as in `delong_test`.
        variances.append(_variance(gain) or 1 / min(map(len, gain)))
    error = math.sqrt(sum(variances)) / len(variances)
    return math.erfc(abs(float(np.mean(differences))) / error / math.sqrt(2))


def _variance(gain: Wins) -> float:
    return float(sum(np.var(part, ddof=1) / len(part) for part in gain))


def mean_wins(runs: Case) -> Wins:
    """The mean over runs."""
    found = [wins(run) for run in runs]
    return Wins(*(np.mean(parts, axis=0) for parts in zip(*found, strict=True)))


def wins(run: Ranks) -> Wins:
    """Shares of the other class below and above each row; a tie counts one half."""
    positives, negatives = (np.sort(run.ranks[run.labels == label]) for label in (1, 0))
    mine, others = run.ranks[run.labels == 1], run.ranks[run.labels == 0]
    below = np.searchsorted(negatives, mine, "left") + np.searchsorted(negatives, mine, "right")
    above = np.searchsorted(positives, others, "left") + np.searchsorted(positives, others, "right")
    return Wins(below / (2 * len(negatives)), 1 - above / (2 * len(positives)))


def _merged(cases: Sequence[Case]) -> list[list[Ranks]]:
    """Cases on the same test rows are repetitions of one."""
    found: list[list[Ranks]] = []
    for case in cases:
        same = [mine for mine in found if np.array_equal(mine[0].labels, case[0].labels)]
        if same:
            same[0].extend(case)
        else:
            found.append(list(case))
    return found
