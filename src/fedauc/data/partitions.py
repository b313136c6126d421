"""Partitions: which client gets which training row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data.dataset import Rows
from fedauc.data.names import as_names, enumerate_names, find_client_groups
from fedauc.discovery import find_members
from fedauc.fields import check_fields, option


class Assignment(NamedTuple):
    """The client number of each row `[n]`, and the name and perhaps the group of each client `[N]`."""

    client: np.ndarray
    names: np.ndarray
    groups: np.ndarray | None = None


@dataclass(frozen=True)
class Partition(ABC):
    """A rule that assigns every row to one client, keyed by the seed."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def assign(self, rows: Rows, seed: int) -> Assignment:
        """The client of every row."""

    def client_names(self, rows: Rows) -> np.ndarray | None:
        """The client name of each validation or test row, where the data contain it; otherwise None."""
        return None


def find_partitions() -> dict[str, type[Partition]]:
    """Every partition by name."""
    return find_members("fedauc.data.partitions", Partition)  # type: ignore[type-abstract]


@dataclass(frozen=True)
class Natural(Partition):
    """The dataset's own clients, and its groups if it has them."""

    name: ClassVar[str] = "natural"

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """One client per name in the client column."""
        if rows.client is None:
            raise ValueError("partition 'natural' needs a client column and the data has none: use dirichlet or iid")
        names, client = enumerate_names(as_names(rows.client, "client", len(rows.labels)))
        group = None if rows.group is None else as_names(rows.group, "group", len(rows.labels))
        return Assignment(client, names, None if group is None else find_client_groups(client, names, group))

    def client_names(self, rows: Rows) -> np.ndarray | None:
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
        names, client = enumerate_names(as_names(rows.group, "group", len(rows.labels)))
        return Assignment(client, names)

    def client_names(self, rows: Rows) -> np.ndarray | None:
        """The group column."""
        return rows.group


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class's rows spread over the clients by one Dirichlet draw; the lower the concentration, the more skew.

    Clients can miss a class or be empty: with 100 clients and concentration 0.1 most hold no row of a rare class.
    """

    name: ClassVar[str] = "dirichlet"

    clients: int = option(100, "Number of clients.", at_least=1)
    concentration: float = option(0.5, "Dirichlet concentration; a lower one gives more skew.", above=0)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Shuffle each class and cut it at the cumulative shares of its draw."""
        _check_enough_rows(rows, self.clients)
        client = np.empty(len(rows.labels), dtype=np.int64)
        for label in (0, 1):
            in_class = np.flatnonzero(rows.labels == label)
            generator = keys.numpy_generator(seed, "dirichlet", label)
            shares = generator.dirichlet(np.full(self.clients, float(self.concentration)))
            cuts = np.floor(np.cumsum(shares)[:-1] * len(in_class)).astype(np.int64)
            order = in_class[_shuffle_rows(len(in_class), seed, self.name, label)]
            client[order] = np.searchsorted(cuts, np.arange(len(in_class)), side="right")
        return Assignment(client, np.arange(self.clients))


@dataclass(frozen=True)
class ByLabel(Partition):
    """Rows sorted by label and cut into equal shards, a few random ones per client, so that most hold one class."""

    name: ClassVar[str] = "by-label"

    clients: int = option(100, "Number of clients.", at_least=1)
    shards: int = option(2, "Shards per client.", at_least=1)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Shuffle, sort by label, cut into shards, and assign the shards."""
        count, total = len(rows.labels), self.clients * self.shards
        if total > count:
            raise ValueError(f"clients * shards is {total}; it must be at most the {count} training rows: lower either")
        shuffled = _shuffle_rows(count, seed, self.name, "rows")
        order = shuffled[np.argsort(rows.labels[shuffled], kind="stable")]
        client_of_shard = _shuffle_rows(total, seed, self.name, "shards") // self.shards
        client = np.empty(count, dtype=np.int64)
        client[order] = client_of_shard[np.arange(count) * total // count]
        return Assignment(client, np.arange(self.clients))


@dataclass(frozen=True)
class IID(Partition):
    """Rows assigned at random; the clients' sizes differ by at most one row."""

    name: ClassVar[str] = "iid"

    clients: int = option(100, "Number of clients.", at_least=1)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """Assign the shuffled rows in turn."""
        _check_enough_rows(rows, self.clients)
        return Assignment(_shuffle_rows(len(rows.labels), seed, self.name) % self.clients, np.arange(self.clients))


def _check_enough_rows(rows: Rows, clients: int) -> None:
    if clients > len(rows.labels):
        raise ValueError(
            f"clients is {clients}; it must be at most the {len(rows.labels)} training rows: lower clients"
        )


def _shuffle_rows(size: int, *key: int | str) -> np.ndarray:
    return keys.sample_indices(size, size, *key) if size else np.empty(0, dtype=np.int64)
