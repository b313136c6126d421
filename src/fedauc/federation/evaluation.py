"""The AUC over the held-out rows of all sites, from what each site is willing to send.

`histograms`: a site counts its scores per class in fixed bins. Pairs in the same bin count one half, so the AUC is
known up to half the share of such pairs; `low` and `high` are the bounds. `scores`: the server is a trusted evaluator
and gets every score with its label, and the AUC is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.experiments.run_view import GAIN
from fedauc.federation.exchange import AnswerRefused, Exchange, decline_when_closed, read_answer
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.interfaces import Model
from fedauc.metrics import auc

if TYPE_CHECKING:
    from fedauc.federation.engine import FederatedEngine

SCORE_BINS = 4096
"""Equal bins of score / (1 + |score|), which maps all numbers to (-1, 1) and saturates slowly."""

MAX_ANSWER_BYTES = 1 << 31
"""Bytes of scores that one site may send."""


MAX_HELD_OUT_ROWS = 1e12
"""More held-out rows of a class than this are taken for an attempt to count more than all other sites."""

VALIDATION_COLUMN = "validation_auc"
"""The column of records by which rounds are compared; with GAIN behind it, that of the gain over the best round."""

WITHHELD = "its policy asks for more rows of a class (rows.minimum_per_class)"
"""Why a site sends no scores of a part."""

AUC_TOLERANCE = 1e-9
"""How far a site's own AUC may lie outside the bounds that its scores give."""


class PooledAUC(NamedTuple):
    """The AUC over the sites that answered, the bounds that binning leaves, and the number of rows of each class."""

    auc: float | None
    low: float | None
    high: float | None
    positives: int
    negatives: int


NO_ANSWERS = PooledAUC(None, None, None, 0, 0)


class SiteScores(NamedTuple):
    """What a site says of its test and validation rows (nothing of a part that it does not have), and its own AUC.

    `withheld` are the parts of which the site's policy lets it say nothing.
    """

    parts: dict[str, list[Tensor]]
    site_auc: float | None
    withheld: tuple[str, ...]


def evaluate_at_sites(
    exchange: Exchange, header: Mapping[str, Any], model: Model, engine: FederatedEngine
) -> dict[str, Any]:
    """The AUC over the sites that are online now and share their scores, as columns of a record.

    Sites in quarantine are not asked. The engine knows the class counts of every site, which must stay what they were.

    `auc_low` and `auc_high` are the bounds that histograms leave, not a confidence interval. `site_auc` lists the sites
    that share their own AUC, `missing` those whose scores are not used, with the reason, and `withheld` those whose
    policy asks for more rows of a class than their test or validation rows have. Where sites hold out validation rows
    there are the same columns of these.
    """
    requested = exchange.policy.evaluation
    if requested == "none":
        return {"auc": None}
    message = pack_payload({**header, "kind": "evaluate", "requested": requested}, {"model": model})
    online = exchange.online_sites()
    excluded = engine.quarantine.list_excluded(online)
    result = exchange.ask_sites(
        {client: lambda: message for client in online if client not in excluded},
        decline_when_closed(lambda client, payload: _read_scores(client, payload, requested, header, engine)),
    )
    engine.quarantine.count_refusals(result.misbehaved, header["round"])
    answers = dict(sorted(result.answers.items()))
    test, validation = (
        {client: answer.parts[part] for client, answer in answers.items() if part in answer.parts}
        for part in ("test", "validation")
    )
    record, names = _describe_part(test, "test"), {client: exchange.sites[client].name for client in answers}
    site_auc = {names[client]: answer.site_auc for client, answer in answers.items() if answer.site_auc is not None}
    record |= {"site_auc": site_auc} if site_auc else {}
    missing = {exchange.sites[client].name: reason for client, reason in {**result.absent, **result.refused}.items()}
    record |= {"missing": missing} if missing else {}
    withheld = {
        part: [names[client] for client, answer in answers.items() if part in answer.withheld]
        for part in ("test", "validation")
    }
    record |= {"withheld": {part: sites for part, sites in withheld.items() if sites}} if any(withheld.values()) else {}
    for part, sites in withheld.items():
        for site in sites:
            exchange.warn_once(f"site {site!r} sends no scores of its {part} rows: {WITHHELD}")
    if exchange.policy.validation_fraction:
        record |= _describe_part(validation, "validation")
        record[f"{VALIDATION_COLUMN}{GAIN}"] = engine.compare_validation(validation)
    return record


def name_tensors(requested: str, part: str) -> str:
    """The name in an answer of what it says about a part of the held-out rows."""
    return requested if part == "test" else f"{part}_{requested}"


def pool_answers(answers: Sequence[Sequence[Tensor]]) -> PooledAUC:
    """The AUC of all sites' rows, from a histogram of each or from its scores and labels."""
    if not answers:
        return NO_ANSWERS
    if len(answers[0]) == 1:
        return auc_from_histograms(torch.stack([counts for (counts,) in answers]).sum(0))
    scores, labels = map(torch.cat, zip(*answers, strict=True))
    return auc_from_scores(scores, labels)


def _describe_part(answers: Mapping[int, Sequence[Tensor]], part: str) -> dict[str, Any]:
    """The columns of a record about the test rows, or with other names about the validation rows."""
    pooled, column = pool_answers(list(answers.values())), "auc" if part == "test" else VALIDATION_COLUMN
    return {
        column: pooled.auc,
        f"{column}_low": pooled.low,
        f"{column}_high": pooled.high,
        f"{part}_positives": pooled.positives,
        f"{part}_negatives": pooled.negatives,
        f"{part}_sites": len(answers),
    }


def count_score_bins(scores: Tensor, labels: Tensor) -> Tensor:
    """How many negatives and positives fall into each bin, int64 `[2, SCORE_BINS]`.

    >>> count_score_bins(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 1.0])).sum(1)
    tensor([1, 1])
    """
    values = scores.double()
    bins = ((values / (1 + values.abs()) + 1) / 2 * SCORE_BINS).long().clamp(0, SCORE_BINS - 1)
    return torch.stack([torch.bincount(bins[labels == label], minlength=SCORE_BINS) for label in (0, 1)])


def auc_from_histograms(counts: Tensor) -> PooledAUC:
    """The AUC of summed histograms `[2, SCORE_BINS]`, with its bounds."""
    negatives, positives = (side.double().numpy() for side in counts)
    totals = int(positives.sum()), int(negatives.sum())
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return PooledAUC(None, None, None, *totals)
    negatives_below = np.cumsum(negatives) - negatives
    won, tied = float(positives @ negatives_below), float(positives @ negatives)
    return PooledAUC((won + tied / 2) / pairs, won / pairs, (won + tied) / pairs, *totals)


def auc_from_scores(scores: Tensor, labels: Tensor) -> PooledAUC:
    """The exact AUC of all sites' scores."""
    positives = int((labels == 1).sum())
    negatives = len(labels) - positives
    exact = auc(labels, scores) if positives and negatives else None
    return PooledAUC(exact, exact, exact, positives, negatives)


def _read_scores(
    client: int, payload: Payload, requested: str, asked: Mapping[str, Any], engine: FederatedEngine
) -> SiteScores:
    """What a site says of its rows, if it is plausible, and the site's own AUC where it is shared."""
    header, round = read_answer(payload, "evaluate"), asked["round"]
    if header.get("round") != round:
        raise AnswerRefused(f"it evaluates the model of round {header.get('round')!r}; this is round {round}")
    engine.check_counts(client, header)
    tensors, parts = unpack_tensors(payload, max_bytes=MAX_ANSWER_BYTES), dict[str, list[Tensor]]()
    validation = name_tensors(requested, "validation")
    if "validation_fraction" in asked and validation in tensors:
        parts["validation"] = list(tensors[validation])
    # A site whose policy asks for more rows of a class says so, and sends nothing of that part.
    withheld = header.get("withheld", [])
    if not isinstance(withheld, list) or not all(part in ("test", "validation") for part in withheld):
        raise AnswerRefused(f"it withholds {str(withheld)[:40]!r}; it may withhold test or validation rows")
    # Only a site that holds out validation rows may answer without test rows.
    if requested in tensors or not parts:
        parts["test"] = list(tensors.get(requested, []))
    pooled = {part: _check_scores(sent, requested) for part, sent in parts.items()}
    site_auc = _check_site_auc(header.get("auc"), pooled.get("test", NO_ANSWERS))
    counts = {part: (measured.positives, measured.negatives) for part, measured in pooled.items()}
    engine.check_held_out_counts(client, counts, withheld)
    return SiteScores(parts, site_auc, tuple(withheld))


def _check_scores(tensors: list[Tensor], requested: str) -> PooledAUC:
    """The AUC of one site's rows; a refusal where there cannot be such scores."""
    shapes = [(leaf.dtype, tuple(leaf.shape)) for leaf in tensors]
    if requested == "histograms":
        if shapes != [(torch.int64, (2, SCORE_BINS))] or tensors[0].min() < 0:
            raise AnswerRefused(f"its histogram is {shapes}; expected are counts [2, {SCORE_BINS}]")
    elif len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][0] != torch.float64 or tensors[0].ndim != 1:
        raise AnswerRefused(f"its scores are {shapes}; expected are scores and labels of the same length")
    elif not torch.isfinite(tensors[0]).all() or not ((tensors[1] == 0) | (tensors[1] == 1)).all():
        raise AnswerRefused("its scores are not finite, or its labels are not 0 and 1")
    if requested == "histograms" and float(tensors[0].double().sum(1).max()) > MAX_HELD_OUT_ROWS:
        raise AnswerRefused(f"its histogram counts more than {MAX_HELD_OUT_ROWS:g} rows of a class")
    return pool_answers([tensors])


def _check_site_auc(site_auc: Any, pooled: PooledAUC) -> float | None:
    """The AUC that a site says it has, if its scores or their histogram can have it."""
    if site_auc is None:
        return None
    if type(site_auc) not in (int, float) or pooled.low is None or pooled.high is None:
        raise AnswerRefused(f"it says that its AUC is {site_auc!r}, but its scores have none")
    if not pooled.low - AUC_TOLERANCE <= site_auc <= pooled.high + AUC_TOLERANCE:
        bounds = f"between {pooled.low:.6g} and {pooled.high:.6g}"
        raise AnswerRefused(f"it says that its AUC is {site_auc!r}, but its scores have one {bounds}")
    return float(site_auc)
