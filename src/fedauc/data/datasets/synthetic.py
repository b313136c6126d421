"""Gaussian classes whose means differ from client to client: a known best AUC, and the size of the Medicare data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedauc import keys
from fedauc.data.checks import MIN_ROWS_PER_CLASS
from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.data.datasets.medicare import STATES
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

    def load(self, seed: int) -> TableParts:
        """Draw the direction and the clients' offsets once, then three independent parts."""
        step, offsets = _draw_means((self.clients, self.features), self.separation, self.shift, seed)
        train, validation, test = (
            self._generate_rows(step, offsets, seed, part) for part in ("train", "validation", "test")
        )
        note = f"{len(train.labels)} synthetic rows of {self.clients} clients to train on"
        return TableParts(train, validation, test, note)

    def _generate_rows(self, step: np.ndarray, offsets: np.ndarray, seed: int, part: str) -> Rows:
        size = self.clients * self.rows_per_client
        client = np.repeat(np.arange(self.clients), self.rows_per_client)
        positives = min(max(1, round(self.positive_rate * size)), size - 1)
        labels = np.zeros(size, dtype=np.int8)
        labels[keys.sample_indices(size, positives, seed, "labels", part)] = 1
        noise = keys.numpy_generator(seed, "noise", part).standard_normal((size, self.features), dtype=np.float32)
        inputs = noise + offsets[client] + (labels[:, None] - np.float32(0.5)) * step
        return Rows(inputs, labels, client)


@dataclass(frozen=True)
class SyntheticMedicare(Dataset):
    """SYNTHETIC: 4 million rows of 50 states, the k-th largest with 1/k of the largest's rows, 0.07 % positive.

    x = y * separation * u + shift * c_state + noise, as in `synthetic`. Validation and test are independent samples of
    a quarter of the rows each.
    """

    name: ClassVar[str] = "medicare-like"
    about: ClassVar[str] = "synthetic rows of the size and imbalance of the Medicare data; nothing to cite"
    caveat: ClassVar[str] = "SYNTHETIC medicare-like"

    rows: int = option(4_000_000, "Training rows of all states.", at_least=40 * len(STATES))
    features: int = option(32, "Number of features.", at_least=1)
    positive_rate: float = option(0.0007, "Fraction of the rows that are positive.", above=0, below=1)
    shift: float = option(0.3, "Standard deviation of the states' offsets.", at_least=0)
    separation: float = option(1.0, "Distance between the means of the classes.", at_least=0)

    def __post_init__(self) -> None:
        check_fields(self)

    def load(self, seed: int) -> TableParts:
        """Draw the direction and the states' offsets once, then three independent parts."""
        step, offsets = _draw_means((len(STATES), self.features), self.separation, self.shift, seed)
        sizes = {"train": self.rows, "validation": self.rows // 4, "test": self.rows // 4}
        train, validation, test = (self._generate_rows(step, offsets, size, seed, part) for part, size in sizes.items())
        note = f"{self.caveat}: {self.rows} synthetic rows of {len(STATES)} states to train on"
        return TableParts(train, validation, test, note)

    def _generate_rows(self, step: np.ndarray, offsets: np.ndarray, size: int, seed: int, part: str) -> Rows:
        shares = 1 / np.arange(1, len(STATES) + 1)
        stops = np.round(np.cumsum(shares) / shares.sum() * size).astype(np.int64)
        state_of_row = np.searchsorted(stops, np.arange(size), side="right")
        labels = np.zeros(size, dtype=np.int8)
        positives = max(MIN_ROWS_PER_CLASS, round(self.positive_rate * size))
        labels[keys.sample_indices(size, positives, seed, "labels", part)] = 1
        inputs = keys.numpy_generator(seed, "noise", part).standard_normal((size, self.features), dtype=np.float32)
        # State by state and in place: one row of offsets per row of inputs would double the memory.
        for state, stop in enumerate(stops):
            inputs[(stops[state - 1] if state else 0) : stop] += offsets[state]
        inputs[labels == 1] += step
        return Rows(inputs, labels, np.array(STATES)[state_of_row])


def _draw_means(shape: tuple[int, int], separation: float, shift: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The difference of the class means `[features]`, and the offset of each client `[clients, features]`."""
    direction = keys.numpy_generator(seed, "direction").standard_normal(shape[1])
    step = (separation / np.linalg.norm(direction) * direction).astype(np.float32)
    offsets = keys.numpy_generator(seed, "offsets").standard_normal(shape, dtype=np.float32)
    offsets *= np.float32(shift)
    return step, offsets
