"""Checks of inputs and labels, with one-line errors that name the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedauc.data.io.memory import make_writable, row_blocks, sparse_zeros

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 5
"""How many offending values an error shows."""

BLOCK = 1 << 18
"""How many values are checked at once, so that a check needs little memory."""

INTEGERS = ("uint8", "int32", "int64")
"""Types of integers that stay as they are: images, and numbers that stand for something, such as words."""

MIN_ROWS_PER_CLASS = 2
"""How many rows of each class an evaluation needs: DeLong's interval computes a variance over each."""


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Make every ValueError say where its values come from, in one line."""
    try:
        yield
    except ValueError as error:
        # Column names and messages of other libraries may contain line breaks.
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def name_row(row: int) -> str:
    """A row in an error message.

    >>> name_row(5)
    'row 5 (counted from 0)'
    """
    return f"row {row} (counted from 0)"


@contextmanager
def counting_rows_from(start: int) -> Iterator[None]:
    """Let the row numbers in an error about a block of rows be those of the whole file."""
    try:
        yield
    except ValueError as error:
        named = re.escape(name_row(0)).replace("0", r"(\d+)", 1)
        message = re.sub(named, lambda match: name_row(start + int(match[1])), str(error))
        raise ValueError(message) from error


def as_array(values: Any, name: str) -> np.ndarray:
    """A numpy array of a tensor, an array, a pandas column or a nested list."""
    if isinstance(values, torch.Tensor):
        # numpy has no bfloat16.
        tensor = values.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} is a ragged list; give every row the same length") from None


def as_inputs(values: Any, columns: Sequence[str] = ()) -> Tensor:
    """Inputs `[n, ...]` as a tensor: floats, uint8, int32 and int64 keep their type, the rest becomes float32.

    Integers are token ids, say; a network whose model accepts no integers converts them to floats. Floats are finite.
    Tensors, writable arrays and memory-mapped files of floats or bytes are not copied, if their rows are contiguous.
    `columns` are the names that an error message uses.
    """
    if isinstance(values, torch.Tensor):
        return _check_tensor(values.detach(), columns)
    array = as_array(values, "inputs")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"inputs has dtype {array.dtype}; it must be numbers: encode or drop the other columns")
    if array.dtype.kind == "f":
        # Torch has no long double and refuses non-native byte orders.
        array = array.astype(f"=f{min(array.dtype.itemsize, 8)}", copy=False)
    else:
        native = array.dtype.newbyteorder("=")
        array = array.astype(native if native in INTEGERS else np.float32, copy=False)
    rows = make_writable(array)
    tensor = _check_tensor(_share_memory(rows), columns)
    # The check has read every page of a mapped file; a second mapping starts with none of them in memory.
    return tensor if rows is array else _share_memory(make_writable(array))


def as_labels(values: Any, rows: int, column: str = "") -> np.ndarray:
    """Labels as int8 zeros and ones `[rows]`; an error names the column of the file they come from.

    >>> as_labels([True, False], 2)
    array([1, 0], dtype=int8)
    >>> as_labels([-1, 1], 2)
    Traceback (most recent call last):
    ...
    ValueError: labels holds -1; labels must be 0 or 1: use labels > 0
    """
    array = as_array(values, "labels")
    if array.ndim != 1:
        raise ValueError(f"labels has shape {array.shape}; it must be one-dimensional: use labels.reshape(-1)")
    if len(array) != rows:
        raise ValueError(f"inputs has {rows} rows and labels has {len(array)}; give one label per row")
    name = f"label column {column!r}" if column else "labels"
    numbers = _as_numbers(array, name)
    if _count_wrong(lambda rows: (numbers[rows] != 0) & (numbers[rows] != 1), numbers.shape)[0]:
        _refuse_labels(numbers, (numbers != 0) & (numbers != 1), name)
    return numbers.astype(np.int8)


def as_float32(inputs: np.ndarray, columns: Sequence[str] = ()) -> np.ndarray:
    """Finite inputs in float32, none of them too large for it."""
    with np.errstate(over="ignore"):
        narrow: np.ndarray = inputs.astype(np.float32, copy=False)
    count, first = _count_wrong(lambda rows: np.isinf(narrow[rows]), narrow.shape)
    if count:
        raise ValueError(
            f"inputs holds {count} values beyond float32, the first {inputs[tuple(first)]:g} at "
            f"{_describe_position(first, columns)}; the bound is {np.finfo(np.float32).max:.2g}: rescale that column "
            "or drop it"
        )
    return narrow


def check_classes(labels: np.ndarray) -> None:
    """Refuse labels of a single class, for which no AUC is defined."""
    for value, name in ((1, "positives"), (0, "negatives")):
        if not (labels == value).any():
            raise ValueError(
                f"labels holds no {name} in {len(labels)} rows; an AUC needs both classes: add some {name}"
            )


def check_evaluable(labels: np.ndarray) -> None:
    """Refuse labels with fewer than `MIN_ROWS_PER_CLASS` rows of a class: the AUC would have no confidence interval."""
    check_classes(labels)
    for value, name in ((1, "positives"), (0, "negatives")):
        count = int((labels == value).sum())
        if count < MIN_ROWS_PER_CLASS:
            raise ValueError(
                f"labels holds {count} of the at least {MIN_ROWS_PER_CLASS} {name} that an AUC's confidence interval "
                f"needs: add {MIN_ROWS_PER_CLASS - count} or more"
            )


def label_tensor(labels: np.ndarray, inputs: Tensor) -> Tensor:
    """Labels as a float tensor on the inputs' device, with the inputs' type where that is a float type."""
    dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
    # Positives are rare, and these zeros take memory only where something is written.
    floats = sparse_zeros(len(labels))
    floats[np.flatnonzero(labels)] = 1
    return torch.from_numpy(floats).to(inputs.device, dtype)


def _check_tensor(tensor: Tensor, columns: Sequence[str]) -> Tensor:
    if not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.int32, torch.int64):
        tensor = tensor.to(torch.float32)
    if tensor.ndim < 2 or 0 in tensor.shape[1:]:
        shape = tuple(tensor.shape)
        raise ValueError(
            f"inputs has shape {shape}; it must be [rows, features...]: give each row at least one feature"
        )
    if len(tensor) == 0:
        raise ValueError("inputs has no rows; give at least one positive and one negative")
    if not tensor.is_floating_point():
        return tensor
    count, first = _count_wrong(lambda rows: ~torch.isfinite(tensor[rows]).numpy(force=True), tensor.shape)
    if count:
        raise ValueError(
            f"inputs holds {count} values that are not finite, the first {tensor[tuple(first)].item()} at "
            f"{_describe_position(first, columns)}: fill them in or drop their rows"
        )
    return tensor


def _share_memory(array: np.ndarray) -> Tensor:
    # Torch warns about read-only memory, which pandas returns.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _count_wrong(wrong: Callable[[slice], np.ndarray], shape: Sequence[int]) -> tuple[int, list[int]]:
    """The number of wrong values in an array of that shape and the index of the first, a block of rows at a time."""
    count, first = 0, list[int]()
    for block in row_blocks(shape, BLOCK):
        is_wrong = wrong(block)
        if not count and is_wrong.any():
            row, *position = np.argwhere(is_wrong)[0].tolist()
            first = [block.start + row, *position]
        count += int(is_wrong.sum())
    return count, first


def _describe_position(index: Sequence[int], columns: Sequence[str]) -> str:
    row, *position = index
    column = repr(columns[position[0]]) if columns else position[0] if len(position) == 1 else tuple(position)
    return f"{name_row(row)}, column {column}"


def _as_numbers(labels: np.ndarray, name: str) -> np.ndarray:
    if labels.dtype.kind in "fiub":
        return labels
    try:
        if labels.dtype.kind == "O":
            return labels.astype(np.float64)
    except (TypeError, ValueError):
        pass
    values = np.unique(labels.astype(str)).tolist()
    shown = ", ".join(map(repr, values[:SHOWN]))
    remedy = "use" if name == "labels" else "name another column, or write it as 0 and 1, such as"
    raise ValueError(f"{name} holds {shown}; labels must be 0 or 1: {remedy} labels == {values[0]!r}")


def _refuse_labels(numbers: np.ndarray, wrong: np.ndarray, name: str) -> None:
    missing = wrong & np.isnan(numbers)
    if missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise ValueError(
            f"{name} holds {missing.sum()} NaN, the first at {name_row(row)}; drop the rows without a label"
        )
    values = np.unique(numbers[wrong])
    shown = ", ".join(f"{value:g}" for value in values[:SHOWN]) + (", ..." if len(values) > SHOWN else "")
    signed = values.tolist() == [-1]
    rule = "labels > 0" if signed else f"labels == {values[0]:g} to make that class the positives"
    remedy = "use" if name == "labels" else "name another column, or write it as 0 and 1, such as"
    raise ValueError(f"{name} holds {shown}; labels must be 0 or 1: {remedy} {rule}")
