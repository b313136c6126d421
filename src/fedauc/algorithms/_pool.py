"""The pool of passive scores: collected per round, rebuilt per class, and drawn per client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import torch

from fedauc import keys
from fedauc.data.classes import divide_batch, list_counts
from fedauc.data.io.memory import WORDS_PER_BLOCK, row_blocks
from fedauc.interfaces import Cohort, Phase, Setting
from fedauc.objectives.kinds import Passive
from fedauc.trees import send_to_device

if TYPE_CHECKING:
    from torch import Tensor


Pool = TypeVar("Pool", bound=Sequence[Any])
"""The scores of positives and of negatives (`Passive`), or those of each of several classes (a tuple)."""


LEAST_CLIENTS = 3
"""Clients below which a median says nothing: that of two lies halfway to a wrong one."""


class RoundScores(NamedTuple):
    """The scores of a round `[M, I, B]` per class (embeddings `[M, I, B, E]`), and their clients `[M]`, on the CPU."""

    clients: Tensor
    scores: Sequence[Tensor]


def rebuild_pool(
    setting: Setting, recent: Sequence[RoundScores], phase: Phase, old: Pool, reach: float | None = None
) -> Pool:
    """One flat pool per class from the scores of recent rounds.

    The scores of a class that a client does not hold are dropped. Under `pooled` weighting the scores are resampled
    systematically in proportion to the rows of their clients, so that draws from the pool stay uniform. A class without
    new scores keeps its old ones. With a `reach` scores are first limited to the clients' usual range.
    """
    if reach is not None:
        recent = limit_scores(setting, recent, reach)
    sides = []
    for side, held in enumerate(list_counts(setting.census)):
        counts = [held[uploaded.clients.cpu().numpy()] for uploaded in recent]
        parts = []
        for uploaded, count in zip(recent, counts, strict=True):
            part = uploaded.scores[side]
            holders = part if count.all() else part[send_to_device(np.flatnonzero(count), part.device)]
            parts.append(holders.flatten(0, 2))
        scores = torch.cat(parts) if parts else old[side][:0]
        if setting.weighting == "pooled" and len(scores):
            per_client = [uploaded.scores[side].shape[1:3].numel() for uploaded in recent]
            rows = np.concatenate([np.repeat(count[count > 0], n) for count, n in zip(counts, per_client, strict=True)])
            chosen = resample_systematically(rows, (setting.seed, "resample", phase.round, side))
            scores = scores[send_to_device(chosen, scores.device)]
        sides.append(scores if len(scores) else old[side])
    return _gather_sides(sides, old)


def limit_scores(setting: Setting, recent: Sequence[RoundScores], reach: float) -> list[RoundScores]:
    """Scores further than `reach` ranges beyond the clients' usual range [L, H] become the nearest that are not.

    L and H are the medians over clients of their smallest and of their largest score, of all classes that they hold.
    Fewer than three clients have no usual range.
    """
    census, ranges = list_counts(setting.census), dict[int, tuple[float, float]]()
    for clients, sides in recent:
        for position, client in enumerate(clients.tolist()):
            for side, rows in zip(sides, census, strict=True):
                if rows[client]:
                    low, high = ranges.get(client, (math.inf, -math.inf))
                    scores = side[position]
                    ranges[client] = (min(low, float(scores.min())), max(high, float(scores.max())))
    if len(ranges) < LEAST_CLIENTS:
        return list(recent)
    low, high = np.median(list(ranges.values()), axis=0).tolist()
    slack = reach * (high - low)
    return [
        RoundScores(clients, _gather_sides([side.clamp(low - slack, high + slack) for side in sides], sides))
        for clients, sides in recent
    ]


def resample_systematically(weights: np.ndarray, key: tuple[int | str, ...]) -> np.ndarray:
    """As many indices as weights; each occurs in proportion to its weight, within one of the expected number."""
    offset = float(keys.random_words(1, *key)[0]) / 2**64
    edges = np.cumsum(weights) / weights.sum() * len(weights)
    chosen = np.searchsorted(edges, np.arange(len(weights)) + offset, side="right")
    return np.minimum(chosen, len(weights) - 1)


def draw_passive_scores(setting: Setting, pool: Pool, cohort: Cohort, phase: Phase) -> Pool:
    """Passive scores `[M, I, B]` per class for each client, without replacement until the pool is exhausted."""
    sides = []
    sizes = divide_batch(setting.census, phase.batch)
    for side, (scores, size) in enumerate(zip(pool, sizes, strict=True)):
        if len(scores) == 0:
            sides.append(scores.new_zeros(len(cohort.clients), phase.local_steps, *scores.shape))
            continue
        clients, count = np.array(cohort.clients), phase.local_steps * size
        chosen = scores.new_empty(len(clients), count, *scores.shape[1:])
        for block in row_blocks((len(clients), keys.count_words(len(scores), count)), WORDS_PER_BLOCK):
            lengths = np.full(len(clients[block]), len(scores))
            index = keys.sample_client_indices(
                lengths, count, clients[block], setting.seed, "passive", phase.round, side
            )
            chosen[block] = scores[send_to_device(index, scores.device)]
        sides.append(chosen.view(len(clients), phase.local_steps, size, *scores.shape[1:]))
    return _gather_sides(sides, pool)


def _gather_sides(sides: list[Tensor], like: Pool) -> Pool:
    """The scores of every class in a pool of the same kind as another."""
    gathered = Passive(*sides) if isinstance(like, Passive) else tuple(sides)
    return cast("Pool", gathered)
