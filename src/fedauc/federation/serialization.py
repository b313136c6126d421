"""What crosses the wire: a JSON object of facts, and the tensors of any number of trees as one flat array of bytes.

No class, name or code travels: the receiver knows the trees it waits for and puts the tensors into their places.
Numbers are little-endian, as on every machine that torch runs on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.trees import Tree, tree_leaves, tree_map

Layout = list[list[Any]]
"""For each tensor of a tree its dtype and shape, such as `["float32", 3, 4]`."""

ALLOWED_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
}
"""What may travel."""


MOST_FACTS = 1 << 20
"""Characters of facts that are read: ours are some thousands."""


class Payload(NamedTuple):
    """A message's content: facts as JSON text, and one flat uint8 array."""

    header_text: str
    body: np.ndarray

    def read_header(self) -> dict[str, Any]:
        """The facts, or a one-line error."""
        if len(self.header_text) > MOST_FACTS:
            raise ValueError(f"the facts have {len(self.header_text)} characters; at most {MOST_FACTS} are read")
        try:
            found = json.loads(self.header_text)
        except ValueError as error:
            raise ValueError(f"the facts are not JSON ({error}); both sides must run the same fedauc") from error
        if not isinstance(found, dict):
            raise ValueError(f"the facts are a {type(found).__name__}; they must be an object")
        return found


def pack_payload(facts: Mapping[str, Any], trees: Mapping[str, Tree] | None = None) -> Payload:
    """A parcel of facts and named trees; the trees' layouts join the facts."""
    given = trees or {}
    leaves = [leaf for tree in given.values() for leaf in tree_leaves(tree)]
    layouts = {name: tensor_layouts(tree) for name, tree in given.items()}
    body = np.concatenate([np.zeros(0, np.uint8), *map(_bytes, leaves)])
    return Payload(json.dumps({**facts, "layouts": layouts}), body)


def tensor_layouts(tree: Tree) -> Layout:
    """The dtype and shape of every tensor, in order.

    >>> layout((torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)))
    [['float32', 2, 3], ['int64']]
    """
    return [[str(leaf.dtype).removeprefix("torch."), *leaf.shape] for leaf in tree_leaves(tree)]


def unpack_tensors(parcel: Payload, max_bytes: int | None = None) -> dict[str, list[Tensor]]:
    """Every tree's tensors by the tree's name; `most` bounds the bytes, before anything is copied."""
    body = parcel.body
    if body.dtype != np.uint8 or body.ndim != 1:
        raise ValueError(f"the body is {body.dtype} {body.shape}; it must be one flat array of uint8")
    if max_bytes is not None and len(body) > max_bytes:
        raise ValueError(f"the body has {len(body)} bytes; at most {max_bytes} are due")
    layouts = parcel.read_header().get("layouts")
    if not isinstance(layouts, dict):
        raise ValueError(f"layouts is {layouts!r}; it must be an object of lists")
    parts = [(name, *_checked(entry)) for name, entries in layouts.items() for entry in _listed(entries)]
    due = sum(size for *_, size in parts)
    if due != len(body):
        raise ValueError(f"the body has {len(body)} bytes; its layout says {due}")
    found: dict[str, list[Tensor]] = {name: [] for name in layouts}
    offset = 0
    for name, dtype, shape, size in parts:
        found[name].append(_tensor(body[offset : offset + size], dtype, shape))
        offset += size
    return found


def rebuild_tree(leaves: list[Tensor], like: Tree, what: str, shapes: bool = True) -> Tree:
    """A tree of the structure, dtypes and (unless told otherwise) shapes of another."""
    places: list[Tensor] = tree_leaves(like)
    got, due = tensor_layouts(tuple(leaves)), tensor_layouts(like)
    if not shapes:
        got, due = [entry[:1] for entry in got], [entry[:1] for entry in due]
    if got != due:
        raise ValueError(f"{what} has tensors {_short(got)}; due are {_short(due)}")
    fresh: Iterator[Tensor] = iter([leaf.to(place.device) for leaf, place in zip(leaves, places, strict=True)])
    return tree_map(lambda place: next(fresh), like)


def _bytes(leaf: Tensor) -> np.ndarray:
    flat = leaf.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def _tensor(part: np.ndarray, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not len(part):
        return torch.zeros(shape, dtype=dtype)
    # A copy of its own: parts of the body need not lie where their type wants them.
    return torch.frombuffer(bytearray(part), dtype=dtype).reshape(shape)


def _listed(entries: Any) -> list[Any]:
    if not isinstance(entries, list):
        raise ValueError(f"a layout is {entries!r}; it must be a list")
    return entries


def _checked(entry: Any) -> tuple[torch.dtype, list[int], int]:
    """A layout entry's dtype, shape and bytes."""
    parts: list[Any] = entry if isinstance(entry, list) and entry else [None]
    head, *shape = parts
    if (
        not isinstance(head, str)
        or head not in ALLOWED_DTYPES
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise ValueError(f"a layout entry is {entry!r}; it must be a dtype ({', '.join(ALLOWED_DTYPES)}) and a shape")
    return ALLOWED_DTYPES[head], shape, math.prod(shape) * ALLOWED_DTYPES[head].itemsize


def _short(entries: Layout) -> str:
    text = json.dumps(entries)
    return text if len(text) <= 200 else text[:197] + "..."
