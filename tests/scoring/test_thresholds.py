"""Operating points are what trying every threshold finds, and their intervals are those of scipy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import binomtest

from fedauc.scoring.thresholds import (
    OperatingPoint,
    choose_by_alerts,
    choose_by_cost,
    choose_by_fpr,
    choose_by_recall,
    list_operating_points,
    wilson_interval,
)


def draw_rows(rows: int, levels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and scores of which many are tied."""
    draws = np.random.default_rng(seed)
    labels = (draws.random(rows) < 0.2).astype(np.int8)
    labels[:2] = 0, 1
    return labels, np.floor(levels * (draws.random(rows) + labels) / 2)


def try_every_threshold(labels: np.ndarray, scores: np.ndarray) -> list[tuple[int, int]]:
    """True and false positives of every threshold, from no alerts to all rows."""
    thresholds = [np.inf, *sorted(set(scores.tolist()), reverse=True)]
    return [
        (int((labels[scores >= threshold] == 1).sum()), int((labels[scores >= threshold] == 0).sum()))
        for threshold in thresholds
    ]


def count_alerts(point: OperatingPoint, labels: np.ndarray, scores: np.ndarray) -> tuple[int, int]:
    """What the threshold itself does on the rows."""
    alerts = scores >= point.threshold
    return int((labels[alerts] == 1).sum()), int((labels[alerts] == 0).sum())


Choice = Callable[[np.ndarray, np.ndarray], OperatingPoint]
CASES: list[tuple[Choice, Callable[[list[tuple[int, int]]], tuple[int, int]]]] = [
    (lambda y, s: choose_by_fpr(y, s, 0.1), lambda all: [c for c in all if c[1] <= 0.1 * all[-1][1]][-1]),
    (lambda y, s: choose_by_recall(y, s, 0.7), lambda all: next(c for c in all if c[0] >= 0.7 * all[-1][0])),
    (
        lambda y, s: choose_by_cost(y, s, 7.0, 2.0),
        lambda all: min(all, key=lambda c: (7 * (all[-1][0] - c[0]) + 2 * c[1], sum(c))),
    ),
    (
        lambda y, s: choose_by_alerts(y, s, 20, 80),
        lambda all: [c for c in all if sum(c) <= 0.25 * sum(all[-1])][-1],
    ),
]


@pytest.mark.parametrize("levels", [3, 20, 10**6])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_rule_finds_what_trying_every_threshold_finds(case: int, levels: int) -> None:
    choose, expect = CASES[case]
    for seed in range(5):
        labels, scores = draw_rows(150, levels, seed)
        point = choose(labels, scores)
        expected = expect(try_every_threshold(labels, scores))
        assert (point.true_positives, point.false_positives) == expected
        assert count_alerts(point, labels, scores) == expected
        assert (point.positives, point.negatives) == (labels.sum(), (labels == 0).sum())


def test_a_share_that_is_reached_exactly_counts() -> None:
    """0.7 times 10 is slightly above 7 in binary floats, and 0.1 times 3 slightly above 0.3."""
    labels, scores = np.repeat([1, 0], 10), np.arange(20, 0, -1.0)
    assert choose_by_recall(labels, scores, 0.7).true_positives == 7
    assert choose_by_fpr(labels, scores, 0.3).false_positives == 3
    assert choose_by_fpr(labels, scores, 1.0).false_positives == 10


def test_the_last_digits_of_a_score_do_not_decide() -> None:
    labels, scores = [0, 0, 1], [1.0, 2.0, 3.0]
    assert choose_by_recall(labels, scores, 1.0).threshold == 2.5


def test_neighbouring_floats_are_told_apart() -> None:
    low = 1.0
    high = np.nextafter(low, 2)
    point = choose_by_recall([0, 1], [low, high], 1.0)
    assert count_alerts(point, np.array([0, 1]), np.array([low, high])) == (1, 0)


def test_without_any_allowed_alert_no_row_is_an_alert() -> None:
    point = choose_by_fpr([0, 1, 0, 1], [9.0, 9.0, 1.0, 2.0], 0.01)
    assert (point.alerts, point.recall.estimate) == (0, 0.0)
    assert point.threshold > 9.0
    assert math.isnan(point.precision.estimate)
    assert point.precision[1:] == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "trials"), [(0, 50), (50, 50), (1, 1000), (7, 20), (1, 1)])
def test_intervals_are_wilsons(successes: int, trials: int) -> None:
    twin = binomtest(successes, trials).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson_interval(successes, trials)[1:], (twin.low, twin.high), atol=1e-12)


def test_an_operating_point_counts_what_happens() -> None:
    labels, scores = np.repeat([1, 0], [10, 190]), np.arange(200, 0, -1.0)
    point = choose_by_alerts(labels, scores, alerts=20, rows=200)
    assert (point.recall.estimate, point.precision.estimate) == (1.0, 0.5)
    assert point.fpr.estimate == pytest.approx(10 / 190)
    assert point.alerts_per_1000.estimate == pytest.approx(100)
    assert point.alerts_per_1000.low < 100 < point.alerts_per_1000.high


def test_an_operating_point_is_read_back_from_json() -> None:
    for point in list_operating_points(*draw_rows(100, 50)):
        text = json.dumps(point.to_document(), allow_nan=False)
        assert OperatingPoint.from_document(json.loads(text)) == point


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda y, s: choose_by_fpr(y, s, 0.0), "fpr is 0.0; it must be above 0 and at most 1"),
        (lambda y, s: choose_by_recall(y, s, 1.5), "recall is 1.5; it must be above 0 and at most 1"),
        (lambda y, s: choose_by_cost(y, s, 0.0, 1.0), "cost_fn is 0.0; it must be a positive number"),
        (lambda y, s: choose_by_cost(y, s, 1.0, math.inf), "cost_fp is inf; it must be a positive number"),
        (lambda y, s: choose_by_alerts(y, s, 30, 20), "alerts is 30 of 20 rows; it must be above 0 and at most"),
    ],
)
def test_a_rule_that_no_threshold_can_follow_is_refused(choose: Choice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(*draw_rows(20, 5))
