"""The class totals that a private run releases in place of the census."""

from __future__ import annotations

from typing import NamedTuple


class ClassTotalsEstimate(NamedTuple):
    """What a private run may know of all clients together, positives first; what was not released is None.

    `clients` is the number N of clients that hold data, which is public. `holders` are the numbers of clients that hold
    a class, and `rows` the numbers of rows of a class, of which no client counts more than `max_rows`; both are noised.
    """

    clients: int
    holders: tuple[float, float] | None = None
    rows: tuple[float, float] | None = None
    max_rows: int | None = None
