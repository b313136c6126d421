"""Who gets which training row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data import bounds
from fedauc.data.dataset import Rows
from fedauc.data.names import as_names, enumerate_names, groups_of_clients
from fedauc.discovery import find_members


class Assignment(NamedTuple):
    """The client number of each row `[n]`, and the name and perhaps the group of each client `[N]`."""

    client: np.ndarray
    names: np.ndarray
    groups: np.ndarray | None = None


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that deals rows to clients, every row to one; keyed by the seed."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, rows: Rows, seed: int) -> Assignment:
        """The client of every row."""

    def held_out(self, rows: Rows) -> np.ndarray | None:
        """The client name of each row outside training, where the data itself tells; otherwise None."""
        return None


def partitions() -> dict[str, type[Partition]]:
    """Every partition by name."""
    return find_members("fedauc.data", Partition)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Natural(Partition):
    """The dataset's own clients, and its groups if it has them."""

    name: ClassVar[str] = "natural"

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """One client per name in the client column."""
        if rows.client is None:
            raise ValueError("partition 'natural' needs a client column and the data has none: use dirichlet or iid")
        names, place = enumerate_names(as_names(rows.client, "client", len(rows.labels)))
        if rows.group is None:
            return Assignment(place, names)
        group = as_names(rows.group, "group", len(rows.labels))
        return Assignment(place, names, groups_of_clients(place, names, group))

    def held_out(self, rows: Rows) -> np.ndarray | None:
        """The client column."""
        return rows.client


@dataclass(frozen=True)
class ByMetadata(Partition):
    """One client per value of the dataset's group column (a region, a site, a time of day)."""

    name: ClassVar[str] = "by-metadata"

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """One client per name in the group column."""
        if rows.group is None:
            raise ValueError("partition 'by-metadata' needs a group column and the data has none: use natural or iid")
        names, place = enumerate_names(as_names(rows.group, "group", len(rows.labels)))
        return Assignment(place, names)

    def held_out(self, rows: Rows) -> np.ndarray | None:
        """The group column."""
        return rows.group


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class's rows spread over the clients by one Dirichlet draw; the lower the concentration, the more skew.

    Clients can miss a class or be empty: with 100 clients and concentration 0.1 most hold no row of a rare class.
    """

    name: ClassVar[str] = "dirichlet"

    clients: int = 100
    concentration: float = 0.5

    def __post_init__(self) -> None:
        bounds.whole("clients", self.clients)
        bounds.positive("concentration", self.concentration)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Cut each class, shuffled, at the cumulated shares of its draw."""
        _check_enough(rows, self.clients)
        client = np.empty(len(rows.labels), dtype=np.int64)
        for label in (0, 1):
            members = np.flatnonzero(rows.labels == label)
            draw = keys.numpy_generator(seed, "dirichlet", label)
            shares = draw.dirichlet(np.full(self.clients, float(self.concentration)))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            order = members[_shuffle(len(members), seed, self.name, label)]
            client[order] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        return Assignment(client, np.arange(self.clients))


@dataclass(frozen=True)
class ByLabel(Partition):
    """Rows sorted by label and cut into equal shards; each client gets so many at random, so most hold one class."""

    name: ClassVar[str] = "by-label"

    clients: int = 100
    shards: int = 2

    def __post_init__(self) -> None:
        bounds.whole("clients", self.clients)
        bounds.whole("shards", self.shards)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Shuffle, sort by label, cut, and deal the shards."""
        count, total = len(rows.labels), self.clients * self.shards
        if total > count:
            raise ValueError(f"clients * shards is {total}; it must be at most the {count} training rows: lower either")
        shuffled = _shuffle(count, seed, self.name, "rows")
        order = shuffled[np.argsort(rows.labels[shuffled], kind="stable")]
        owner = _shuffle(total, seed, self.name, "shards") // self.shards
        client = np.empty(count, dtype=np.int64)
        client[order] = owner[np.arange(count) * total // count]
        return Assignment(client, np.arange(self.clients))


@dataclass(frozen=True)
class IID(Partition):
    """Rows dealt at random, sizes equal to within one row."""

    name: ClassVar[str] = "iid"

    clients: int = 100

    def __post_init__(self) -> None:
        bounds.whole("clients", self.clients)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Deal the shuffled rows in turn."""
        _check_enough(rows, self.clients)
        return Assignment(_shuffle(len(rows.labels), seed, self.name) % self.clients, np.arange(self.clients))


def _check_enough(rows: Rows, clients: int) -> None:
    if clients > len(rows.labels):
        raise ValueError(
            f"clients is {clients}; it must be at most the {len(rows.labels)} training rows: lower clients"
        )


def _shuffle(size: int, *key: int | str) -> np.ndarray:
    return keys.sample_indices(size, size, *key) if size else np.empty(0, dtype=np.int64)
