"""The pool of passive scores: collected per round, assembled per class, drawn per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc import keys
from fedauc.data.io.memory import WORDS_PER_BLOCK, row_blocks
from fedauc.interfaces import Cohort, Phase, Setting
from fedauc.objectives.kinds import Passive
from fedauc.trees import send_to_device


class RoundScores(NamedTuple):
    """One round's scores `[M, I, B]` per class (embeddings `[M, I, B, E]`), and whose they are `[M]`, on the CPU."""

    clients: Tensor
    scores: Passive


def rebuild_pool(setting: Setting, recent: Sequence[RoundScores], phase: Phase, old: Passive) -> Passive:
    """One flat pool per class from the rounds' scores.

    Slots of a class that a client does not hold are dropped. Under `pooled` weighting an entry counts by its client's
    rows, by systematic resampling, so that draws stay plain. A class that nobody had keeps its old scores.
    """
    sides = []
    for side, held in enumerate(setting.census):
        counts = [held[chunk.clients.cpu().numpy()] for chunk in recent]
        parts = [_scores_of_holders(chunk.scores[side], count) for chunk, count in zip(recent, counts, strict=True)]
        scores = torch.cat(parts) if parts else old[side][:0]
        if setting.weighting == "pooled" and len(scores):
            slots = [chunk.scores[side].shape[1:3].numel() for chunk in recent]
            rows = np.concatenate([np.repeat(count[count > 0], n) for count, n in zip(counts, slots, strict=True)])
            chosen = resample_systematically(rows, (setting.seed, "resample", phase.round, side))
            scores = scores[send_to_device(chosen, scores.device)]
        sides.append(scores if len(scores) else old[side])
    return Passive(*sides)


def _scores_of_holders(scores: Tensor, counts: np.ndarray) -> Tensor:
    """The scores of the clients that hold some rows of the class, flat."""
    return (scores if counts.all() else scores[send_to_device(np.flatnonzero(counts), scores.device)]).flatten(0, 2)


def resample_systematically(weights: np.ndarray, key: tuple[int | str, ...]) -> np.ndarray:
    """As many indices as weights, each chosen in proportion to its weight, to within one of the expected count."""
    offset = float(keys.random_words(1, *key)[0]) / 2**64
    edges = np.cumsum(weights) / weights.sum() * len(weights)
    chosen = np.searchsorted(edges, np.arange(len(weights)) + offset, side="right")
    return np.minimum(chosen, len(weights) - 1)


def draw_passive_scores(setting: Setting, pool: Passive, cohort: Cohort, phase: Phase) -> Passive:
    """Each client's passive scores `[M, I, B]` per class: without replacement, reshuffled when exhausted."""
    sides = []
    for side, (scores, size) in enumerate(zip(pool, phase.batch, strict=True)):
        if len(scores) == 0:
            sides.append(scores.new_zeros(len(cohort.clients), phase.local_steps, *scores.shape))
            continue
        clients, count = np.array(cohort.clients), phase.local_steps * size
        chosen = scores.new_empty(len(clients), count, *scores.shape[1:])
        for some in row_blocks((len(clients), keys.count_words(len(scores), count)), WORDS_PER_BLOCK):
            sizes = np.full(len(clients[some]), len(scores))
            index = keys.sample_client_indices(sizes, count, clients[some], setting.seed, "passive", phase.round, side)
            chosen[some] = scores[send_to_device(index, scores.device)]
        sides.append(chosen.view(len(clients), phase.local_steps, size, *scores.shape[1:]))
    return Passive(*sides)
