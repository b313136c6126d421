"""Score histograms of held-out rows with noise: all that a private evaluation releases about its scores."""

from __future__ import annotations

import math

import numpy as np

from fedauc.privacy.statistics import DrawNormal, add_normal_noise, check_multiplier

FINE_BINS = 4096
"""The bins of an evaluation without noise. Coarser bins are unions of them, so their number is a power of two."""


def private_histogram(
    scores: np.ndarray,
    labels: np.ndarray,
    client_of_row: np.ndarray,
    clients: int,
    bins: int,
    max_norm: float,
    multiplier: float,
    draw_normal: DrawNormal,
) -> tuple[np.ndarray, float]:
    """Counts `[2, bins]` of scores, negatives first, with noise at the level of clients, and the noise's deviation.

    The counts are those of `clipped_histogram`, whose L2 sensitivity is C = `max_norm`, plus independent Gaussian noise
    of standard deviation σ·C per entry: one Gaussian mechanism with noise multiplier σ. The number of rows is not
    released; the noised counts tell it. With σ = 0 the counts are exact; with σ = ∞ they are 0, and nothing is drawn.

    >>> draw = np.random.Generator(np.random.Philox(1))
    >>> labels, client = np.arange(4000) % 4 == 0, np.arange(4000) % 200
    >>> scores = draw.standard_normal(4000) + 1.5 * labels  # their AUC is about 0.86
    >>> counts, noise = private_histogram(scores, labels, client, 200, 32, 12.0, 1.0, draw.standard_normal)
    >>> counts.shape, noise
    ((2, 32), 12.0)
    >>> from fedauc.metrics.histogram_auc import histogram_auc
    >>> tuple(round(x, 2) for x in histogram_auc(counts, noise))
    (0.87, 0.8, 0.95, 0.04)
    """
    check_multiplier(multiplier)
    counts = clipped_histogram(scores, labels, client_of_row, clients, bins, max_norm)
    if math.isinf(multiplier):
        return np.zeros_like(counts), math.inf
    deviation = multiplier * max_norm
    return add_normal_noise(counts, deviation, draw_normal), deviation


def clipped_histogram(
    scores: np.ndarray, labels: np.ndarray, client_of_row: np.ndarray, clients: int, bins: int, max_norm: float
) -> np.ndarray:
    """The sum over clients of their counts `[2, bins]`, those of a client scaled down to L2 norm at most `max_norm`.

    The bins are equal bins of h / (1 + |h|) for scores h; divide the scores by a public scale if they are far from 1.
    A client's vector x of 2·bins counts becomes x · min(1, C / ‖x‖₂) with C = `max_norm`, so that adding or removing a
    client moves the sum by at most C. A site computes its own contribution as a federation of one client.

    What scaling does to the AUC. All rows of a client are scaled by one factor, so the shape of its histograms and its
    ratio of the classes stay; but a client of norm ‖x‖ > C counts as if it had only the share C / ‖x‖ of its rows. If
    large clients rank better or worse than small ones, or have other shares of positives, this is not the AUC over all
    rows, and no interval shows it. A larger C scales down fewer clients and adds more noise. A client of r rows in k
    cells has a norm between r / √k, if they are spread evenly, and r, if nearly all are in one cell.
    """
    if bins < 1 or FINE_BINS % bins:
        raise ValueError(f"bins is {bins}; it must divide {FINE_BINS}: use a power of two, for example 32")
    if not 0 < max_norm < math.inf:
        raise ValueError(f"max_norm is {max_norm}; it must be a number above 0: give what most clients' counts have")
    values, positive, owner = _check_scores(scores, labels, client_of_row, clients)
    # Infinite scores belong to the outermost bins, but would be mapped to NaN.
    values = np.clip(values, -1e300, 1e300)
    bin_of_row = ((values / (1 + np.abs(values)) + 1) / 2 * bins).astype(np.int64).clip(0, bins - 1)
    cells, counts = np.unique((owner * 2 + positive) * bins + bin_of_row, return_counts=True)
    owner_of_cell = cells // (2 * bins)
    norms = np.sqrt(np.bincount(owner_of_cell, np.square(counts, dtype=np.float64), minlength=clients))
    factors = np.minimum(1.0, max_norm / np.maximum(norms, 1.0))
    summed = np.bincount(cells % (2 * bins), counts * factors[owner_of_cell], minlength=2 * bins)
    return np.asarray(summed.reshape(2, bins), dtype=np.float64)


def _check_scores(
    scores: np.ndarray, labels: np.ndarray, client_of_row: np.ndarray, clients: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores, whether rows are positive, and their clients, as arrays `[n]`."""
    values, classes, owner = np.asarray(scores, dtype=np.float64), np.asarray(labels), np.asarray(client_of_row)
    if values.ndim != 1 or not values.shape == classes.shape == owner.shape:
        shapes = f"scores have shape {values.shape}, labels {classes.shape}, client_of_row {owner.shape}"
        raise ValueError(f"{shapes}; all must be (n,): give one of each per row")
    if np.isnan(values).any():
        raise ValueError(
            f"scores hold NaN, first in row {np.isnan(values).argmax()}; a bin needs numbers: check the model"
        )
    unknown = (classes != 0) & (classes != 1)
    if unknown.any():
        raise ValueError(f"labels hold {classes[unknown][0]}; they must be 0 or 1: map the positive class to 1")
    if len(owner) and not (owner.min() >= 0 and owner.max() < clients):
        values_of_owner = f"client_of_row holds {owner.min()} to {owner.max()}"
        raise ValueError(f"{values_of_owner}; it must be at least 0 and below clients = {clients}: number the clients")
    return values, (classes == 1).astype(np.int64), owner.astype(np.int64)
