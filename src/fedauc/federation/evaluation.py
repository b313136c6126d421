"""The AUC of all sites' held-out rows together, from what each site may tell of its scores.

`histograms`: a site counts its scores per class in fixed bins. Pairs in one bin count one half, so the AUC is known up
to half the share of such pairs, and `low` and `high` say how far. `scores`: the server is the trusted evaluator and
gets every score with its label; the AUC is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.federation.engine import read_answer
from fedauc.federation.exchange import AnswerRefused, Exchange
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.interfaces import Model
from fedauc.metrics import auc

SCORE_BINS = 4096
"""Equal bins of score / (1 + |score|), which maps all numbers to (-1, 1) and saturates slowly."""


class PooledAUC(NamedTuple):
    """The AUC over the sites that answered, the bounds that binning leaves, and how many rows it stands on."""

    auc: float | None
    low: float | None
    high: float | None
    positives: int
    negatives: int


def count_score_bins(scores: Tensor, labels: Tensor) -> Tensor:
    """How many negatives and positives fall into each bin, int64 `[2, BINS]`.

    >>> histogram(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 1.0])).sum(1)
    tensor([1, 1])
    """
    values = scores.double()
    place = ((values / (1 + values.abs()) + 1) / 2 * SCORE_BINS).long().clamp(0, SCORE_BINS - 1)
    return torch.stack([torch.bincount(place[labels == label], minlength=SCORE_BINS) for label in (0, 1)])


def auc_from_histograms(counts: Tensor) -> PooledAUC:
    """The AUC of summed histograms `[2, BINS]`, with its bounds."""
    negatives, positives = (side.double().numpy() for side in counts)
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return PooledAUC(None, None, None, int(positives.sum()), int(negatives.sum()))
    below = np.cumsum(negatives) - negatives
    won, tied = float(positives @ below), float(positives @ negatives)
    totals = int(positives.sum()), int(negatives.sum())
    return PooledAUC((won + tied / 2) / pairs, won / pairs, (won + tied) / pairs, *totals)


def auc_from_scores(scores: Tensor, labels: Tensor) -> PooledAUC:
    """The exact AUC of all sites' scores."""
    positives = int((labels == 1).sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return PooledAUC(None, None, None, positives, negatives)
    area = auc(labels, scores)
    return PooledAUC(area, area, area, positives, negatives)


MOST = 1 << 31
"""Bytes of scores that one site may send."""


def evaluate_at_sites(exchange: Exchange, facts: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The AUC over the sites that are online now and tell of their scores, as columns of a record.

    `auc_low` and `auc_high` are the bounds that histograms leave, not a confidence interval. A site's own AUC is there
    only where its owner allows it.
    """
    ask = exchange.policy.evaluation
    if ask == "none":
        return {"auc": None}
    letter = pack_payload({**facts, "kind": "evaluate", "ask": ask}, {"model": model})
    outcome = exchange.ask_sites(
        dict.fromkeys(exchange.online_sites(), lambda: letter), lambda place, got: _read(got, ask)
    )
    found = [outcome.answers[place] for place in sorted(outcome.answers)]
    names = [exchange.sites[place].name for place in sorted(outcome.answers)]
    told = {name: own for name, (_, own) in zip(names, found, strict=True) if own is not None}
    auc, low, high, positives, negatives = _pool([tensors for tensors, _ in found], ask)
    rows = {"test_positives": positives, "test_negatives": negatives, "test_sites": len(found)}
    return {"auc": auc, "auc_low": low, "auc_high": high, **rows, **({"site_auc": told} if told else {})}


def _pool(found: list[list[Tensor]], ask: str) -> PooledAUC:
    if not found:
        return PooledAUC(None, None, None, 0, 0)
    if ask == "histograms":
        return auc_from_histograms(torch.stack([counts for (counts,) in found]).sum(0))
    scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return auc_from_scores(scores, labels)


def _read(parcel: Payload, ask: str) -> tuple[list[Tensor], float | None]:
    """What a site tells, if it can be true."""
    facts = read_answer(parcel, "evaluate")
    tensors = unpack_tensors(parcel, max_bytes=MOST).get(ask, [])
    kinds = [(leaf.dtype, leaf.ndim) for leaf in tensors]
    if ask == "histograms":
        if [(leaf.dtype, tuple(leaf.shape)) for leaf in tensors] != [(torch.int64, (2, SCORE_BINS))] or tensors[
            0
        ].min() < 0:
            raise AnswerRefused(f"its histogram is {kinds}; due are counts [2, {SCORE_BINS}]")
    elif kinds != [(torch.float64, 1)] * 2 or len(tensors[0]) != len(tensors[1]):
        raise AnswerRefused(f"its scores are {kinds}; due are scores and labels of one length")
    elif not torch.isfinite(tensors[0]).all() or not ((tensors[1] == 0) | (tensors[1] == 1)).all():
        raise AnswerRefused("its scores are not finite, or its labels not 0 and 1")
    own = facts.get("auc")
    return tensors, float(own) if isinstance(own, (int, float)) else None
