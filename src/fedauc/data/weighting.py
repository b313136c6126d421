"""How much each client's data counts: the scale of its class terms in the mean over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from fedauc.class_totals import ClassTotalsEstimate
from fedauc.data.classes import list_counts
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


def class_scales(census: Census, weighting: str, totals: ClassTotalsEstimate | None = None) -> np.ndarray:
    """Scales `[N, 2]` of each client's mean over its positives and over its negatives; `[N, C]` for several classes.

    The mean over the N non-empty clients of scale * class mean is, for a class held by N_c clients and n rows:
    `clients`  the mean over the clients that hold the class   (scale N / N_c)
    `pooled`   the mean over all rows of the class             (scale N n_m / n)
    `paper`    the plain mean, an absent class counting zero   (scale 1)

    With `totals`, which a private run releases, N, N_c and n are theirs, and n_m is at most their `max_rows`; a
    client's scale then depends on the totals and its own rows alone.

    >>> class_scales(Census(np.array([1, 0]), np.array([1, 3])), "clients").tolist()
    [[2.0, 1.0], [0.0, 1.0]]
    """
    scale = lookup("weighting", weighting, WEIGHTINGS)
    if totals is not None:
        return np.stack([_scale_by_totals(census[side], weighting, totals, side) for side in (0, 1)], axis=1)
    clients = _count_nonempty(census)
    return np.stack([scale(counts, clients) for counts in list_counts(census)], axis=1)


def row_scales(census: Census, weighting: str, totals: ClassTotalsEstimate | None = None) -> np.ndarray:
    """Scales `[N]` of each client's mean over all its rows, by the same rules, as if all rows were one class.

    With `totals`, a client counts at most `max_rows` rows of each class. `clients` needs no totals here, since all N
    clients hold rows.
    """
    scale = lookup("weighting", weighting, WEIGHTINGS)
    if totals is None:
        return scale(census.positives + census.negatives, _count_nonempty(census))
    if weighting == "pooled":
        rows, max_rows = _require_rows(totals)
        counted = np.minimum(census.positives, max_rows) + np.minimum(census.negatives, max_rows)
        return np.asarray(totals.clients * counted / sum(rows), dtype=np.float64)
    return np.asarray(census.positives + census.negatives > 0, dtype=np.float64)


def _scale_by_totals(counts: np.ndarray, weighting: str, totals: ClassTotalsEstimate, side: int) -> np.ndarray:
    """The scales `[N]` of one class from the totals of a private run; side 0 are the positives."""
    if weighting == "clients":
        if totals.holders is None:
            raise ValueError(
                "totals.holders is None; weighting 'clients' needs a number: release the holders of a class"
            )
        return np.where(counts > 0, totals.clients / totals.holders[side], 0.0)
    if weighting == "pooled":
        rows, max_rows = _require_rows(totals)
        return np.asarray(totals.clients * np.minimum(counts, max_rows) / rows[side], dtype=np.float64)
    return (counts > 0).astype(np.float64)


def _require_rows(totals: ClassTotalsEstimate) -> tuple[tuple[float, float], int]:
    if totals.rows is None or totals.max_rows is None:
        values = f"totals.rows is {totals.rows}, totals.max_rows {totals.max_rows}"
        raise ValueError(f"{values}; weighting 'pooled' needs numbers: release the rows of a class")
    return totals.rows, totals.max_rows


def _count_nonempty(census: Census) -> int:
    return int(np.count_nonzero(census.positives + census.negatives))
