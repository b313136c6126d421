"""From a loaded table to clients and held-out examples: first imbalance, then label noise, then the partition.

On request, label noise comes after the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from fedauc import keys
from fedauc.data.checks import as_labels, naming_source
from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.dataset import LABEL_VALUES, ClientColumns, Rows, TableParts, TableSummary
from fedauc.data.features import FeatureEncoder
from fedauc.data.names import select_values
from fedauc.data.partitions import Assignment, Natural, Partition
from fedauc.fields import check_fields, option


@dataclass(frozen=True)
class Preparation:
    """What is done to the training part: remove positives, flip labels, assign rows to clients."""

    partition: Partition = option(Natural(), "How training rows are assigned to clients.")
    remove_positives: float = option(0.0, "Fraction of the training positives to remove.", at_least=0, below=1)
    positive_rate: float | None = option(
        None, "Remove training positives until this fraction of the rows is positive.", above=0, below=1
    )
    flip_positives: float = option(0.0, "Fraction of the training positives to relabel as 0.", at_least=0, below=1)
    flip_negatives: float = option(0.0, "Fraction of the training negatives to relabel as 1.", at_least=0, below=1)
    flip_order: Literal["before", "after"] = option(
        "before", "Whether labels are flipped before rows are assigned to clients by their labels, or after."
    )

    def __post_init__(self) -> None:
        check_fields(self)


class Split(NamedTuple):
    """What a run needs: clients to train, examples to select on (may be None) and to test on, and a note.

    `encoder`, `label_values` and `summary` are those of the loaded table.
    """

    train: Clients
    validation: Examples | None
    test: Examples
    note: str
    encoder: FeatureEncoder | None = None
    label_values: tuple[str, str] = LABEL_VALUES
    summary: TableSummary = TableSummary()


def prepare_table(table: TableParts, preparation: Preparation, seed: int) -> Split:
    """Apply a preparation to the training part; validation and test stay as they were loaded."""
    partition = preparation.partition
    with naming_source("train part"):
        rows = table.train._replace(labels=as_labels(table.train.labels, len(table.train.inputs)))
        if preparation.remove_positives:
            rows = remove_positives(rows, preparation.remove_positives, seed)
        if preparation.positive_rate is not None:
            rows = reduce_to_positive_rate(rows, preparation.positive_rate, seed)
        flipped = flip_labels(rows.labels, preparation.flip_positives, preparation.flip_negatives, seed)
        # The same rows are flipped in either order; a partition by labels sees the flipped ones, or the clean ones.
        noisy = rows._replace(labels=flipped)
        assignment = partition.assign(noisy if preparation.flip_order == "before" else rows, seed)
        rows = noisy
        columns = _columns_of_clients(table.client_columns, partition, assignment)
        clients = Clients.from_assignment(rows.inputs, rows.labels, *assignment, columns=columns)
    validation = None
    if table.validation is not None:
        with naming_source("validation part"):
            validation = _make_examples(table.validation, partition)
    with naming_source("test part"):
        test = _make_examples(table.test, partition)
    empty = int((np.diff(clients.offsets) == 0).sum())
    note = (
        f"{table.note}; {len(rows.labels)} of {len(table.train.labels)} training rows, "
        f"{clients.census.positives.sum()} labelled positive, over {len(clients)} clients ({empty} empty)"
    )
    # Rows that a partition assigns to other clients than the file's are summarised by those.
    summary = table.summary._replace(traffic=table.summary.traffic.scale_to(len(clients)))
    return Split(clients, validation, test, note, table.encoder, table.label_values, summary)


def _make_examples(rows: Rows, partition: Partition) -> Examples:
    held_out = examples(rows.inputs, rows.labels, partition.client_names(rows))
    return held_out._replace(rows=rows.numbers)


def _columns_of_clients(
    client_columns: ClientColumns, partition: Partition, assignment: Assignment
) -> dict[str, np.ndarray]:
    """The columns as arrays `[N]`, for the dataset's own clients; the clients of other partitions have none."""
    if client_columns and not isinstance(partition, Natural):
        raise ValueError(
            f"the data has the roster columns {', '.join(client_columns)}, which describe its own clients; partition "
            f"{partition.name!r} makes others: use partition 'natural', or leave out roster_columns"
        )
    return {column: select_values(values, assignment.names) for column, values in client_columns.items()}


def remove_positives(rows: Rows, fraction: float, seed: int) -> Rows:
    """Remove a fraction of the positives at random; what remains is rounded down (95 % less than 4,495 is 224)."""
    _check_share("remove_positives", fraction)
    count = int((rows.labels == 1).sum())
    # In binary floats 1 - 0.9 would keep 9 of 100; the decimal that was written keeps 10.
    remaining = int((1 - Fraction(str(fraction))) * count)
    if remaining == 0:
        raise ValueError(f"remove_positives is {fraction}; of {count} positives that leaves none: lower it")
    return _sample_positives(rows, remaining, seed, "remove_positives")


def reduce_to_positive_rate(rows: Rows, rate: float, seed: int) -> Rows:
    """Remove positives at random, as few as possible, until at most `rate` of the rows are positive."""
    if not 0 < rate < 1:
        raise ValueError(f"positive_rate is {rate!r}; it must be above 0 and below 1")
    count = int((rows.labels == 1).sum())
    exact, negatives = Fraction(str(rate)), len(rows.labels) - count
    if Fraction(count, len(rows.labels)) < exact:
        actual = count / len(rows.labels)
        raise ValueError(f"positive_rate is {rate}; the data's rate is already lower, {actual:.6g}: use at most that")
    remaining = int(exact * negatives / (1 - exact))
    if remaining == 0:
        smallest = 1 / (negatives + 1)
        raise ValueError(
            f"positive_rate is {rate}; with {negatives} negatives that leaves no positive: use {smallest:.3g}"
        )
    return _sample_positives(rows, remaining, seed, "positive_rate")


def _sample_positives(rows: Rows, count: int, seed: int, purpose: str) -> Rows:
    """All negatives and `count` random positives, in their original order."""
    positives = np.flatnonzero(rows.labels == 1)
    sampled = positives[keys.sample_indices(len(positives), count, seed, purpose)]
    return rows.take(np.sort(np.concatenate([np.flatnonzero(rows.labels != 1), sampled])))


def flip_labels(labels: np.ndarray, positives: float, negatives: float, seed: int) -> np.ndarray:
    """A copy in which exact shares of the positives and of the negatives, to the nearest row, change class.

    >>> flip_labels(np.array([1, 1, 0, 0]), positives=0.5, negatives=0.0, seed=0).sum()
    np.int64(1)
    """
    flipped = labels.copy()
    for label, rate, name in ((1, positives, "flip_positives"), (0, negatives, "flip_negatives")):
        _check_share(name, rate)
        members = np.flatnonzero(labels == label)
        count = round(rate * len(members))
        if count and count == len(members):
            raise ValueError(f"{name} is {rate}; of {len(members)} rows that leaves none as they were: lower it")
        if count:
            flipped[members[keys.sample_indices(len(members), count, seed, name)]] = 1 - label
    return flipped


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1")
