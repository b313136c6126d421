"""Columns to mean 0 and standard deviation 1 on the training part."""

from __future__ import annotations

import numpy as np

from fedauc.data.blocks import row_blocks
from fedauc.data.dataset import Rows, Table

BLOCK = 1 << 20
"""How many values are worked on at once: 8 MiB in float64."""


def standardize(table: Table) -> Table:
    """Shift and scale every part by the training part's mean and deviation; a constant column is only shifted.

    Results are float32; moments are taken in float64.
    """
    mean, deviation = moments(np.asarray(table.train.inputs))

    def apply(rows: Rows) -> Rows:
        inputs = np.asarray(rows.inputs)
        scaled = np.empty(inputs.shape, dtype=np.float32)
        for block in row_blocks(inputs.shape, BLOCK):
            scaled[block] = scale(inputs[block], mean, deviation)
        return rows._replace(inputs=scaled)

    validation = None if table.validation is None else apply(table.validation)
    return table._replace(train=apply(table.train), validation=validation, test=apply(table.test))


def scale(inputs: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Rows shifted and scaled, in float64."""
    shifted: np.ndarray = (np.asarray(inputs, dtype=np.float64) - mean) / deviation
    return shifted


def moments(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each column's mean and deviation, the latter 1 where the column is constant."""
    parts = [inputs[block] for block in row_blocks(inputs.shape, BLOCK)]
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in parts) / len(inputs)
    squares = sum(np.square(np.asarray(part, dtype=np.float64) - mean).sum(axis=0) for part in parts)
    # Rounding can give a constant column a tiny deviation, so it is told by its range.
    constant = inputs.max(axis=0) == inputs.min(axis=0)
    return mean, np.where(constant, 1.0, np.sqrt(squares / len(inputs)))
