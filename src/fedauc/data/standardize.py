"""Columns to mean 0 and standard deviation 1 on the training part."""

from __future__ import annotations

import numpy as np

from fedauc.data.dataset import Rows, Table


def standardize(table: Table) -> Table:
    """Shift and scale every part by the training part's mean and deviation; a constant column is only shifted.

    Results are float32; moments are taken in float64.
    """
    values = np.asarray(table.train.inputs, dtype=np.float64)
    # Rounding can give a constant column a tiny deviation, so it is told by its range.
    constant = values.max(axis=0) == values.min(axis=0)
    mean, deviation = values.mean(axis=0), np.where(constant, 1.0, values.std(axis=0))

    def apply(rows: Rows) -> Rows:
        return rows._replace(inputs=((np.asarray(rows.inputs, np.float64) - mean) / deviation).astype(np.float32))

    validation = None if table.validation is None else apply(table.validation)
    return table._replace(train=apply(table.train), validation=validation, test=apply(table.test))
