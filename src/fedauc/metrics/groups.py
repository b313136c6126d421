"""The AUC within each group or client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedauc.metrics.ranks import check_rows, mid_ranks, to_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def group_auc(labels: ArrayLike, scores: ArrayLike, groups: ArrayLike) -> dict[Any, float | None]:
    """The AUC within each group (or client), by sorted key; None where a group lacks a class.

    >>> group_auc([0, 1, 1, 0, 1], [0.2, 0.7, 0.9, 0.5, 0.4], [7, 7, 2, 3, 3])
    {2: None, 3: 0.0, 7: 1.0}
    """
    positive, values = check_rows(labels, scores)
    row_groups = to_numpy(groups)
    if row_groups.shape != values.shape:
        raise ValueError(f"groups have shape {row_groups.shape}, scores {values.shape}; give one group per row")
    keys, codes = np.unique(row_groups, return_inverse=True)
    sizes = np.bincount(codes)
    # One integer key per (group, score) turns the ranks of all groups into a single sort.
    joint = codes * len(values) + np.unique(values, return_inverse=True)[1]
    ranks = mid_ranks(joint) - (np.cumsum(sizes) - sizes)[codes]
    positives = np.bincount(codes, weights=positive)
    wins = np.bincount(codes, weights=ranks * positive) - positives * (positives + 1) / 2
    pairs = positives * (sizes - positives)
    areas = wins / np.maximum(pairs, 1)
    return {key: area if count else None for key, area, count in zip(keys.tolist(), areas.tolist(), pairs, strict=True)}
