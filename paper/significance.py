"""DeLong's paired test between two rows of a table, each the mean of several runs.

For every test example, a run has a share of the other class that it ranks correctly. These shares are averaged over a
row's runs before DeLong's variance is taken, so that the test is about mean AUCs. The variance of training is added:
over seeds, or over repetitions with other data, whose differences are paired. Where the cases of a column have
different test parts, their differences must also pass a t-test over cases, which covers everything that changes from
case to case. With one run for each row this is `fedauc.metrics.delong_test`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, t

from paper.records import Ranks

SIGNIFICANCE_LEVEL = 0.05

FEWEST_EXAMPLES = 20
"""Test examples of each class that a test needs: its variance is an estimate, and its normal distribution a limit."""


class PairShares(NamedTuple):
    """The share of correctly ranked pairs of each positive `[m]` and each negative `[n]`, and all labels `[m + n]`."""

    positives: np.ndarray
    negatives: np.ndarray
    labels: np.ndarray

    @property
    def auc(self) -> float:
        """The run's AUC on these examples."""
        return float(self.positives.mean())


class Difference(NamedTuple):
    """A difference of two mean AUCs: half the width of its 95 % confidence interval, and its two-sided p-value."""

    value: float
    half_width: float
    p_value: float


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Holm's correction of p-values that belong to one family of tests, in their order.

    The k-th smallest of n is multiplied by n - k + 1, and is at least as large as the corrected smaller ones. Declaring
    those below α significant makes one or more false discoveries with probability α at most, whatever depends on what.

    >>> correct_p_values([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda position: p_values[position])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[position]))
        corrected[position] = largest
    return corrected


Case = Sequence[PairShares]
"""The runs of one row on one version of the data."""

Variance = tuple[float, float]
"""A variance and its degrees of freedom; test examples are so many that their variance counts as known."""


def compute_pair_shares(run: Ranks) -> PairShares:
    """The share of correctly ranked pairs for every test example; a tie counts one half."""
    is_positive = run.labels == 1
    overall, positives, negatives = map(rankdata, (run.ranks, run.ranks[is_positive], run.ranks[~is_positive]))
    # A midrank among all less the midrank in the own class counts the other class below, ties as one half.
    below_positives = (overall[is_positive] - positives) / len(negatives)
    below_negatives = (overall[~is_positive] - negatives) / len(positives)
    return PairShares(below_positives, 1 - below_negatives, run.labels)


def compare_rows(
    first: Sequence[Case], second: Sequence[Case], overlap: float = 0.0, same_examples: bool = False
) -> Difference | None:
    """The difference between two rows' mean AUCs over cases; None where test parts differ or are too small.

    Cases with different labels are different test parts. Any two of them share a fraction `overlap` of their examples,
    and their differences are taken to have that correlation, which is the highest possible. With `same_examples`, they
    are the same examples in the same order under different labels, so that what each adds to every case is known.
    """
    parts = _group_by_test_part(first, second)
    for pairs in parts:
        run, other = pairs[0][0][0], pairs[0][1][0]
        if not np.array_equal(run.labels, other.labels) or min(map(len, run[:2])) < FEWEST_EXAMPLES:
            return None
    count, training_variances, differences = len(parts), list[Variance](), list[float]()
    for pairs in parts:
        paired = [_mean_auc(method) - _mean_auc(baseline) for method, baseline in pairs]
        differences.append(float(np.mean(paired)))
        # Training varies the difference over versions of the data, or else over each row's seeds.
        samples = [paired] if len(pairs) > 1 else [[run.auc for run in runs] for runs in pairs[0] if len(runs) > 1]
        training_variances += [(float(np.var(sample, ddof=1)) / len(sample), len(sample) - 1) for sample in samples]
    test_variance = (_test_variance(parts, overlap, same_examples), math.inf)
    within_cases = _test_mean(differences, [test_variance, *training_variances])
    if count == 1 or not np.ptp(differences):
        return within_cases
    # Differences that share examples vary less among each other than their mean does.
    shared = 0.0 if same_examples else overlap
    spread = float(np.var(differences, ddof=1)) * (1 + (count - 1) * shared) / (1 - shared)
    between_cases = _test_mean(differences, [(spread * count, count - 1)])
    half_width = max(within_cases.half_width, between_cases.half_width)
    return Difference(within_cases.value, half_width, max(within_cases.p_value, between_cases.p_value))


def _group_by_test_part(first: Sequence[Case], second: Sequence[Case]) -> list[list[tuple[Case, Case]]]:
    """The cases of both rows side by side; those with the same test labels are grouped."""
    groups: dict[bytes, list[tuple[Case, Case]]] = {}
    for pair in zip(first, second, strict=True):
        groups.setdefault(pair[0][0].labels.tobytes(), []).append(pair)
    return list(groups.values())


def _test_mean(differences: Sequence[float], variances: Sequence[Variance]) -> Difference:
    """Student's test of the mean difference, given the variances that add up to the variance of the sum."""
    total = sum(variance for variance, _ in variances)
    # Welch and Satterthwaite: a variance that comes from a few runs is itself uncertain.
    uncertainty = sum(variance**2 / freedom for variance, freedom in variances)
    freedom = total**2 / uncertainty if uncertainty else math.inf
    error = math.sqrt(total)
    p_value = 2 * float(t.sf(abs(sum(differences)) / error, freedom))
    half_width = float(t.ppf(1 - SIGNIFICANCE_LEVEL / 2, freedom)) * error / len(differences)
    return Difference(sum(differences) / len(differences), half_width, p_value)


def _test_variance(parts: Sequence[Sequence[tuple[Case, Case]]], overlap: float, same_examples: bool) -> float:
    """DeLong's variance of the sum of differences; a variance of zero becomes the largest possible one.

    It is zero where both rows rank every test example alike, for instance without an error; that this is so for other
    examples too cannot be known. A row that has the runs of the other is not tested at all (`findings.list_contrasts`).
    """
    gains = [_mean_gains(pairs) for pairs in parts]
    if not same_examples:
        variances = [
            sum(np.var(gain, ddof=1) / len(gain) for gain in part) or 1 / min(map(len, part)) for part in gains
        ]
        return float(sum(variances)) * (1 + (len(parts) - 1) * overlap)
    added = np.zeros(len(parts[0][0][0][0].labels))
    for pairs, part in zip(parts, gains, strict=True):
        for label, gain in zip((1, 0), part, strict=True):
            added[pairs[0][0][0].labels == label] += (gain - gain.mean()) / len(gain)
    return float((added**2).sum()) or 1 / min(len(gain) for part in gains for gain in part)


def _mean_gains(pairs: Sequence[tuple[Case, Case]]) -> list[np.ndarray]:
    """How much more of its pairs the first row ranks correctly, for every positive and for every negative."""
    first, second = ([run for pair in pairs for run in pair[side]] for side in (0, 1))
    # A run's first two arrays are the shares of its positives and of its negatives.
    return [np.mean([run[k] for run in first], axis=0) - np.mean([run[k] for run in second], axis=0) for k in (0, 1)]


def _mean_auc(runs: Case) -> float:
    return float(np.mean([run.auc for run in runs]))
