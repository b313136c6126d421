"""The AUC from histograms: exact where no pair shares a bin; a pair in one bin counts one half; the bounds hold."""

from __future__ import annotations

import numpy as np
import torch

from fedauc.federation.evaluation import SCORE_BINS, auc_from_histograms, auc_from_scores, count_score_bins
from fedauc.metrics import auc


def test_without_shared_bins_the_auc_is_exact() -> None:
    """Scores 0.1 apart near 0 are 0.1 * 4096 / 2 bins apart."""
    scores, labels = torch.tensor([0.1, 0.4, 0.3, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    pooled = auc_from_histograms(count_score_bins(scores, labels))
    assert (pooled.auc, pooled.low, pooled.high) == (0.75, 0.75, 0.75)  # 3 of 4 pairs are won
    assert (pooled.positives, pooled.negatives) == (2, 2)


def test_a_pair_in_one_bin_is_half_won() -> None:
    """One positive; it beats one negative and shares a bin with the other: 1.5 of 2, between 1 and 2 of 2."""
    scores, labels = torch.tensor([0.0, 0.5, 0.5000001]), torch.tensor([0.0, 0.0, 1.0])
    pooled = auc_from_histograms(count_score_bins(scores, labels))
    assert (pooled.auc, pooled.low, pooled.high) == (0.75, 0.5, 1.0)


def test_sites_add_up_and_the_bounds_hold_the_exact_auc() -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy((rng.random(5000) < 0.1).astype(float))
    scores = torch.from_numpy(rng.normal(size=5000) * 3) + labels
    parts = [count_score_bins(scores[k::4], labels[k::4]) for k in range(4)]
    pooled, exact = auc_from_histograms(torch.stack(parts).sum(0)), auc(labels, scores)
    assert pooled.low is not None
    assert pooled.high is not None
    assert pooled.auc is not None
    assert pooled.low < exact < pooled.high
    # Normal scores of width 3 spread over some 1000 bins: about a thousandth of the pairs share one.
    assert pooled.high - pooled.low < 2e-3
    assert abs(pooled.auc - exact) < 1e-4
    assert auc_from_scores(scores, labels).auc == exact


def test_any_number_has_a_bin() -> None:
    scores = torch.tensor([-1e300, -1.0, 0.0, 1e300], dtype=torch.float64)
    counts = count_score_bins(scores, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert counts.shape == (2, SCORE_BINS)
    assert counts.sum() == 4
    assert auc_from_histograms(counts).auc == 1.0


def test_one_class_has_no_auc() -> None:
    scores, labels = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert auc_from_histograms(count_score_bins(scores, labels)).auc is None
    assert auc_from_scores(scores, labels).auc is None
    assert auc_from_scores(scores, labels).positives == 2
