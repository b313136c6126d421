"""The work every contender does, as plain arrays in one file, so that any environment with numpy can read it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """A workload: rows of `input_shape`, `local_steps` steps of `batch` rows, `rounds` rounds per measurement."""

    input_shape: tuple[int, ...]
    rows_per_client: int
    local_steps: int
    batch: int
    learning_rate: float
    rounds: int


CLIENTS, PER_ROUND = 100, 10

WORKLOADS = {
    "linear": Shape((64,), 256, 32, 32, 0.05, 20),
    "mlp": Shape((64,), 256, 32, 32, 0.05, 20),
    "cnn": Shape((3, 32, 32), 64, 8, 16, 0.05, 2),
}


class Work(NamedTuple):
    """What a contender is handed. Row numbers index `inputs` and `labels`; the mean over a cohort is unweighted."""

    workload: str
    inputs: np.ndarray
    """Float32 `[n, *input_shape]`."""
    labels: np.ndarray
    """Float32 0 or 1, `[n]`."""
    clients: np.ndarray
    """Int64 `[R, M]`: who takes part in each round."""
    rows: np.ndarray
    """Int64 `[R, M, I, B]`: the rows of each local step."""
    start: np.ndarray
    """Float32 `[d]`: the flat weights, in the order of the torch module's parameters."""
    learning_rate: float

    @property
    def shape(self) -> Shape:
        """The workload's numbers."""
        return WORKLOADS[self.workload]

    def save(self, path: Path) -> None:
        """Write to one `.npz`."""
        fields = self._asdict()
        np.savez(path, **fields)

    @staticmethod
    def load(path: Path) -> Work:
        """Read what `save` wrote."""
        with np.load(path) as held:
            arrays = {name: held[name] for name in Work._fields}
        arrays["workload"] = str(arrays["workload"])
        arrays["learning_rate"] = float(arrays["learning_rate"])
        return Work(**arrays)


def make_examples(workload: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels and each row's client: noise around a hidden direction, a fifth of the rows positive."""
    shape = WORKLOADS[workload]
    rng = np.random.default_rng(0)
    count = CLIENTS * shape.rows_per_client
    labels = (rng.random(count) < 0.2).astype(np.float32)
    direction = rng.normal(size=shape.input_shape).astype(np.float32) / np.sqrt(np.prod(shape.input_shape))
    inputs = rng.normal(size=(count, *shape.input_shape)).astype(np.float32)
    inputs += 2 * np.multiply.outer(labels, direction).astype(np.float32)
    return inputs, labels, np.repeat(np.arange(CLIENTS), shape.rows_per_client)
