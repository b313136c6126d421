"""Statistics that a private run releases once: class totals for the weighting, and moments for standardisation.

All guarantees are at the level of clients: two federations are neighbours if they differ in the data of one client,
which is absent in one of them. The number N of clients that hold data is public, as is who they are; a schedule shows
both. Each release is a sum over clients of vectors with L2 norm at most 1, so its L2 sensitivity is 1, plus independent
Gaussian noise of standard deviation σ, the noise multiplier: one Gaussian mechanism with multiplier σ to account for.
What is computed from the noised sum costs nothing more.

`draw_normal(count)` gives `count` standard normal numbers. The privacy depends on it: they must be fresh for each
release and unknown to whoever sees the result. A multiplier of 0 releases the exact values, without any privacy; an
infinite one releases nothing, and the public defaults that each function names are returned. Neither draws numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from fedauc.class_totals import ClassTotalsEstimate
from fedauc.discovery import lookup
from fedauc.interfaces import Census

DrawNormal: TypeAlias = "Callable[[int], np.ndarray]"
"""Gives as many independent standard normal numbers as asked for."""

DEVIATION_SHARE = 0.01
"""No column's standard deviation is estimated below this share of its bound."""


def noised_class_totals(
    census: Census, weighting: str, multiplier: float, max_rows: int, draw_normal: DrawNormal
) -> ClassTotalsEstimate:
    """The class totals that a weighting needs, with Gaussian noise at the level of clients.

    `clients` needs the numbers of clients that hold a class. A client contributes (1[n₊ > 0], 1[n₋ > 0]) / √2, and each
    total has noise of standard deviation √2·σ. `pooled` needs the numbers of rows of a class. A client contributes
    (min(n₊, R), min(n₋, R)) / (√2·R) with R = `max_rows`, and each total has noise √2·R·σ; larger clients count as if
    they had R rows of the class. `paper` needs nothing, and nothing is released.

    Totals are at least 1, and at most N clients or N·R rows. These upper limits are also the public defaults for an
    infinite multiplier.

    >>> census = Census(np.array([2, 0, 90]), np.array([5, 5, 5]))
    >>> noised_class_totals(census, "pooled", 0.0, 10, np.zeros)
    ClassTotalsEstimate(clients=3, holders=None, rows=(12.0, 15.0), max_rows=10)
    """
    check_multiplier(multiplier)
    clients = int(np.count_nonzero(census.positives + census.negatives))
    counts, largest = _count_for_totals(census, weighting, max_rows)
    if weighting == "paper":
        return ClassTotalsEstimate(clients)
    most = float(clients * largest)
    if math.isinf(multiplier):
        totals = np.full(2, most)
    else:
        totals = add_normal_noise(counts.sum(axis=0), multiplier * math.sqrt(2) * largest, draw_normal)
    positives, negatives = np.clip(totals, 1.0, max(most, 1.0)).tolist()
    if weighting == "clients":
        return ClassTotalsEstimate(clients, holders=(positives, negatives))
    return ClassTotalsEstimate(clients, rows=(positives, negatives), max_rows=max_rows)


def class_total_contributions(census: Census, weighting: str, max_rows: int) -> np.ndarray:
    """What each client adds to the class totals of `noised_class_totals`: rows `[N, 2]` of norm at most 1.

    >>> census = Census(np.array([2, 0, 90]), np.array([5, 5, 5]))
    >>> (class_total_contributions(census, "pooled", 10) * math.sqrt(2)).round(3).tolist()
    [[0.2, 0.5], [0.0, 0.5], [1.0, 0.5]]
    """
    counts, largest = _count_for_totals(census, weighting, max_rows)
    return counts / (math.sqrt(2) * largest)


def _count_for_totals(census: Census, weighting: str, max_rows: int) -> tuple[np.ndarray, int]:
    """What each client counts of each class `[N, 2]`, and the most that it can count of a class."""
    if weighting == "pooled" and not max_rows >= 1:
        raise ValueError(f"max_rows is {max_rows}; it must be at least 1: give what most clients hold of a class")
    largest = {"clients": 1, "pooled": max_rows, "paper": 0}
    most = lookup("weighting", weighting, largest)
    counts = np.minimum(np.stack([census.positives, census.negatives], axis=1), most)
    return counts.astype(np.float64), max(most, 1)


def noised_moments(
    inputs: np.ndarray, client_of_row: np.ndarray, bound: float | np.ndarray, multiplier: float, draw_normal: DrawNormal
) -> tuple[np.ndarray, np.ndarray]:
    """Each column's mean `[c]` and standard deviation `[c]`, with Gaussian noise at the level of clients.

    The sums over clients of `moment_contributions` give, with n the number of clients, the mean over clients of their
    means and of their mean squares: every client counts the same, whatever its rows. `bound`, a number or `[c]`, is the
    public range [-bound, bound] to which values are clipped.

    Each mean has noise of standard deviation τ·bound, and each mean square τ·bound², with τ = σ·√(1 + 5c/4) / n. A
    deviation below √τ·bound can therefore not be told from 0. Deviations are at least √τ·bound and at least 0.01·bound,
    so that noise cannot stretch a nearly constant column, and at most bound. The public defaults for an infinite
    multiplier are mean 0 and deviation bound.

    >>> inputs, clients = np.array([[1.0], [3.0], [5.0], [70.0]]), np.array([0, 0, 1, 2])
    >>> mean, deviation = noised_moments(inputs, clients, 10.0, 0.0, np.zeros)
    >>> mean.round(3).tolist(), deviation.round(3).tolist()  # of 2, 5 and 10; the mean squares are 5, 25 and 100
    ([5.667], [3.35])
    """
    check_multiplier(multiplier)
    contributions = moment_contributions(inputs, client_of_row, bound)
    limits = _check_bound(bound, inputs.shape[1])
    if math.isinf(multiplier):
        return np.zeros_like(limits), limits
    noised = add_normal_noise(contributions.sum(axis=0), multiplier, draw_normal)
    return moments_from_sum(noised, limits, multiplier)


def moment_contributions(inputs: np.ndarray, client_of_row: np.ndarray, bound: float | np.ndarray) -> np.ndarray:
    """What each client adds to the moments of `inputs` `[n, c]`: rows `[M, 2c + 1]` of norm at most 1.

    With x the client's values, clipped and divided by the bound, they are (u, w - 1/2, 1) / √(1 + 5c/4), where u and w
    are the means over its rows of x and of x². The norm is at most 1: by Jensen's inequality u² ≤ w, and w ≤ 1, so that
    u² + (w - 1/2)² ≤ w² + 1/4 ≤ 5/4 in each column. Without the shift by 1/2 the noise would be up to a quarter larger.
    The M clients are those in `client_of_row`, in ascending order.
    """
    columns = inputs.shape[1]
    limits = _check_bound(bound, columns)
    names, owner = np.unique(np.asarray(client_of_row), return_inverse=True)
    if owner.shape != inputs.shape[:1]:
        shapes = f"inputs have shape {inputs.shape}, client_of_row {owner.shape}"
        raise ValueError(f"{shapes}; they must be (n, c) and (n,): give the client of every row")
    sizes = np.bincount(owner, minlength=len(names))
    contributions = np.ones((len(names), 2 * columns + 1))
    # Column by column, since the table may be much larger than what is left of the memory.
    for column, limit in enumerate(limits.tolist()):
        values = np.clip(np.asarray(inputs[:, column], dtype=np.float64) / limit, -1.0, 1.0)
        if np.isnan(values).any():
            raise ValueError(f"column {column} holds NaN; moments need numbers: replace missing values first")
        contributions[:, column] = np.bincount(owner, values, minlength=len(names)) / sizes
        contributions[:, columns + column] = np.bincount(owner, np.square(values), minlength=len(names)) / sizes - 0.5
    return contributions / _moment_norm(columns)


def moments_from_sum(noised: np.ndarray, bound: float | np.ndarray, multiplier: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation from the noised sum `[2c + 1]` of `moment_contributions`, as `noised_moments` gives them."""
    columns = len(noised) // 2
    limits, norm = _check_bound(bound, columns), _moment_norm(columns)
    sums = noised * norm
    clients = max(float(sums[-1]), 1.0)
    mean = np.clip(sums[:columns] / clients, -1.0, 1.0)
    squares = sums[columns:-1] / clients + 0.5
    smallest = max(DEVIATION_SHARE**2, multiplier * norm / clients)
    variance = np.clip(squares - np.square(mean), min(smallest, 1.0), 1.0)
    return limits * mean, limits * np.sqrt(variance)


def add_normal_noise(values: np.ndarray, deviation: float, draw_normal: DrawNormal) -> np.ndarray:
    """The values with independent Gaussian noise; nothing is drawn where the deviation is 0."""
    if deviation == 0:
        return np.array(values, dtype=np.float64)
    noise = np.asarray(draw_normal(values.size), dtype=np.float64)
    if noise.shape != (values.size,):
        raise ValueError(
            f"draw_normal gave shape {noise.shape}; it must be ({values.size},): draw as many as asked for"
        )
    return np.asarray(values + deviation * noise.reshape(values.shape))


def check_multiplier(multiplier: float) -> None:
    """Refuse a noise multiplier that is negative or NaN."""
    if not multiplier >= 0:
        raise ValueError(f"multiplier is {multiplier}; it must be at least 0: take it from the privacy account")


def _moment_norm(columns: int) -> float:
    return math.sqrt(1 + 1.25 * columns)


def _check_bound(bound: float | np.ndarray, columns: int) -> np.ndarray:
    limits = np.asarray(bound, dtype=np.float64)
    if limits.shape not in {(), (columns,)} or not (np.isfinite(limits) & (limits > 0)).all():
        raise ValueError(f"bound is {bound}; it must be a number above 0, or {columns} of them: give a public range")
    return np.broadcast_to(limits, (columns,)).copy()
