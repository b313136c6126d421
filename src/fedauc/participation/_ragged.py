"""Lists of clients of unequal length, as two sorted arrays: no Python object per list or per client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np


class ClientLists(Sequence[np.ndarray]):
    """`length` lists of clients; list i holds the clients whose owner is i, ascending. A lookup is two bisections.

    >>> lists = ClientLists(owners=np.array([1, 0, 1]), clients=np.array([9, 4, 7]), length=3)
    >>> [clients.tolist() for clients in lists]
    [[4], [7, 9], []]
    """

    def __init__(self, owners: np.ndarray, clients: np.ndarray, length: int) -> None:
        order = np.lexsort((clients, owners))
        self._owners = np.asarray(owners, dtype=np.int64)[order]
        self._clients = np.asarray(clients, dtype=np.int64)[order]
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        owner = range(self._length)[index]
        return self._clients[self._owners.searchsorted(owner, "left") : self._owners.searchsorted(owner, "right")]

    def client_counts(self) -> np.ndarray:
        """How many clients each list holds: `[length]`."""
        return np.bincount(self._owners, minlength=self._length)
