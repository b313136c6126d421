"""The metrics that a configuration can name: against scikit-learn and numpy twins, as texts, and as columns."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score, roc_curve

from fedauc.metrics import (
    find_metrics,
    normalized_discounted_gain,
    parse_metric,
    parse_metrics,
    partial_auc,
    precision_at_top,
    two_way_partial_auc,
)

# Rows, share of positives, distinct scores (None: no ties).
CASES = [(200, 0.5, None), (2000, 0.01, None), (300, 0.97, None), (40, 0.5, None), (200, 0.5, 5), (2000, 0.01, 3)]


def draw_rows(rows: int, share: float, levels: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Labels with two or more of each class, and scores that lean the right way, cut into `levels` if given."""
    generator = np.random.default_rng(rows)
    labels = (generator.random(rows) < share).astype(np.int64)
    labels[:4] = [0, 1, 0, 1]
    scores = generator.normal(size=rows) + labels
    return labels, scores if levels is None else np.floor(stats.norm.cdf(scores) * levels)


def twin_two_way(labels: np.ndarray, scores: np.ndarray, min_tpr: float, max_fpr: float) -> float:
    """The area on a fine grid of false positive rates, from scikit-learn's curve."""
    rates, hits, _ = roc_curve(labels, scores, drop_intermediate=False)
    grid = (np.arange(200_000) + 0.5) / 200_000 * max_fpr
    heights = np.maximum(np.interp(grid, rates, hits) - min_tpr, 0)
    return float(heights.mean() / (1 - min_tpr))


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
def test_every_metric_agrees_with_scikit_learn(rows: int, share: float, levels: int | None) -> None:
    labels, scores = draw_rows(rows, share, levels)
    rates, hits, _ = roc_curve(labels, scores, drop_intermediate=False)
    expected = {
        "auc": roc_auc_score(labels, scores),
        "ap": average_precision_score(labels, scores),
        "pauc@0.05": roc_auc_score(labels, scores, max_fpr=0.05),
        "recall@0.01": hits[rates <= 0.01].max(),
        "recall@0.3": hits[rates <= 0.3].max(),
        "ndcg@0": ndcg_score(labels[None], scores[None]),
        "ndcg@7": ndcg_score(labels[None], scores[None], k=7),
        "ndcg@100": ndcg_score(labels[None], scores[None], k=100),
    }
    for text, value in expected.items():
        assert parse_metric(text).measure(labels, scores).value == pytest.approx(value, abs=1e-12), text


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
@pytest.mark.parametrize(("min_tpr", "max_fpr"), [(0.5, 0.1), (0.2, 0.7), (0.9, 0.3), (0.0, 0.4), (0.3, 1.0)])
def test_the_two_way_area_is_the_area_on_a_fine_grid(
    rows: int, share: float, levels: int | None, min_tpr: float, max_fpr: float
) -> None:
    """The grid's error is at most its step times the rise of the curve."""
    labels, scores = draw_rows(rows, share, levels)
    expected = twin_two_way(labels, scores, min_tpr, max_fpr)
    assert two_way_partial_auc(labels, scores, min_tpr, max_fpr) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_without_ties_the_two_way_area_counts_pairs(seed: int) -> None:
    """Of 20 positives the lowest 15 count and of 40 negatives the highest 10, at TPR .25 and FPR .25."""
    generator = np.random.default_rng(seed)
    labels = np.repeat([1, 0], [20, 40])
    scores = generator.normal(size=60) + labels
    positives, negatives = np.sort(scores[:20])[:15], np.sort(scores[20:])[-10:]
    expected = (positives[:, None] > negatives[None, :]).mean()
    assert two_way_partial_auc(labels, scores, 0.25, 0.25) == pytest.approx(expected, abs=1e-12)


def test_the_two_way_area_without_a_lower_bound_is_the_one_way_area() -> None:
    labels, scores = draw_rows(200, 0.5, 5)
    one_way = partial_auc(labels, scores, 0.3, standardized=False) / 0.3
    assert two_way_partial_auc(labels, scores, 0.0, 0.3) == pytest.approx(one_way, abs=1e-15)


@pytest.mark.parametrize(("min_tpr", "max_fpr"), [(0.2, 0.6), (0.5, 0.5), (0.8, 0.1)])
def test_a_constant_score_has_the_two_way_area_of_chance(min_tpr: float, max_fpr: float) -> None:
    """Its curve is the diagonal, of which a triangle with legs f - t lies in the rectangle, if f > t."""
    expected = max(max_fpr - min_tpr, 0) ** 2 / 2 / (max_fpr * (1 - min_tpr))
    assert two_way_partial_auc([0, 0, 1, 1], [3, 3, 3, 3], min_tpr, max_fpr) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("rows", "share", "levels"), CASES)
@pytest.mark.parametrize("top", [1, 7, 100, 5000])
def test_the_precision_is_the_mean_over_the_orders_of_tied_rows(
    rows: int, share: float, levels: int | None, top: int
) -> None:
    """Rows above the score of the last rank all count; of those tied with it, as many as there is room for."""
    labels, scores = draw_rows(rows, share, levels)
    counted = min(top, rows)
    last = np.sort(scores)[::-1][counted - 1]
    above, tied = scores > last, scores == last
    hits = labels[above].sum() + (counted - above.sum()) * labels[tied].mean()
    assert precision_at_top(labels, scores, top) == pytest.approx(hits / counted, abs=1e-12)


def test_numbers_of_ranks_below_the_bound_are_refused() -> None:
    with pytest.raises(ValueError, match="top is -1; it must be at least 0: use 0 for all ranks"):
        normalized_discounted_gain([0, 1], [0, 1], top=-1)
    with pytest.raises(ValueError, match="top is 0; it must be at least 1: raise top"):
        precision_at_top([0, 1], [0, 1], top=0)


def test_a_metric_is_its_text() -> None:
    for text in ("auc", "ap", "pauc@0.05", "tpauc@0.5:0.1", "recall@0", "ndcg@10", "precision@5"):
        assert parse_metric(text).text == text
    assert parse_metric("tpauc@0.6").text == "tpauc@0.6:0.5"
    names = {"auc", "ap", "pauc", "tpauc", "recall", "ndcg", "precision", "ovr-auc", "class-auc"}
    assert {parse_metric(name).name for name in find_metrics()} == names


def test_the_default_columns_are_those_of_every_old_record() -> None:
    columns = [metric.columns for metric in parse_metrics(("auc", "ap", "pauc@0.1"))]
    assert columns == [("auc", "low", "high"), ("average_precision",), ("pauc@0.1",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "acu",
            "unknown metric 'acu': did you mean 'auc'? known: ap, auc, class-auc, ndcg, ovr-auc, pauc, precision, "
            "recall, tpauc",
        ),
        ("auc@0.1", "metric 'auc@0.1' has 1 argument; auc takes none: write auc"),
        ("pauc@0.1:0.2", "metric 'pauc@0.1:0.2' has 2 arguments; pauc takes 1 (max_fpr): write pauc@0.05"),
        ("pauc@", "metric 'pauc@' has max_fpr ''; it must be a number: write pauc@0.05"),
        ("pauc@0", "metric 'pauc@0': max_fpr is 0.0; it must be a number above 0 and at most 1: raise max_fpr"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_metric(text)
    assert str(caught.value) == message


def test_a_list_of_metrics_has_each_once() -> None:
    with pytest.raises(ValueError, match="metrics is empty; name at least 1, such as auc,ap"):
        parse_metrics(())
    with pytest.raises(ValueError, match=r"metrics lists 'pauc@0\.05' 2 times; list it once"):
        parse_metrics(("pauc", "pauc@0.05"))
