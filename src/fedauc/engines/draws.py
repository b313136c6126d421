"""Which rows a client uses in a visit, and how much each counts: a pure function of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data.augmentation import draw_crops
from fedauc.data.classes import ClassCensus, divide_batch, list_counts
from fedauc.data.clients import Clients
from fedauc.data.io.memory import WORDS_PER_BLOCK, row_blocks
from fedauc.data.weighting import class_scales, row_scales
from fedauc.interfaces import BatchKind, Phase, Setting
from fedauc.random_tensors import client_keys


class VisitRows(NamedTuple):
    """Row numbers `[I, B]` and weights `[B]` of one client's batches."""

    rows: np.ndarray
    weights: np.ndarray


class CohortDraws(NamedTuple):
    """A cohort's batches: row numbers `[M, I, B]`, weights `[M, B]`, and each row's crop `[M, I, B, 3]`, if any.

    `places` `[M, I, B]` number the rows among those of their client, and `keys` `[M, I]` are those of the steps' own
    randomness, for algorithms that need them.
    """

    rows: np.ndarray
    weights: np.ndarray
    moves: np.ndarray | None
    places: np.ndarray | None = None
    keys: np.ndarray | None = None


class Draws:
    """Draws batches without replacement inside a visit; a small client's rows are reshuffled when they run out.

    The keys of the steps' own randomness come from `noise_seed`, which is the run's seed unless a site keeps its own.
    """

    def __init__(
        self,
        clients: Clients,
        setting: Setting,
        draw: BatchKind,
        needs_places: bool = False,
        needs_keys: bool = False,
    ) -> None:
        self._clients, self._setting, self._draw = clients, setting, draw
        self._needs_places, self._needs_keys = needs_places, needs_keys
        self.noise_seed = setting.seed
        self._largest = int(np.diff(clients.offsets).max())
        scales = class_scales if draw == "classes" else row_scales
        self._scales = scales(setting.census, setting.weighting, setting.totals)

    def draw_cohort(self, clients: Sequence[int], phase: Phase) -> CohortDraws:
        """The batches of every client; no client's batches depend on who else takes part."""
        draw_rows = self._draw_any_class
        if self._draw == "classes":
            is_binary = not isinstance(self._clients.census, ClassCensus)
            draw_rows = self._draw_by_class if is_binary else self._draw_every_class
        numbers = np.asarray(clients)
        positions, weights = draw_rows(numbers, phase)
        draws = CohortDraws(self._clients.rows.take(positions), weights, None)
        if self._needs_places:
            draws = draws._replace(places=positions - self._clients.offsets[numbers, None, None])
        if self._needs_keys:
            steps = range(phase.local_steps)
            step_keys = [client_keys(numbers, self.noise_seed, "step noise", phase.round, step) for step in steps]
            draws = draws._replace(keys=np.stack(step_keys, axis=1))
        if self._setting.augment == "none":
            return draws
        count = draws.rows[0].size
        moves = [draw_crops(count, self._setting.seed, phase.round, client) for client in clients]
        return draws._replace(moves=np.stack(moves).reshape(*draws.rows.shape, 3))

    def draw_visit(self, client: int, phase: Phase) -> VisitRows:
        """The batches of one client."""
        draws = self.draw_cohort((client,), phase)
        return VisitRows(draws.rows[0], draws.weights[0])

    def _draw_by_class(self, clients: np.ndarray, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        start, end = self._clients.offsets[clients], self._clients.offsets[clients + 1]
        middle = start + self._clients.census.positives[clients]
        # Rows of a class that the client lacks come from the other class with weight zero: BatchNorm still sees them.
        size = phase.batch
        positives = self._draw_side(start, np.where(middle > start, middle, end), clients, phase, 0, size.positives)
        negatives = self._draw_side(np.where(end > middle, middle, start), end, clients, phase, 1, size.negatives)
        weights = np.repeat(self._scales[clients] / np.maximum(phase.batch, 1), phase.batch, axis=1)
        return np.concatenate([positives, negatives], axis=2), weights

    def _draw_every_class(self, clients: np.ndarray, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        """Rows of several classes, in their order."""
        start, end = self._clients.offsets[clients], self._clients.offsets[clients + 1]
        counts = np.stack(list_counts(self._clients.census))[:, clients]
        edges, sizes, parts = start + np.cumsum(counts, axis=0), divide_batch(self._clients.census, phase.batch), []
        for number, size in enumerate(sizes):
            held, last = counts[number] > 0, edges[number]
            # Rows of a class that the client lacks are any of its rows, with weight zero.
            first, last = np.where(held, last - counts[number], start), np.where(held, last, end)
            parts.append(self._draw_side(first, last, clients, phase, 3 + number, size))
        return np.concatenate(parts, axis=2), np.repeat(self._scales[clients] / np.array(sizes), sizes, axis=1)

    def _draw_any_class(self, clients: np.ndarray, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
        size, offsets = phase.batch.total_rows, self._clients.offsets
        positions = self._draw_side(offsets[clients], offsets[clients + 1], clients, phase, 2, size)
        return positions, np.repeat(self._scales[clients, None] / size, size, axis=1)

    def _draw_side(
        self, start: np.ndarray, end: np.ndarray, clients: np.ndarray, phase: Phase, side: int, size: int
    ) -> np.ndarray:
        """Positions `[M, I, B]` in each client's range `start` to `end`.

        Sides are positives 0, negatives 1, any 2, and 3 + c for class c of several.
        """
        sizes, count, key = end - start, phase.local_steps * size, (self._setting.seed, "batch", phase.round, side)
        parts = []
        for block in row_blocks((len(clients), max(count, self._largest)), WORDS_PER_BLOCK):
            chosen = keys.sample_client_indices(sizes[block], count, clients[block], *key)
            parts.append(chosen + start[block, None])
        positions: np.ndarray = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return positions.reshape(len(clients), phase.local_steps, size)
