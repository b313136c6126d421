"""Private score histograms: the plain ones where nothing is clipped, sensitivity by removing clients, and the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedauc.federation.evaluation import SCORE_BINS, count_score_bins
from fedauc.metrics import delong_interval
from fedauc.metrics.histogram_auc import choose_bins, histogram_auc, merge_bins
from fedauc.privacy.evaluation_histograms import FINE_BINS, clipped_histogram, private_histogram

CLIENTS = 25


def draw_rows(rows: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, labels and clients; the first clients are much larger than the last ones."""
    generator = np.random.default_rng(seed)
    labels = (generator.random(rows) < 0.2).astype(np.int64)
    scores = generator.normal(size=rows) * 2 + 2 * labels
    return scores, labels, (CLIENTS * generator.random(rows) ** 3).astype(np.int64)


def twin_histogram(
    scores: np.ndarray, labels: np.ndarray, client_of_row: np.ndarray, bins: int, max_norm: float
) -> np.ndarray:
    """The sum of clipped histograms, client by client, by counting rows between the edges of the bins."""
    total = np.zeros((2, bins))
    mapped = (scores / (1 + np.abs(scores)) + 1) / 2
    for client in np.unique(client_of_row):
        counts = np.zeros((2, bins))
        for label in (0, 1):
            chosen = mapped[(client_of_row == client) & (labels == label)]
            counts[label] = np.histogram(chosen, bins=np.arange(bins + 1) / bins)[0]
        total += counts * min(1.0, max_norm / float(np.linalg.norm(counts)))
    return total


@pytest.mark.parametrize("bins", [1, 2, 32, SCORE_BINS])
def test_without_clipping_and_noise_it_is_the_plain_histogram(bins: int) -> None:
    scores, labels, client_of_row = draw_rows()
    counts, noise = private_histogram(scores, labels, client_of_row, CLIENTS, bins, 1e6, 0.0, np.empty)
    plain = count_score_bins(torch.from_numpy(scores), torch.from_numpy(labels)).numpy()
    assert noise == 0
    assert np.array_equal(counts, merge_bins(plain, bins))


def test_the_bins_are_those_of_the_evaluation_without_noise() -> None:
    assert FINE_BINS == SCORE_BINS


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 40.0])
def test_clients_are_clipped_one_by_one(max_norm: float) -> None:
    scores, labels, client_of_row = draw_rows()
    counts = clipped_histogram(scores, labels, client_of_row, CLIENTS, 16, max_norm)
    assert counts == pytest.approx(twin_histogram(scores, labels, client_of_row, 16, max_norm), abs=1e-9)
    unclipped = clipped_histogram(scores, labels, client_of_row, CLIENTS, 16, 1e6)
    assert counts.sum() < unclipped.sum()


@pytest.mark.parametrize("bins", [1, 16, 256])
@pytest.mark.parametrize("max_norm", [1.0, 12.0, 300.0])
def test_no_client_moves_the_histogram_by_more_than_its_norm(bins: int, max_norm: float) -> None:
    scores, labels, client_of_row = draw_rows()
    released = clipped_histogram(scores, labels, client_of_row, CLIENTS, bins, max_norm)
    changes = []
    for client in range(CLIENTS):
        others = client_of_row != client
        without = clipped_histogram(scores[others], labels[others], client_of_row[others], CLIENTS, bins, max_norm)
        changes.append(np.linalg.norm(released - without) / max_norm)
    assert max(changes) <= 1 + 1e-12
    # Where the largest client is clipped, it uses all of the bound.
    if max_norm < 100:
        assert changes[0] == pytest.approx(1, rel=1e-9)


def test_sites_that_clip_their_own_histograms_give_the_same_sum() -> None:
    scores, labels, client_of_row = draw_rows()
    summed = np.zeros((2, 32))
    for client in range(CLIENTS):
        rows = client_of_row == client
        summed += clipped_histogram(scores[rows], labels[rows], np.zeros(rows.sum(), dtype=np.int64), 1, 32, 9.0)
    assert clipped_histogram(scores, labels, client_of_row, CLIENTS, 32, 9.0) == pytest.approx(summed, abs=1e-9)


def test_the_noise_has_the_stated_deviation() -> None:
    scores, labels, client_of_row = draw_rows()
    draw = np.random.default_rng(7).standard_normal
    exact = clipped_histogram(scores, labels, client_of_row, CLIENTS, 512, 9.0)
    counts, noise = private_histogram(scores, labels, client_of_row, CLIENTS, 512, 9.0, 1.5, draw)
    residual = counts - exact
    assert noise == 1.5 * 9.0
    assert residual.std() == pytest.approx(noise, rel=0.1)
    assert abs(residual.mean()) < 4 * noise / math.sqrt(1024)
    assert abs(np.corrcoef(residual)[0, 1]) < 4 / math.sqrt(512)


def test_an_infinite_multiplier_releases_nothing() -> None:
    scores, labels, client_of_row = draw_rows()
    counts, noise = private_histogram(scores, labels, client_of_row, CLIENTS, 8, 9.0, math.inf, np.empty)
    assert not counts.any()
    assert noise == math.inf
    assert histogram_auc(counts, noise) is None


def test_the_interval_of_a_private_evaluation_covers_the_auc() -> None:
    """From rows to the interval: 400 equal clients, whose histograms are not clipped, against the AUC of the rows."""
    covered = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        labels = (np.arange(20000) % 10 == 0).astype(np.int64)
        scores = generator.normal(size=20000) + 1.5 * labels
        client_of_row = np.arange(20000) // 50
        # 50 rows: at most a third in one of 16 bins in nearly every client.
        bins = choose_bins(1.5 * 30, 2000, 18000)
        counts, noise = private_histogram(
            scores, labels, client_of_row, 400, bins, 30.0, 1.5, generator.standard_normal
        )
        result = histogram_auc(counts, noise)
        assert result is not None
        exact = delong_interval(labels, scores)
        assert result.high - result.low > exact.high - exact.low
        binned = histogram_auc(clipped_histogram(scores, labels, client_of_row, 400, bins, 1e9))
        assert binned is not None
        covered += result.low <= binned.estimate <= result.high
    # The rows are the same, so only noise separates the two: a 95 % interval covers 38 of 40, and at least 33.
    assert covered >= 33


def test_infinite_scores_fall_into_the_outermost_bins() -> None:
    counts = clipped_histogram(np.array([-np.inf, np.inf]), np.array([0, 1]), np.array([0, 0]), 1, 4, 9.0)
    assert counts.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_no_rows_give_empty_counts() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert clipped_histogram(nothing, nothing, nothing, 3, 4, 9.0).tolist() == [[0] * 4] * 2


def test_errors_name_the_value_and_the_remedy() -> None:
    scores, labels, client_of_row = np.array([0.5, 1.5]), np.array([0, 1]), np.array([0, 1])
    with pytest.raises(ValueError, match="bins is 3; it must divide 4096"):
        clipped_histogram(scores, labels, client_of_row, 2, 3, 9.0)
    for max_norm in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"max_norm is {max_norm}; it must be a number above 0"):
            clipped_histogram(scores, labels, client_of_row, 2, 4, max_norm)
    with pytest.raises(ValueError, match="multiplier is -1; it must be at least 0"):
        private_histogram(scores, labels, client_of_row, 2, 4, 9.0, -1, np.zeros)
    with pytest.raises(ValueError, match=r"scores have shape \(2,\), labels \(1,\), client_of_row \(2,\)"):
        clipped_histogram(scores, labels[1:], client_of_row, 2, 4, 9.0)
    with pytest.raises(ValueError, match="scores hold NaN, first in row 1"):
        clipped_histogram(np.array([0.5, math.nan]), labels, client_of_row, 2, 4, 9.0)
    with pytest.raises(ValueError, match="labels hold 2; they must be 0 or 1"):
        clipped_histogram(scores, np.array([0, 2]), client_of_row, 2, 4, 9.0)
    with pytest.raises(ValueError, match="client_of_row holds 0 to 1; it must be at least 0 and below clients = 1"):
        clipped_histogram(scores, labels, client_of_row, 1, 4, 9.0)
