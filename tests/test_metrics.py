"""Metrics against scikit-learn, against numpy twins that look at every pair, and against simulated truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from fedauc import metrics

# Rows, share of positives, distinct scores: balanced, rare positives, rare negatives, few rows; without and with ties.
CASES = [(200, 0.5, None), (2000, 0.01, None), (300, 0.97, None), (12, 0.4, None), (200, 0.5, 5), (2000, 0.01, 3)]


def draw_rows(rows: int, share: float, levels: int | None, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels with two or more of each class, and scores that lean the right way, cut into `levels` if given."""
    generator = np.random.default_rng([seed, rows])
    labels = (generator.random(rows) < share).astype(np.int64)
    labels[:4] = [0, 1, 0, 1]
    scores = generator.normal(size=rows) + labels
    if levels is not None:
        scores = np.floor(stats.norm.cdf(scores) * levels)
    return labels, scores


def twin_wins(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Every pair's wins `[m, n]`: 1 if the positive is above the negative, 1/2 if tied."""
    gap = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return np.asarray((gap > 0) + 0.5 * (gap == 0))


def twin_covariance(labels: np.ndarray, *scorers: np.ndarray) -> np.ndarray:
    """DeLong's covariance of several AUCs from the placement values of every row: S10 / m + S01 / n."""
    wins = np.stack([twin_wins(labels, scores) for scores in scorers])
    m, n = wins.shape[1:]
    return np.asarray(np.cov(wins.mean(2)) / m + np.cov(wins.mean(1)) / n)


def twin_logit_interval(area: float, error: float) -> list[float]:
    """The 95 % interval from scipy's quantile, logit and expit."""
    reach = stats.norm.ppf(0.975) * error / (area * (1 - area))
    return [float(stats.logistic.cdf(stats.logistic.ppf(area) + side * reach)) for side in (-1, 1)]


# -------------------------------------------------------------------------------------------------- areas under curves


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_scikit_learn(rows: int, share: float, levels: int | None, seed: int) -> None:
    labels, scores = draw_rows(rows, share, levels, seed)
    assert metrics.auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert metrics.average_precision(labels, scores) == pytest.approx(
        average_precision_score(labels, scores), abs=1e-12
    )
    # From a sliver of the curve narrower than one negative to the whole of it.
    for bound in (0.001, 0.05, 0.3, 0.5, 1.0):
        expected = roc_auc_score(labels, scores, max_fpr=bound)
        assert metrics.partial_auc(labels, scores, bound) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_auc_by_ranks_is_auc_by_pairs(rows: int, share: float, levels: int | None) -> None:
    labels, scores = draw_rows(rows, share, levels)
    # Both count whole halves exactly; only the last division rounds.
    assert metrics.auc(labels, scores) == pytest.approx(twin_wins(labels, scores).mean(), rel=1e-15)


@pytest.mark.parametrize("rising", [np.exp, np.arctan, lambda s: s**3 - 7, lambda s: 1e6 * s])
@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_rising_maps_change_nothing(
    rows: int, share: float, levels: int | None, rising: Callable[[np.ndarray], np.ndarray]
) -> None:
    labels, scores = draw_rows(rows, share, levels)
    mapped = rising(scores)
    assert metrics.auc(labels, mapped) == metrics.auc(labels, scores)
    assert metrics.delong_interval(labels, mapped) == metrics.delong_interval(labels, scores)
    # A falling map turns every win into a loss and keeps ties.
    assert metrics.auc(labels, -mapped) == pytest.approx(1 - metrics.auc(labels, scores), abs=1e-15)


def test_raw_partial_auc_is_the_area_by_hand() -> None:
    # The curve runs (0, 0), (0, 1/2), (1/2, 1), (1, 1): up to 1/4 a trapezoid of heights 1/2 and 3/4.
    labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.4, 0.8]
    assert metrics.partial_auc(labels, scores, 0.25, standardized=False) == pytest.approx(0.25 * 0.625, rel=1e-15)
    assert metrics.partial_auc(labels, scores, 1.0, standardized=False) == metrics.auc(labels, scores)


@pytest.mark.parametrize(
    ("scores", "area", "precision"),
    [
        ([0, 0, 1, 1], 1.0, 1.0),
        ([1, 1, 0, 0], 0.0, 0.5),  # both positives come last: all the recall at a precision of 2/4
        ([3, 3, 3, 3], 0.5, 0.5),
        ([-np.inf, 0, 0, np.inf], 0.875, 5 / 6),  # one tie in four pairs; 1/2 recall at 1, 1/2 at 2/3
        ([-0.0, 0.0, 0.0, -0.0], 0.5, 0.5),  # the two zeros are one number
    ],
)
def test_known_rankings(scores: list[float], area: float, precision: float) -> None:
    labels = [0, 0, 1, 1]
    assert metrics.auc(labels, scores) == area
    assert metrics.average_precision(labels, scores) == pytest.approx(precision, rel=1e-15)
    assert metrics.partial_auc(labels, scores, 1.0) == pytest.approx(area, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
def test_takes_tensors_of_any_type_with_gradients(dtype: torch.dtype, kind: torch.dtype) -> None:
    labels = torch.tensor([0, 0, 1, 1]).to(kind)
    # Eighths are exact in every one of these types.
    scores = torch.tensor([0.125, 0.5, 0.5, 0.75], dtype=dtype, requires_grad=True)
    assert metrics.auc(labels, scores) == 0.875
    assert metrics.group_auc(labels, scores, torch.tensor([1, 0, 0, 1])) == {0: 0.5, 1: 1.0}
    assert metrics.pair_auc(scores[:, None], labels) == metrics.pair_auc([[0.125], [0.5], [0.5], [0.75]], [0, 0, 1, 1])


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("as_key", [int, lambda group: f"state {group:02d}"])
def test_group_auc_is_the_auc_of_each_group(levels: int | None, as_key: Callable[[int], Any]) -> None:
    labels, scores = draw_rows(400, 0.2, levels)
    # 60 groups of about 7 rows with 1/5 positives: some groups lack a class.
    groups = np.array([as_key(int(group)) for group in np.random.default_rng(1).integers(0, 60, size=400)])
    result = metrics.group_auc(labels, scores, groups)
    assert list(result) == sorted(set(groups.tolist()))
    assert {type(key) for key in result} == {type(as_key(0))}
    assert None in result.values()
    for key, area in result.items():
        inside = groups == key
        wins = twin_wins(labels[inside], scores[inside])
        assert area == (pytest.approx(wins.mean(), rel=1e-15) if wins.size else None)


def test_one_group_is_the_auc_and_no_rows_are_no_groups() -> None:
    labels, scores = draw_rows(200, 0.5, 5)
    assert metrics.group_auc(labels, scores, np.full(200, -3)) == {-3: metrics.auc(labels, scores)}
    assert metrics.group_auc([], [], []) == {}


# ------------------------------------------------------------------------------------------------------- uncertainty


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_delong_interval_is_the_one_from_placements(rows: int, share: float, levels: int | None) -> None:
    labels, scores = draw_rows(rows, share, levels)
    result = metrics.delong_interval(labels, scores)
    error = math.sqrt(twin_covariance(labels, scores).item())
    assert result.estimate == metrics.auc(labels, scores)
    assert result.error == pytest.approx(error, rel=1e-12)
    assert [result.low, result.high] == pytest.approx(twin_logit_interval(result.estimate, error), rel=1e-10)
    wide = metrics.delong_interval(labels, scores, level=0.999999)
    assert 0 <= wide.low < result.low < result.estimate < result.high < wide.high <= 1


def test_delong_error_is_the_bootstrap_error() -> None:
    labels, scores = draw_rows(500, 0.4, None)
    wins = twin_wins(labels, scores)
    generator = np.random.default_rng(2)
    # How often each row is drawn, 4,000 times over: the bootstrap error is then known to 1 / sqrt(2 * 4000) = 1.1 %.
    ours, theirs = (generator.multinomial(size, np.full(size, 1 / size), size=4000) / size for size in wins.shape)
    areas = np.einsum("bm,mn,bn->b", ours, wins, theirs, optimize=True)
    assert metrics.delong_interval(labels, scores).error == pytest.approx(areas.std(), rel=0.04)


@pytest.mark.parametrize(("shift", "positives", "negatives"), [(0.0, 40, 60), (1.0, 40, 60), (2.0, 100, 300)])
def test_interval_covers_the_true_auc(shift: float, positives: int, negatives: int) -> None:
    # Scores N(shift, 1) against N(0, 1): the gap is N(shift, 2), so the AUC is Phi(shift / sqrt 2).
    truth = stats.norm.cdf(shift / math.sqrt(2))
    labels = np.repeat([1, 0], [positives, negatives])
    scores = np.random.default_rng(3).normal(size=(2000, len(labels))) + shift * labels
    result = [metrics.delong_interval(labels, row) for row in scores]
    covered = np.mean([interval.low <= truth <= interval.high for interval in result])
    # 2,000 sets know a coverage of 95 % to a standard error of 0.5 %.
    assert 0.93 <= covered <= 0.97
    assert np.mean([interval.error for interval in result]) == pytest.approx(
        np.std([interval.estimate for interval in result]), rel=0.06
    )


@pytest.mark.parametrize(("scores", "area"), [(lambda y: y, 1.0), (lambda y: -y, 0.0), (lambda y: 0 * y, 0.5)])
def test_zero_variance_is_not_certainty(scores: Callable[[np.ndarray], np.ndarray], area: float) -> None:
    labels = np.repeat([0, 1], [7, 5])
    result = metrics.delong_interval(labels, scores(labels))
    # Five disjoint pairs of one outcome: at 97.5 % its probability is at least the binomial bound for 5 out of 5.
    sure = stats.binomtest(5, 5).proportion_ci(0.95).low
    assert result.estimate == area
    assert result[1:3] == pytest.approx((sure * area, 1 - sure * (1 - area)), rel=1e-12)
    assert result.error == pytest.approx((result.high - result.low) / 2 / stats.norm.ppf(0.975), rel=1e-12)


def test_separated_classes_cover_the_true_auc() -> None:
    # True AUC Phi(2.4 / sqrt 2) = 0.955: with 4 + 4 rows most sets are separated, where the plain interval is a point.
    truth = stats.norm.cdf(2.4 / math.sqrt(2))
    labels = np.repeat([0, 1], 4)
    scores = np.random.default_rng(4).normal(size=(1000, 8)) + 2.4 * labels
    result = [metrics.delong_interval(labels, row) for row in scores]
    separated = [interval for interval in result if interval.estimate == 1]
    assert len(separated) > 500
    assert all(interval.low <= truth <= interval.high for interval in separated)


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_paired_test_is_the_one_from_the_covariance(rows: int, share: float, levels: int | None) -> None:
    labels, first = draw_rows(rows, share, levels)
    second = first + np.random.default_rng(5).normal(size=rows)
    result = metrics.delong_test(labels, first, second)
    contrast = np.array([1, -1])
    error = math.sqrt(contrast @ twin_covariance(labels, first, second) @ contrast)
    difference = twin_wins(labels, first).mean() - twin_wins(labels, second).mean()
    assert result.difference == pytest.approx(difference, abs=1e-14)
    assert result.error == pytest.approx(error, rel=1e-10)
    assert result.z == pytest.approx(difference / error, rel=1e-9)
    assert result.p_value == pytest.approx(2 * stats.norm.sf(abs(difference / error)), rel=1e-8)
    other = metrics.delong_test(labels, second, first)
    assert (other.difference, other.p_value) == (-result.difference, result.p_value)


def test_p_values_are_uniform_under_the_null() -> None:
    # Two scorers that share a signal and add noise of one law: the same AUC, correlated, never equal.
    generator = np.random.default_rng(6)
    labels = np.repeat([1, 0], [80, 120])
    signal = generator.normal(size=(1000, 1, 200)) + labels
    scorers = signal + generator.normal(size=(1000, 2, 200))
    p_values = [metrics.delong_test(labels, first, second).p_value for first, second in scorers]
    # An error 15 % too large or too small would give 0.0002 or less here.
    assert stats.kstest(p_values, "uniform").pvalue > 0.05
    # 1,000 tests at 5 %: 50 rejections with a standard deviation of 7.
    assert 30 <= sum(p < 0.05 for p in p_values) <= 70


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_equal_rankings_do_not_differ(rows: int, share: float, levels: int | None) -> None:
    labels, scores = draw_rows(rows, share, levels)
    assert metrics.delong_test(labels, scores, scores) == (0.0, 0.0, 0.0, 1.0)
    assert metrics.delong_test(labels, scores, np.exp(scores)) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(("scale", "difference"), [(0, 0.5), (-1, 1.0)])
def test_separation_against_a_constant_or_its_reverse_is_not_certain(scale: int, difference: float) -> None:
    labels = np.repeat([0, 1], [16, 9])
    result = metrics.delong_test(labels, labels, scale * labels)
    # Nine disjoint pairs, differences of at most 1: an error of at most 1 / 3.
    assert result[:3] == pytest.approx((difference, 1 / 3, 3 * difference), rel=1e-15)
    assert result.p_value == pytest.approx(2 * stats.norm.sf(3 * difference), rel=1e-12)


def test_tail_p_values_keep_their_digits() -> None:
    labels, scores = draw_rows(2000, 0.5, None)
    result = metrics.delong_test(labels, scores, -scores)
    # A score against its reverse puts z near 25, where 1 - cdf(z) is 0 in float64.
    assert 0 < result.p_value < 1e-100
    assert result.p_value == pytest.approx(2 * stats.norm.sf(result.z), rel=1e-9, abs=0)


# -------------------------------------------------------------------------------------------------------- embeddings


def twin_pair_auc(points: np.ndarray, labels: np.ndarray) -> float:
    rows, columns = np.triu_indices(len(points), 1)
    distance = np.linalg.norm(points[rows] - points[columns], axis=1)
    return float(roc_auc_score(labels[rows] == labels[columns], -distance))


@pytest.mark.parametrize("classes", [2, 7])
def test_pair_auc_is_the_auc_of_all_pairs(classes: int) -> None:
    generator = np.random.default_rng(7)
    labels = generator.integers(0, classes, size=150)
    points = generator.normal(size=(150, 3)) + labels[:, None]
    assert metrics.pair_auc(points, labels) == pytest.approx(twin_pair_auc(points, labels), abs=1e-12)
    assert metrics.pair_auc(points, labels, limit=150) == metrics.pair_auc(points, labels)


def test_collapsed_embeddings_have_chance_auc() -> None:
    # A point whose coordinates are no binary fractions: any rounding in the distances would break the ties.
    points = np.tile([0.1, 1 / 3, -7.7], (30, 1))
    assert metrics.pair_auc(points, np.arange(30) % 3) == 0.5


def test_pair_auc_of_many_rows_keeps_every_class() -> None:
    # 1,000 rows in the order 0, 1, 0, 1, ... with a class of two rows and a class of one.
    labels = np.arange(1000) % 2
    labels[[100, 900, 500]] = [2, 2, 3]
    points = np.random.default_rng(8).normal(size=(1000, 2)) + labels[:, None]
    counts = np.array([497, 500, 2, 1])
    # Two of each class or its only row are 7 of 107; the other 100 go by what is left, 495 and 498 of 993, cut down.
    keep = [2 + 100 * 495 // 993, 2 + 100 * 498 // 993, 2, 1]
    rows = np.concatenate(
        [np.flatnonzero(labels == c)[np.arange(keep[c]) * counts[c] // keep[c]] for c in range(4)],
    )
    assert len(rows) == 106
    expected = twin_pair_auc(points[rows], labels[rows])
    assert metrics.pair_auc(points, labels, limit=107) == pytest.approx(expected, abs=1e-12)


# ------------------------------------------------------------------------------------------------------------- errors

GOOD = ([0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4])
RANKED: list[Callable[..., Any]] = [
    metrics.auc,
    metrics.average_precision,
    metrics.delong_interval,
    lambda labels, scores: metrics.partial_auc(labels, scores, 0.5),
    lambda labels, scores: metrics.group_auc(labels, scores, GOOD[0]),
    lambda labels, scores: metrics.delong_test(labels, scores, GOOD[1]),
    lambda labels, scores: metrics.delong_test(labels, GOOD[1], scores),
]
BROKEN = [
    (GOOD[0], [0.1, 0.2], "labels have shape (4,), scores (2,); both must be (n,): reshape them"),
    (GOOD[0], [[0.1], [0.2], [0.3], [0.4]], "labels have shape (4,), scores (4, 1); both must be (n,): reshape them"),
    ([-1, 1, -1, 1], GOOD[1], "labels hold -1; they must be 0 or 1: map the positive class to 1"),
    ([0, 1, 0.5, 1], GOOD[1], "labels hold 0.5; they must be 0 or 1: map the positive class to 1"),
    (["no", "yes"] * 2, GOOD[1], "labels hold no; they must be 0 or 1: map the positive class to 1"),
    (GOOD[0], [0, 1, np.nan, np.nan], "scores hold NaN, first in row 2; a rank needs numbers: check the model"),
]
ALONE = "labels hold {} positives and {} negatives; at least {} of each class are needed: add rows of the rarer class"


@pytest.mark.parametrize("function", RANKED)
@pytest.mark.parametrize(("labels", "scores", "message"), BROKEN)
def test_bad_rows_are_refused(function: Callable[..., Any], labels: Any, scores: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        function(labels, scores)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("function", "labels", "message"),
    [
        (metrics.auc, [1, 1, 1, 1], ALONE.format(4, 0, 1)),
        (metrics.average_precision, [0, 0, 0, 0], ALONE.format(0, 4, 1)),
        (lambda labels, scores: metrics.partial_auc(labels, scores, 0.5), [0, 0, 0, 0], ALONE.format(0, 4, 1)),
        (metrics.delong_interval, [0, 0, 1, 0], ALONE.format(1, 3, 2)),
        (lambda labels, scores: metrics.delong_test(labels, scores, scores), [1, 0, 1, 1], ALONE.format(3, 1, 2)),
    ],
)
def test_missing_classes_are_refused(function: Callable[..., Any], labels: list[int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        function(labels, GOOD[1])
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda f=f: metrics.partial_auc(*GOOD, f), f"max_fpr is {f}; it must be above 0 and at most 1: use 1")
            for f in (0, 1.5, math.nan)
        ),
        *(
            (lambda v=v: metrics.delong_interval(*GOOD, v), f"level is {v}; it must lie strictly between 0 and 1: use")
            for v in (0, 1, 95)
        ),
        (lambda: metrics.group_auc(*GOOD, [1, 2]), "groups have shape (2,), scores (4,); give one group per row"),
        (lambda: metrics.pair_auc([1.0, 2.0], [0, 1]), "embeddings have shape (2,), labels (2,); they must be (n, e)"),
        (lambda: metrics.pair_auc([[1.0]], [0, 1]), "embeddings have shape (1, 1), labels (2,); they must be (n, e)"),
        (lambda: metrics.pair_auc([[1.0], [math.inf]], [0, 1]), "embeddings hold NaN or infinite values; distances"),
        (lambda: metrics.pair_auc(np.eye(3), [1, 1, 1]), "labels name 1 classes in 3 rows; pairs need two classes"),
        (lambda: metrics.pair_auc(np.eye(3), [1, 2, 3]), "labels name 3 classes in 3 rows; pairs need two classes"),
        (lambda: metrics.pair_auc(np.eye(9), [0, 1, 2] * 3, 5), "limit is 5; it must be at least 6, two rows per"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
