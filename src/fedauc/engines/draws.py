"""Which rows a client uses in a visit, and how much each counts: a pure function of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data.augment import draw_moves
from fedauc.data.clients import Clients
from fedauc.data.weighting import class_scales, row_scales
from fedauc.interfaces import Draw, Phase, Setting


class VisitRows(NamedTuple):
    """Row numbers `[I, B]` and weights `[B]` of a visit's batches."""

    rows: np.ndarray
    weights: np.ndarray


class Drawn(NamedTuple):
    """A cohort's visit: row numbers `[M, I, B]`, weights `[M, B]`, and each row's crop `[M, I, B, 3]`, if any."""

    rows: np.ndarray
    weights: np.ndarray
    moves: np.ndarray | None


class Draws:
    """A visit's batches: without replacement inside a visit, reshuffled when a small client is exhausted."""

    def __init__(self, clients: Clients, setting: Setting, draw: Draw) -> None:
        self._clients, self._setting, self._draw = clients, setting, draw
        scales = class_scales if draw == "classes" else row_scales
        self._scales = scales(setting.census, setting.weighting)

    def cohort(self, clients: Sequence[int], phase: Phase) -> Drawn:
        """Every client's visit; no client's draws depend on who else takes part."""
        visits = [self.rows(client, phase) for client in clients]
        rows, weights = np.stack([visit.rows for visit in visits]), np.stack([visit.weights for visit in visits])
        if self._setting.augment == "none":
            return Drawn(rows, weights, None)
        count = rows[0].size
        moves = [draw_moves(count, self._setting.seed, phase.round, client) for client in clients]
        return Drawn(rows, weights, np.stack(moves).reshape(*rows.shape, 3))

    def rows(self, client: int, phase: Phase) -> VisitRows:
        """The rows of one client's visit."""
        return self._by_class(client, phase) if self._draw == "classes" else self._any(client, phase)

    def _by_class(self, client: int, phase: Phase) -> VisitRows:
        held = (self._clients.positives(client), self._clients.negatives(client))
        # A class the client lacks is filled from the other one, at weight zero: BatchNorm then still sees its data.
        sides = (held[0] if len(held[0]) else held[1], held[1] if len(held[1]) else held[0])
        index = [self._take(sides[side], phase.batch[side], client, phase, side) for side in (0, 1)]
        weights = np.repeat(self._scales[client] / np.maximum(phase.batch, 1), phase.batch)
        return VisitRows(np.concatenate(index, axis=1), weights)

    def _any(self, client: int, phase: Phase) -> VisitRows:
        start, end = self._clients.offsets[client : client + 2]
        rows = self._clients.rows[start:end]
        size = phase.batch.total
        return VisitRows(self._take(rows, size, client, phase, 2), np.full(size, self._scales[client] / size))

    def _take(self, rows: np.ndarray, size: int, client: int, phase: Phase, side: int) -> np.ndarray:
        count = phase.local_steps * size
        chosen = keys.sample(len(rows), count, self._setting.seed, "batch", phase.round, client, side)
        taken: np.ndarray = rows[chosen].reshape(phase.local_steps, size)
        return taken
