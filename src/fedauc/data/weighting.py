"""How much each client's data counts: the scale of its class terms in the mean over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from fedauc.discovery import lookup
from fedauc.interfaces import Census

WEIGHTINGS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = MappingProxyType(
    {
        "clients": lambda rows, clients: np.where(rows > 0, clients / max(int(np.count_nonzero(rows)), 1), 0.0),
        "pooled": lambda rows, clients: np.asarray(clients * rows / max(rows.sum(), 1), dtype=np.float64),
        "paper": lambda rows, clients: (rows > 0).astype(np.float64),
    }
)
"""Each maps the number of rows of a class that every client holds, and the number N of non-empty clients, to scales."""


def class_scales(census: Census, weighting: str) -> np.ndarray:
    """Scales `[N, 2]` of each client's mean over its positives and over its negatives.

    The mean over the N non-empty clients of scale * class mean is, for a class held by N_c clients and n rows:
    `clients`  the mean over the clients that hold the class   (scale N / N_c)
    `pooled`   the mean over all rows of the class             (scale N n_m / n)
    `paper`    the plain mean, an absent class counting zero   (scale 1)

    >>> class_scales(Census(np.array([1, 0]), np.array([1, 3])), "clients").tolist()
    [[2.0, 1.0], [0.0, 1.0]]
    """
    scale = lookup("weighting", weighting, WEIGHTINGS)
    clients = _count_nonempty(census)
    return np.stack([scale(census.positives, clients), scale(census.negatives, clients)], axis=1)


def row_scales(census: Census, weighting: str) -> np.ndarray:
    """Scales `[N]` of each client's mean over all its rows, by the same rules, as if all rows were one class."""
    return lookup("weighting", weighting, WEIGHTINGS)(census.positives + census.negatives, _count_nonempty(census))


def _count_nonempty(census: Census) -> int:
    return int(np.count_nonzero(census.positives + census.negatives))
