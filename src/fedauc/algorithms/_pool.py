"""The pool of passive scores: collected per round, assembled per class, drawn per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc import keys
from fedauc.interfaces import Cohort, Phase, Setting
from fedauc.objectives.kinds import Passive
from fedauc.trees import send


class Chunk(NamedTuple):
    """One round's scores `[M, I, B]` per class (embeddings `[M, I, B, E]`), and whose they are `[M]`, on the CPU."""

    clients: Tensor
    scores: Passive


def assemble(setting: Setting, recent: Sequence[Chunk], phase: Phase, old: Passive) -> Passive:
    """One flat pool per class from the rounds' scores.

    Slots of a class that a client does not hold are dropped. Under `pooled` weighting an entry counts by its client's
    rows, by systematic resampling, so that draws stay plain. A class that nobody had keeps its old scores.
    """
    sides = []
    for side, held in enumerate(setting.census):
        chunks = [_holders(chunk, chunk.scores[side], held) for chunk in recent]
        scores = torch.cat([part for part, _ in chunks]) if chunks else old[side][:0]
        if setting.weighting == "pooled" and len(scores):
            counts = np.concatenate([count for _, count in chunks])
            chosen = systematic(counts, (setting.seed, "resample", phase.round, side))
            scores = scores[send(chosen, scores.device)]
        sides.append(scores if len(scores) else old[side])
    return Passive(*sides)


def _holders(chunk: Chunk, scores: Tensor, held: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """The scores of clients that hold the class, flat, and for each how many rows of the class its client holds."""
    counts = held[chunk.clients.cpu().numpy()]
    keep = send(np.flatnonzero(counts), scores.device)
    slots = scores.shape[1] * scores.shape[2]
    return scores[keep].flatten(0, 2), np.repeat(counts[counts > 0], slots)


def systematic(weights: np.ndarray, key: tuple[int | str, ...]) -> np.ndarray:
    """As many indices as weights, each chosen in proportion to its weight, to within one of the expected count."""
    offset = float(keys.words(1, *key)[0]) / 2**64
    edges = np.cumsum(weights) / weights.sum() * len(weights)
    chosen = np.searchsorted(edges, np.arange(len(weights)) + offset, side="right")
    return np.minimum(chosen, len(weights) - 1)


def draw(setting: Setting, pool: Passive, cohort: Cohort, phase: Phase) -> Passive:
    """Each client's passive scores `[M, I, B]` per class: without replacement, reshuffled when exhausted."""
    sides = []
    for side, (scores, size) in enumerate(zip(pool, phase.batch, strict=True)):
        if len(scores) == 0:
            sides.append(scores.new_zeros(len(cohort.clients), phase.local_steps, *scores.shape))
            continue
        sizes, count = np.full(len(cohort.clients), len(scores)), phase.local_steps * size
        index = keys.samples(sizes, count, cohort.clients, setting.seed, "passive", phase.round, side)
        chosen = scores[send(index, scores.device)]
        sides.append(chosen.reshape(len(index), phase.local_steps, size, *scores.shape[1:]))
    return Passive(*sides)
