"""From a loaded table to clients and held-out examples: imbalance, then label noise, then the partition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedauc.data import bounds
from fedauc.data.checks import as_labels
from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.dataset import Rows, Table
from fedauc.data.imbalance import remove_positives, to_positive_rate
from fedauc.data.noise import flip_labels
from fedauc.data.partitions import Natural, Partition


@dataclass(frozen=True)
class Preparation:
    """What is done to the training part: drop positives, flip labels, deal rows to clients."""

    partition: Partition = Natural()
    remove_positives: float = 0.0
    positive_rate: float | None = None
    flip_positives: float = 0.0
    flip_negatives: float = 0.0

    def __post_init__(self) -> None:
        for name in ("remove_positives", "flip_positives", "flip_negatives"):
            bounds.share(name, getattr(self, name))
        if self.positive_rate is not None:
            bounds.fraction("positive_rate", self.positive_rate)


class Split(NamedTuple):
    """What a run needs: clients to train, examples to select on (perhaps none) and to test on, and a note."""

    train: Clients
    validation: Examples | None
    test: Examples
    note: str


def prepare(table: Table, preparation: Preparation, seed: int) -> Split:
    """Apply a preparation to the training part; validation and test stay as they were loaded."""
    with _place("train"):
        rows, clients = _train(table.train, preparation, seed)
    partition = preparation.partition
    validation = None
    if table.validation is not None:
        with _place("validation"):
            validation = _examples(table.validation, partition)
    with _place("test"):
        test = _examples(table.test, partition)
    return Split(clients, validation, test, _note(table, rows, clients))


def _train(rows: Rows, preparation: Preparation, seed: int) -> tuple[Rows, Clients]:
    rows = rows._replace(labels=as_labels(rows.labels, len(rows.inputs)))
    if preparation.remove_positives:
        rows = remove_positives(rows, preparation.remove_positives, seed)
    if preparation.positive_rate is not None:
        rows = to_positive_rate(rows, preparation.positive_rate, seed)
    flipped = flip_labels(rows.labels, preparation.flip_positives, preparation.flip_negatives, seed)
    rows = rows._replace(labels=flipped)
    dealt = preparation.partition.assign(rows, seed)
    return rows, Clients.from_assignment(rows.inputs, rows.labels, dealt.client, dealt.names, dealt.groups)


def _examples(rows: Rows, partition: Partition) -> Examples:
    return examples(rows.inputs, rows.labels, partition.held_out(rows))


def _note(table: Table, rows: Rows, clients: Clients) -> str:
    empty = int((np.diff(clients.offsets) == 0).sum())
    kept = f"{len(rows.labels)} of {len(table.train.labels)} training rows"
    mix = f"{clients.census.positives.sum()} labelled positive"
    return f"{table.note}; {kept}, {mix}, over {len(clients)} clients ({empty} empty)"


@contextmanager
def _place(part: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{part} part: {error}") from error
