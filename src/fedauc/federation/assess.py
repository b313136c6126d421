"""Asking the sites how good a model is on rows that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedauc.federation.engine import answer
from fedauc.federation.exchange import Exchange, Refused
from fedauc.federation.scoring import BINS, Pooled, from_histograms, from_scores
from fedauc.federation.wire import Parcel, pack, unpack
from fedauc.interfaces import Model

MOST = 1 << 31
"""Bytes of scores that one site may send."""


def assess(exchange: Exchange, facts: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The AUC over the sites that are online now and tell of their scores, as columns of a record.

    `auc_low` and `auc_high` are the bounds that histograms leave, not a confidence interval. A site's own AUC is there
    only where its owner allows it.
    """
    ask = exchange.terms.evaluation
    if ask == "none":
        return {"auc": None}
    letter = pack({**facts, "kind": "evaluate", "ask": ask}, {"model": model})
    outcome = exchange.ask(dict.fromkeys(exchange.online(), lambda: letter), lambda place, got: _read(got, ask))
    found = [outcome.came[place] for place in sorted(outcome.came)]
    names = [exchange.sites[place].name for place in sorted(outcome.came)]
    told = {name: own for name, (_, own) in zip(names, found, strict=True) if own is not None}
    auc, low, high, positives, negatives = _pool([tensors for tensors, _ in found], ask)
    rows = {"test_positives": positives, "test_negatives": negatives, "test_sites": len(found)}
    return {"auc": auc, "auc_low": low, "auc_high": high, **rows, **({"site_auc": told} if told else {})}


def _pool(found: list[list[Tensor]], ask: str) -> Pooled:
    if not found:
        return Pooled(None, None, None, 0, 0)
    if ask == "histograms":
        return from_histograms(torch.stack([counts for (counts,) in found]).sum(0))
    scores, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return from_scores(scores, labels)


def _read(parcel: Parcel, ask: str) -> tuple[list[Tensor], float | None]:
    """What a site tells, if it can be true."""
    facts = answer(parcel, "evaluate")
    tensors = unpack(parcel, most=MOST).get(ask, [])
    kinds = [(leaf.dtype, leaf.ndim) for leaf in tensors]
    if ask == "histograms":
        if [(leaf.dtype, tuple(leaf.shape)) for leaf in tensors] != [(torch.int64, (2, BINS))] or tensors[0].min() < 0:
            raise Refused(f"its histogram is {kinds}; due are counts [2, {BINS}]")
    elif kinds != [(torch.float64, 1)] * 2 or len(tensors[0]) != len(tensors[1]):
        raise Refused(f"its scores are {kinds}; due are scores and labels of one length")
    elif not torch.isfinite(tensors[0]).all() or not ((tensors[1] == 0) | (tensors[1] == 1)).all():
        raise Refused("its scores are not finite, or its labels not 0 and 1")
    own = facts.get("auc")
    return tensors, float(own) if isinstance(own, (int, float)) else None
