"""Drawn rows of the shape of the Medicare data, for scale and smoke runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data import bounds
from fedauc.data.checks import EVALUABLE
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.data.states import STATES


@dataclass(frozen=True)
class MedicareLike(Dataset):
    """SYNTHETIC: 4 million rows of 50 states, the k-th largest with 1/k of the largest's rows, 0.07 % positive.

    x = y * separation * u + shift * c_state + noise, as in `synthetic`. Validation and test are fresh draws of a
    quarter of the rows each.
    """

    name: ClassVar[str] = "medicare-like"
    about: ClassVar[str] = "synthetic rows of the size and imbalance of the Medicare data; nothing to cite"
    foreign: ClassVar[str] = "SYNTHETIC medicare-like"

    rows: int = 4_000_000
    features: int = 32
    positive_rate: float = 0.0007
    shift: float = 0.3
    separation: float = 1.0

    def __post_init__(self) -> None:
        bounds.whole("rows", self.rows, least=40 * len(STATES))
        bounds.whole("features", self.features)
        bounds.fraction("positive_rate", self.positive_rate)
        bounds.nonnegative("shift", self.shift)
        bounds.nonnegative("separation", self.separation)

    def load(self, seed: int) -> Table:
        """Draw the direction and the states' offsets once, then three independent parts."""
        direction = keys.numpy_generator(seed, "direction").standard_normal(self.features)
        step = (self.separation / np.linalg.norm(direction) * direction).astype(np.float32)
        offsets = keys.numpy_generator(seed, "offsets").standard_normal((len(STATES), self.features), dtype=np.float32)
        offsets *= np.float32(self.shift)
        train = self._draw(step, offsets, self.rows, seed, "train")
        validation, test = (self._draw(step, offsets, self.rows // 4, seed, part) for part in ("validation", "test"))
        note = f"{self.foreign}: {self.rows} drawn rows of {len(STATES)} states to train on"
        return Table(train, validation, test, note)

    def _draw(self, step: np.ndarray, offsets: np.ndarray, size: int, seed: int, part: str) -> Rows:
        shares = 1 / np.arange(1, len(STATES) + 1)
        stops = np.round(np.cumsum(shares) / shares.sum() * size).astype(np.int64)
        place = np.searchsorted(stops, np.arange(size), side="right")
        labels = np.zeros(size, dtype=np.int8)
        positives = max(EVALUABLE, round(self.positive_rate * size))
        labels[keys.sample_indices(size, positives, seed, "labels", part)] = 1
        inputs = keys.numpy_generator(seed, "noise", part).standard_normal((size, self.features), dtype=np.float32)
        # State by state and in place: one row of offsets per row of inputs would double the memory.
        for state, stop in enumerate(stops):
            inputs[(stops[state - 1] if state else 0) : stop] += offsets[state]
        inputs[labels == 1] += step
        return Rows(inputs, labels, np.array(STATES)[place])
