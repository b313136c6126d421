"""Reading a torch dataset of (input, label) items into two tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stack_items(dataset: torch.utils.data.Dataset[Any]) -> tuple[Tensor, list[Any]]:
    """Inputs `[n, ...]` and labels `[n]` of a map-style dataset, each item read once."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{type(dataset).__name__} has no length or items; give a map-style dataset, or arrays")
    size = len(dataset)
    if size == 0:
        raise ValueError(f"{type(dataset).__name__} has no rows; give at least one positive and one negative")
    first, label = _item(dataset, 0)
    inputs, labels = first.new_empty((size, *first.shape)), [label]
    inputs[0] = first
    for row in range(1, size):
        value, label = _item(dataset, row)
        if value.shape != first.shape:
            shapes = f"shape {tuple(value.shape)} and item 0 has {tuple(first.shape)}"
            raise ValueError(
                f"dataset item {row} has {shapes}; make them the same, for example with a resize transform"
            )
        inputs[row] = value
        labels.append(label)
    return inputs, labels


def _item(dataset: torch.utils.data.Dataset[Any], row: int) -> tuple[Tensor, Any]:
    try:
        value, label = dataset[row]
        return torch.as_tensor(value), label.item() if isinstance(label, Tensor) else label
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"dataset item {row} is no pair of a tensor and a label ({reason}); add a transform"
        ) from error
