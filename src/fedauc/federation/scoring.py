"""The AUC of all sites' held-out rows together, from what each site may tell of its scores.

`histograms`: a site counts its scores per class in fixed bins. Pairs in one bin count one half, so the AUC is known up
to half the share of such pairs, and `low` and `high` say how far. `scores`: the server is the trusted evaluator and
gets every score with its label; the AUC is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.metrics import auc

BINS = 4096
"""Equal bins of score / (1 + |score|), which maps all numbers to (-1, 1) and saturates slowly."""


class Pooled(NamedTuple):
    """The AUC over the sites that answered, the bounds that binning leaves, and how many rows it stands on."""

    auc: float | None
    low: float | None
    high: float | None
    positives: int
    negatives: int


def histogram(scores: Tensor, labels: Tensor) -> Tensor:
    """How many negatives and positives fall into each bin, int64 `[2, BINS]`.

    >>> histogram(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 1.0])).sum(1)
    tensor([1, 1])
    """
    values = scores.double()
    place = ((values / (1 + values.abs()) + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    return torch.stack([torch.bincount(place[labels == label], minlength=BINS) for label in (0, 1)])


def from_histograms(counts: Tensor) -> Pooled:
    """The AUC of summed histograms `[2, BINS]`, with its bounds."""
    negatives, positives = (side.double().numpy() for side in counts)
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return Pooled(None, None, None, int(positives.sum()), int(negatives.sum()))
    below = np.cumsum(negatives) - negatives
    won, tied = float(positives @ below), float(positives @ negatives)
    totals = int(positives.sum()), int(negatives.sum())
    return Pooled((won + tied / 2) / pairs, won / pairs, (won + tied) / pairs, *totals)


def from_scores(scores: Tensor, labels: Tensor) -> Pooled:
    """The exact AUC of all sites' scores."""
    positives = int((labels == 1).sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return Pooled(None, None, None, positives, negatives)
    area = auc(labels, scores)
    return Pooled(area, area, area, positives, negatives)
