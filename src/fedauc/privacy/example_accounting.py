"""What the noise of `wrappers/example_dp.py` guarantees for a single row: the noise multiplier of a client's visit.

In local step t the contribution of a row that occurs m_t times in the batch is at most m_t S long, and the noise has
standard deviation σ S per coordinate. The step is therefore a Gaussian mechanism with noise multiplier σ / m_t, and the
steps of a visit, each of which depends on the ones before it, compose to one Gaussian mechanism with multiplier

    σ / √(Σ_t m_t²)

(Dong, Roth and Su, Gaussian differential privacy, 2022, Corollary 2; the same holds for zCDP). Visits compose in the
same way. A row belongs to one client, so the guarantee of a federation is that of its worst client.

How often a row can occur. Within a visit the rows of a class (or all rows, for batches of `rows`) are drawn in shuffled
passes: each pass holds every row once, and step t takes the positions tB to (t+1)B - 1 of the concatenated passes. A
row occurs at most once in every pass that a visit or a batch touches, anywhere in that pass:

    in a visit: at most ⌈I B / n⌉ times;    in step t: at most ⌊((t+1)B - 1) / n⌋ - ⌊tB / n⌋ + 1 times

The worst Σ_t m_t² over all such arrangements is computed exactly. Nothing is gained from sampling: the draws are of
fixed size, so amplification by Poisson sampling does not apply, and their seed is known to the server.

The guarantee is for neighbouring data sets that differ in one row, whose contribution is zero in one of them. The
number of rows of each class is public: it decides how rows are drawn and weighted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedauc.interfaces import BatchKind, BatchSize, Census


class RowOccurrences(NamedTuple):
    """Bounds for the worst row: occurrences in a visit and in one batch, and the sum over steps of m_t²."""

    in_visit: int
    in_batch: int
    sum_of_squares: int


class ExampleAccount(NamedTuple):
    """The noise multiplier of one visit to each client, `[N]`; infinite for a client without rows."""

    noise_multipliers: np.ndarray

    @property
    def worst_multiplier(self) -> float:
        """The smallest noise multiplier, which holds for the rows of every client."""
        return float(self.noise_multipliers.min())


@lru_cache(maxsize=4096)
def count_occurrences(rows: int, batch_rows: int, local_steps: int) -> RowOccurrences:
    """How often one of `rows` rows can occur in a visit of steps with `batch_rows` rows each.

    >>> count_occurrences(rows=100, batch_rows=16, local_steps=6)
    RowOccurrences(in_visit=1, in_batch=1, sum_of_squares=1)
    >>> count_occurrences(rows=100, batch_rows=16, local_steps=8)
    RowOccurrences(in_visit=2, in_batch=2, sum_of_squares=4)
    """
    if rows == 0 or batch_rows == 0:
        return RowOccurrences(0, 0, 0)
    starts = np.arange(local_steps) * batch_rows
    in_batch = int(((starts + batch_rows - 1) // rows - starts // rows + 1).max())
    total = local_steps * batch_rows
    passes = -(-total // rows)
    return RowOccurrences(passes, in_batch, _maximize_squares(rows, batch_rows, total, passes))


def _maximize_squares(rows: int, batch_rows: int, total: int, passes: int) -> int:
    """The largest Σ_t m_t² if the row may lie anywhere in each pass.

    Passes are taken in order. `best` maps the row's number of occurrences in the current step, which the next pass may
    still touch, to the largest sum over the steps before it. A pass over several steps puts the row into its first step
    or into its last one; a step in between is never better, because (m + 1)² ≥ m² + 1.
    """
    current, best = 0, {0: 0}
    for number in range(passes):
        first, last = number * rows // batch_rows, (min((number + 1) * rows, total) - 1) // batch_rows
        if first > current:
            current, best = first, {0: max(closed + count**2 for count, closed in best.items())}
        if first == last:
            best = {count + 1: closed for count, closed in best.items()}
        else:
            in_first = max(closed + (count + 1) ** 2 for count, closed in best.items())
            in_last = max(closed + count**2 for count, closed in best.items())
            current, best = last, {0: in_first, 1: in_last}
    return max(closed + count**2 for count, closed in best.items())


def row_occurrences(census: Census, batch: BatchSize, local_steps: int, kind: BatchKind) -> list[RowOccurrences]:
    """The bounds for the worst row of each client.

    A class that a client lacks is filled with rows of its other class, whose weight is zero, so they do not count.
    """
    counts = [*zip(census.positives.tolist(), census.negatives.tolist(), strict=True)]
    if kind == "rows":
        return [count_occurrences(sum(pair), batch.total_rows, local_steps) for pair in counts]
    by_class = [
        [count_occurrences(rows, size, local_steps) for rows, size in zip(pair, batch, strict=True)] for pair in counts
    ]
    return [RowOccurrences(*map(max, zip(*pair, strict=True))) for pair in by_class]


def example_account(
    census: Census, batch: BatchSize, local_steps: int, kind: BatchKind, noise_multiplier: float
) -> ExampleAccount:
    """The noise multiplier of one visit to each client: σ / √(Σ_t m_t²) for its worst row.

    `kind` is `algorithm.objective.batch_kind`, and `noise_multiplier` that of the wrapper, σ.
    """
    squares = [bounds.sum_of_squares for bounds in row_occurrences(census, batch, local_steps, kind)]
    roots = np.sqrt(np.array(squares, dtype=np.float64))
    with np.errstate(divide="ignore"):
        return ExampleAccount(np.where(roots > 0, noise_multiplier / roots, np.inf))


def compose_multipliers(noise_multipliers: np.ndarray) -> float:
    """The multiplier of one Gaussian mechanism that tells as much as several: 1 / √(Σ 1/z²), as of several visits.

    >>> compose_multipliers(np.array([2.0, 2.0, 2.0, 2.0]))
    1.0
    """
    with np.errstate(divide="ignore"):
        return float(1 / np.sqrt(np.sum(1 / np.square(np.asarray(noise_multipliers, dtype=np.float64)))))
