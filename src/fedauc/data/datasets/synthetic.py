"""Gaussian classes whose means differ from client to client: a dataset with a known best AUC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.fields import check_fields, option


@dataclass(frozen=True)
class Synthetic(Dataset):
    """x = (y - 1/2) * separation * u + shift * c_m + noise, with a direction u and offsets c_m ~ N(0, I) of clients.

    Without shift the best AUC is Phi(separation / sqrt 2). Shift moves all rows of a client, so that pairs across
    clients are ranked worse: Phi(separation / sqrt(2 (1 + shift^2))). Validation and test are independent samples of
    the training size.
    """

    name: ClassVar[str] = "synthetic"
    about: ClassVar[str] = "Gaussian classes with client shift, generated from the seed; nothing to cite"

    clients: int = option(20, "Number of clients.", at_least=1)
    rows_per_client: int = option(100, "Training rows of each client.", at_least=1)
    features: int = option(10, "Number of features.", at_least=1)
    positive_rate: float = option(0.1, "Fraction of the rows that are positive.", above=0, below=1)
    shift: float = option(0.5, "Standard deviation of the clients' offsets.", at_least=0)
    separation: float = option(2.0, "Distance between the means of the classes.", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.clients * self.rows_per_client < 2:
            raise ValueError("rows_per_client is 1 for 1 client; an AUC needs two rows: raise either")

    def load(self, seed: int) -> Table:
        """Draw the direction and the clients' offsets once, then three independent parts."""
        step, offsets = draw_means((self.clients, self.features), self.separation, self.shift, seed)
        train, validation, test = (
            self._generate_rows(step, offsets, seed, part) for part in ("train", "validation", "test")
        )
        note = f"{len(train.labels)} synthetic rows of {self.clients} clients to train on"
        return Table(train, validation, test, note)

    def _generate_rows(self, step: np.ndarray, offsets: np.ndarray, seed: int, part: str) -> Rows:
        size = self.clients * self.rows_per_client
        client = np.repeat(np.arange(self.clients), self.rows_per_client)
        positives = min(max(1, round(self.positive_rate * size)), size - 1)
        labels = np.zeros(size, dtype=np.int8)
        labels[keys.sample_indices(size, positives, seed, "labels", part)] = 1
        noise = keys.numpy_generator(seed, "noise", part).standard_normal((size, self.features), dtype=np.float32)
        inputs = noise + offsets[client] + (labels[:, None] - np.float32(0.5)) * step
        return Rows(inputs, labels, client)


def draw_means(shape: tuple[int, int], separation: float, shift: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The difference of the class means `[features]`, and the offset of each client `[clients, features]`."""
    direction = keys.numpy_generator(seed, "direction").standard_normal(shape[1])
    step = (separation / np.linalg.norm(direction) * direction).astype(np.float32)
    offsets = keys.numpy_generator(seed, "offsets").standard_normal(shape, dtype=np.float32)
    offsets *= np.float32(shift)
    return step, offsets
