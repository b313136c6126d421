"""How well a model ranks the rows of each site and of each group: AUC with DeLong's interval, the worst first."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedauc.metrics import auc, delong_interval


class SiteQuality(NamedTuple):
    """The test rows of a site or group, and its AUC with interval; `note` says why a number is missing."""

    name: str
    rows: int
    positives: int
    auc: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


def measure_sites(labels: np.ndarray, scores: np.ndarray, owners: np.ndarray) -> list[SiteQuality]:
    """One line per owner of test rows, the lowest AUC first; those without an AUC come last.

    >>> lines = measure_sites(np.array([0, 1, 1, 0, 1]), np.array([2, 7, 9, 5, 4]), np.array(["a", "a", "b", "c", "c"]))
    >>> [(line.name, line.auc) for line in lines], lines[-1].note
    ([('c', 0.0), ('a', 1.0), ('b', None)], 'no negatives')
    """
    names, members = np.unique(owners.astype(str), return_inverse=True)
    order = np.argsort(members, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(members[order])) + 1)
    lines = [_measure_site(name, labels[rows], scores[rows]) for name, rows in zip(names.tolist(), parts, strict=True)]
    return sorted(lines, key=lambda line: (math.inf if line.auc is None else line.auc, line.name))


def _measure_site(name: str, labels: np.ndarray, scores: np.ndarray) -> SiteQuality:
    rows, positives = len(labels), int(np.sum(labels == 1))
    if positives in (0, rows):
        return SiteQuality(name, rows, positives, None, note="no positives" if positives == 0 else "no negatives")
    if min(positives, rows - positives) < 2:
        return SiteQuality(name, rows, positives, auc(labels, scores), note="too few rows for an interval")
    interval = delong_interval(labels, scores)
    return SiteQuality(name, rows, positives, interval.estimate, interval.low, interval.high)
