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


Case = Sequence[PairShares]
"""The runs of one row on one version of the data."""

CasePair = tuple[Case, Case]
"""The runs of both rows on one version of the data."""


class Variance(NamedTuple):
    """A variance and its degrees of freedom; test examples are so many that their variance counts as known."""

    value: float
    freedom: float = math.inf


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
    for first_run, second_run in ((pairs[0][0][0], pairs[0][1][0]) for pairs in parts):
        smallest_class = min(len(first_run.positives), len(first_run.negatives))
        if not np.array_equal(first_run.labels, second_run.labels) or smallest_class < FEWEST_EXAMPLES:
            return None
    count = len(parts)
    differences = [
        float(np.mean([_mean_auc(method) - _mean_auc(baseline) for method, baseline in pairs])) for pairs in parts
    ]
    if same_examples:
        test_variance = _shared_test_variance(parts)
    else:
        test_variance = sum(map(_test_variance, parts)) * (1 + (count - 1) * overlap)
    training_variances = [variance for pairs in parts for variance in _training_variances(pairs)]
    within_cases = _test_mean(differences, [Variance(test_variance), *training_variances])
    if count == 1 or not np.ptp(differences):
        return within_cases
    # Differences that share examples vary less among each other than their mean does.
    shared = 0.0 if same_examples else overlap
    spread = float(np.var(differences, ddof=1)) * (1 + (count - 1) * shared) / (1 - shared)
    between_cases = _test_mean(differences, [Variance(spread * count, count - 1)])
    half_width = max(within_cases.half_width, between_cases.half_width)
    return Difference(within_cases.value, half_width, max(within_cases.p_value, between_cases.p_value))


def _test_mean(differences: Sequence[float], variances: Sequence[Variance]) -> Difference:
    """Student's test of the mean difference, given the variances that add up to the variance of the sum."""
    total = sum(variance.value for variance in variances)
    # Welch and Satterthwaite: a variance that comes from a few runs is itself uncertain.
    uncertainty = sum(variance.value**2 / variance.freedom for variance in variances)
    freedom = total**2 / uncertainty if uncertainty else math.inf
    error = math.sqrt(total)
    p_value = 2 * float(t.sf(abs(sum(differences)) / error, freedom))
    half_width = float(t.ppf(1 - SIGNIFICANCE_LEVEL / 2, freedom)) * error / len(differences)
    return Difference(sum(differences) / len(differences), half_width, p_value)


def _group_by_test_part(first: Sequence[Case], second: Sequence[Case]) -> list[list[CasePair]]:
    """The cases of both rows side by side; those with the same test labels are grouped."""
    groups: list[list[CasePair]] = []
    for pair in zip(first, second, strict=True):
        for group in groups:
            if np.array_equal(group[0][0][0].labels, pair[0][0].labels):
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


def _training_variances(pairs: Sequence[CasePair]) -> list[Variance]:
    """How training varies the difference on one test part: over versions of the data, or else over each row's seeds."""
    if len(pairs) > 1:
        samples = [[_mean_auc(method) - _mean_auc(baseline) for method, baseline in pairs]]
    else:
        samples = [[run.auc for run in runs] for runs in pairs[0] if len(runs) > 1]
    return [Variance(float(np.var(sample, ddof=1)) / len(sample), len(sample) - 1) for sample in samples]


def _test_variance(pairs: Sequence[CasePair]) -> float:
    """DeLong's variance of the difference on one test part; a variance of zero becomes the largest possible one."""
    gains = _mean_gains(pairs)
    return float(sum(np.var(gain, ddof=1) / len(gain) for gain in gains)) or 1 / min(map(len, gains))


def _shared_test_variance(parts: Sequence[Sequence[CasePair]]) -> float:
    """The variance of the sum of differences where all parts have the same examples, example by example."""
    total = np.zeros(len(parts[0][0][0][0].labels))
    for pairs in parts:
        labels = pairs[0][0][0].labels
        for label, gain in zip((1, 0), _mean_gains(pairs), strict=True):
            total[labels == label] += (gain - gain.mean()) / len(gain)
    return float((total**2).sum()) or 1 / min(len(gain) for pairs in parts for gain in _mean_gains(pairs))


def _mean_gains(pairs: Sequence[CasePair]) -> list[np.ndarray]:
    """How much more of its pairs the first row ranks correctly, for every positive and for every negative."""
    first, second = ([run for pair in pairs for run in pair[side]] for side in (0, 1))
    # A run's first two arrays are the shares of its positives and of its negatives.
    return [np.mean([run[k] for run in first], axis=0) - np.mean([run[k] for run in second], axis=0) for k in (0, 1)]


def _mean_auc(runs: Case) -> float:
    return float(np.mean([run.auc for run in runs]))
