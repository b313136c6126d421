"""Tables whose labels are numbers of classes, 0 to C - 1, for methods that train an output per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedauc.data.checks import as_array, name_row
from fedauc.interfaces import BatchSize, Census

if TYPE_CHECKING:
    from torch import Tensor

MOST_CLASSES = 256
"""The most classes: their numbers are exact in every float type that a model may have."""

MIN_ROWS_PER_CLASS = 2
"""How many rows of a class an evaluation needs."""


class ClassCensus(Census):
    """How many rows of each class every client holds: `counts` int64 `[C, N]`.

    As a census of two classes, all rows are negatives: what asks for positives cannot use such a table.

    >>> census = ClassCensus(np.array([[1, 0], [2, 5], [0, 1]]))
    >>> census.negatives.tolist(), census.shares.round(2).tolist()
    ([3, 6], [0.11, 0.78, 0.11])
    """

    counts: np.ndarray

    def __new__(cls, counts: np.ndarray) -> ClassCensus:
        """The census of these counts."""
        rows = counts.sum(0)
        census = super().__new__(cls, np.zeros_like(rows), rows)
        census.counts = counts
        return census

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.counts,)

    @property
    def shares(self) -> np.ndarray:
        """The share of every class among the rows of all clients, `[C]`."""
        return np.asarray(self.counts.sum(1) / self.counts.sum())


def list_counts(census: Census) -> Sequence[np.ndarray]:
    """The rows of every class by client: positives and negatives, or those of each of several classes."""
    return list(census.counts) if isinstance(census, ClassCensus) else census


def divide_batch(census: Census, batch: BatchSize) -> Sequence[int]:
    """Rows of each class in a local step: those of a batch of positives and negatives, or of several classes."""
    return divide_rows(batch, len(census.counts)) if isinstance(census, ClassCensus) else batch


def divide_rows(batch: BatchSize, classes: int) -> tuple[int, ...]:
    """Rows of each of several classes in a local step, which share the rows of a batch as evenly as possible.

    >>> divide_rows(BatchSize(4, 4), 3)
    (3, 3, 2)
    """
    size, larger = divmod(batch.total_rows, classes)
    return tuple(size + (number < larger) for number in range(classes))


def as_class_labels(values: Any, rows: int) -> np.ndarray:
    """Labels as int64 numbers of classes `[rows]`.

    >>> as_class_labels([0.0, 2.0, 1.0], 3)
    array([0, 2, 1])
    """
    array = as_array(values, "labels")
    if array.shape != (rows,):
        raise ValueError(f"labels has shape {array.shape}; it must be ({rows},): give one label per row")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"labels has dtype {array.dtype}; give numbers of classes from 0, such as np.unique's inverse")
    wrong = np.flatnonzero(~((array >= 0) & (array < MOST_CLASSES) & (array == np.floor(array))))
    if len(wrong):
        bound = f"labels of classes are whole numbers from 0 to {MOST_CLASSES - 1}"
        raise ValueError(f"labels holds {array[wrong[0]]} in {name_row(wrong[0])}; {bound}: number the classes")
    return array.astype(np.int64)


def check_every_class(labels: np.ndarray, classes: int, least: int = 1) -> None:
    """Refuse labels with fewer than `least` rows of a class, or with more classes than there are."""
    if labels.max() >= classes:
        raise ValueError(f"labels holds class {labels.max()}; the training rows have classes 0 to {classes - 1}")
    counts = np.bincount(labels, minlength=classes)
    if counts.min() < least:
        rare = int(counts.argmin())
        raise ValueError(
            f"labels holds {counts[rare]} rows of class {rare}; at least {least} of each of the {classes} classes are "
            "needed: add some, or number the classes without gaps"
        )


def class_label_tensor(labels: np.ndarray, inputs: Tensor) -> Tensor:
    """Numbers of classes as a float tensor on the inputs' device, with the inputs' type where that is a float type."""
    dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
    return torch.from_numpy(labels).to(inputs.device, dtype)
