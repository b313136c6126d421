"""Membership inference against shared pools of scores: was a row among those whose scores were shared?

The adversary knows the model, a candidate row and its class, and therefore the score s of the row. It compares s with
the pool of that class. Larger statistics say "member"; their AUC over members and other rows is what the pool leaks
(0.5: nothing). `label_statistics` gives the two arrays that `fedauc.metrics.delong.delong_interval` takes:

    interval = delong_interval(*label_statistics(attack(members, ...), attack(others, ...)))
"""

from __future__ import annotations

import numpy as np


def attack_raw_pool(candidate_scores: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Minus the distance from each candidate's score `[n]` to the nearest score of its class in the pool `[p]`.

    A member's score is in the pool itself, so that its distance is 0, or the change of the model since the pool was
    made.

    >>> attack_raw_pool(np.array([0.0, 2.5, 9.0]), np.array([3.0, 1.0])).tolist()
    [-1.0, -0.5, -6.0]
    """
    ordered = np.sort(_check_values("pool", pool))
    candidates = _check_values("candidate_scores", candidate_scores)
    right = np.searchsorted(ordered, candidates)
    below, above = ordered[np.maximum(right - 1, 0)], ordered[np.minimum(right, len(ordered) - 1)]
    distances: np.ndarray = np.minimum(np.abs(candidates - below), np.abs(candidates - above))
    return -distances


def attack_histogram_pool(candidate_scores: np.ndarray, centers: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """The mass, with its noise, of the bin whose centre is nearest to each candidate's score `[n]`.

    `centers` and `masses` `[B]` are the bins of the candidates' class, in any order. A score midway between two centres
    belongs to the upper bin.

    >>> attack_histogram_pool(np.array([-9.0, 0.4, 0.5]), np.array([0.0, 1.0]), np.array([7.0, 3.0])).tolist()
    [7.0, 7.0, 3.0]
    """
    positions, weights = _check_values("centers", centers), _check_values("masses", masses)
    if positions.shape != weights.shape:
        raise ValueError(f"centers has shape {positions.shape}, masses {weights.shape}; give one mass per bin")
    order = np.argsort(positions)
    ordered = positions[order]
    edges = (ordered[1:] + ordered[:-1]) / 2
    bins = np.searchsorted(edges, _check_values("candidate_scores", candidate_scores), side="right")
    masses_of_candidates: np.ndarray = weights[order][bins]
    return masses_of_candidates


def label_statistics(member_statistics: np.ndarray, nonmember_statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels (1 for members) and statistics of all rows, as metrics take them.

    >>> [part.tolist() for part in label_statistics(np.array([3.0]), np.array([1.0, 2.0]))]
    [[1, 0, 0], [3.0, 1.0, 2.0]]
    """
    labels = np.repeat([1, 0], [len(member_statistics), len(nonmember_statistics)])
    return labels, np.concatenate([member_statistics, nonmember_statistics])


def _check_values(name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} has shape {array.shape}; it must be a vector of at least 1 number")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite; leave those out")
    return array
