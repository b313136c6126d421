"""Standardising columns to mean 0 and standard deviation 1 on the training part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedauc.data.dataset import Rows, TableParts
from fedauc.data.features import FeatureEncoder
from fedauc.data.io.memory import row_blocks

BLOCK = 1 << 20
"""How many values are processed at once: 8 MiB in float64."""


def standardize_table(table: TableParts, names: Sequence[str] = ()) -> TableParts:
    """Standardise every part by the training part's mean and deviation; a constant column is only shifted.

    Results are float32; moments are computed in float64. `names` are those of the columns; with them the result has an
    encoder, which does the same to other rows.
    """
    mean, deviation = column_moments(np.asarray(table.train.inputs))

    def standardize(rows: Rows) -> Rows:
        inputs = np.asarray(rows.inputs)
        scaled = np.empty(inputs.shape, dtype=np.float32)
        for block in row_blocks(inputs.shape, BLOCK):
            scaled[block] = scale_rows(inputs[block], mean, deviation)
        return rows._replace(inputs=scaled)

    validation = None if table.validation is None else standardize(table.validation)
    parts = table._replace(train=standardize(table.train), validation=validation, test=standardize(table.test))
    return parts._replace(encoder=FeatureEncoder.of_numbers(names, mean, deviation)) if names else parts


def scale_rows(inputs: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Rows shifted and scaled, in float64."""
    scaled: np.ndarray = (np.asarray(inputs, dtype=np.float64) - mean) / deviation
    return scaled


def column_moments(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each column's mean and standard deviation, the latter 1 where the column is constant."""
    parts = [inputs[block] for block in row_blocks(inputs.shape, BLOCK)]
    mean = sum(part.sum(axis=0, dtype=np.float64) for part in parts) / len(inputs)
    squares = sum(np.square(np.asarray(part, dtype=np.float64) - mean).sum(axis=0) for part in parts)
    # Rounding can give a constant column a tiny deviation, so it is recognised by its range.
    constant = inputs.max(axis=0) == inputs.min(axis=0)
    return mean, np.where(constant, 1.0, np.sqrt(squares / len(inputs)))
