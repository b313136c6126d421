"""The verification AUC of embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedauc.metrics.ranks import auc, to_numpy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def pair_auc(embeddings: ArrayLike, labels: ArrayLike, limit: int = 2000) -> float:
    """The verification AUC of embeddings `[n, e]`: are rows of the same label closer than rows of different labels?

    The score of a pair is minus its Euclidean distance, and its label says whether both rows share a label; there may
    be any number of classes. All pairs count when n <= `limit`. Otherwise at most `limit` rows are used: two of each
    class (or its only row), and the others in proportion to the remaining rows of the classes, evenly spaced in the
    given order within each class, so that the same rows are used every time.

    >>> pair_auc([[0.0], [0.1], [5.0], [5.2]], [0, 0, 1, 1])
    1.0
    """
    points = to_numpy(embeddings).astype(np.float64)
    names = to_numpy(labels)
    if points.ndim != 2 or names.shape != points.shape[:1]:
        raise ValueError(f"embeddings have shape {points.shape}, labels {names.shape}; they must be (n, e) and (n,)")
    if not np.isfinite(points).all():
        raise ValueError("embeddings hold NaN or infinite values; distances need finite ones: check the model")
    classes, codes = np.unique(names, return_inverse=True)
    if not 1 < len(classes) < len(names):
        raise ValueError(f"labels name {len(classes)} classes in {len(names)} rows; pairs need two classes, one twice")
    rows = _choose_rows(codes, limit) if len(codes) > limit else np.arange(len(codes))
    points, codes = points[rows], codes[rows]
    same_label = np.concatenate([codes[row + 1 :] == code for row, code in enumerate(codes)])
    return auc(same_label, _pair_closeness(points))


def _pair_closeness(points: np.ndarray) -> np.ndarray:
    """Minus the squared distance of each pair of rows, which orders pairs as the distance does.

    It is computed from differences, because the rounding of inner products would break the ties of equal rows.
    """
    differences = (points[row + 1 :] - point for row, point in enumerate(points))
    return -np.concatenate([np.einsum("ij,ij->i", pairs, pairs) for pairs in differences])


def _choose_rows(codes: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` rows: two of each class, and the others in proportion, evenly spaced within each class."""
    counts = np.bincount(codes)
    minimum = np.minimum(counts, 2)
    spare = limit - int(minimum.sum())
    if spare < 0:
        raise ValueError(f"limit is {limit}; it must be at least {minimum.sum()}, two rows per class: raise limit")
    chosen = minimum + spare * (counts - minimum) // (len(codes) - int(minimum.sum()))
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([rows[np.arange(k) * len(rows) // k] for rows, k in zip(members, chosen, strict=True)])
