"""Gaussian classes whose means differ from client to client: a dataset with a known best AUC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data import bounds
from fedauc.data.dataset import Dataset, Rows, Table


@dataclass(frozen=True)
class Synthetic(Dataset):
    """x = (y - 1/2) * separation * u + shift * c_m + noise, with a common direction u and an offset c_m ~ N(0, I) each.

    Without shift the best AUC is Phi(separation / sqrt 2); shift moves whole clients, so that pairs across clients are
    ranked worse: Phi(separation / sqrt(2 (1 + shift^2))). Validation and test are fresh draws of the training size.
    """

    name: ClassVar[str] = "synthetic"
    about: ClassVar[str] = "Gaussian classes with client shift, drawn from the seed; nothing to cite"

    clients: int = 20
    rows_per_client: int = 100
    features: int = 10
    positive_rate: float = 0.1
    shift: float = 0.5
    separation: float = 2.0

    def __post_init__(self) -> None:
        for name in ("clients", "rows_per_client", "features"):
            bounds.whole(name, getattr(self, name))
        bounds.fraction("positive_rate", self.positive_rate)
        bounds.nonnegative("shift", self.shift)
        bounds.nonnegative("separation", self.separation)
        if self.clients * self.rows_per_client < 2:
            raise ValueError("rows_per_client is 1 for 1 client; an AUC needs two rows: raise either")

    def load(self, seed: int) -> Table:
        """Draw the direction and the clients' offsets once, then three independent parts."""
        direction = keys.numpy_generator(seed, "direction").standard_normal(self.features)
        step = (self.separation / np.linalg.norm(direction) * direction).astype(np.float32)
        offsets = keys.numpy_generator(seed, "offsets").standard_normal((self.clients, self.features), dtype=np.float32)
        offsets *= np.float32(self.shift)
        train, validation, test = (self._draw(step, offsets, seed, part) for part in ("train", "validation", "test"))
        return Table(train, validation, test, f"{len(train.labels)} drawn rows of {self.clients} clients to train on")

    def _draw(self, step: np.ndarray, offsets: np.ndarray, seed: int, part: str) -> Rows:
        size = self.clients * self.rows_per_client
        client = np.repeat(np.arange(self.clients), self.rows_per_client)
        positives = min(max(1, round(self.positive_rate * size)), size - 1)
        labels = np.zeros(size, dtype=np.int8)
        labels[keys.sample_indices(size, positives, seed, "labels", part)] = 1
        noise = keys.numpy_generator(seed, "noise", part).standard_normal((size, self.features), dtype=np.float32)
        inputs = noise + offsets[client] + (labels[:, None] - np.float32(0.5)) * step
        return Rows(inputs, labels, client)
