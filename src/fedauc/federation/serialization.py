"""How tensors travel: a payload is a JSON header, and the tensors of any number of trees as one flat array of bytes.

No class, class name or code travels: the receiver knows the structure of the trees that it expects, and fills it with
the received tensors. Numbers are little-endian, as on every machine that torch supports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.federation.versions import stamp_version
from fedauc.trees import Tree, tree_leaves, tree_map

TensorLayouts = list[list[Any]]
"""The dtype and shape of each tensor of a tree, such as `["float32", 3, 4]`."""

ALLOWED_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    )
}

MAX_HEADER_LENGTH = 1 << 20
"""Longest header that is parsed, in characters. Our own headers have a few thousand."""


class Payload(NamedTuple):
    """The content of a message: a header as JSON text, and one flat uint8 array."""

    header_text: str
    body: np.ndarray

    def body_bytes(self) -> bytes:
        """The body as bytes; it is not copied where it is a view of all of a bytes object."""
        base = self.body.base
        return base if isinstance(base, bytes) and len(base) == self.body.nbytes else self.body.tobytes()

    def read_header(self) -> dict[str, Any]:
        """The header as a dictionary; anything else raises a ValueError of one line."""
        if len(self.header_text) > MAX_HEADER_LENGTH:
            raise ValueError(
                f"the header has {len(self.header_text)} characters; at most {MAX_HEADER_LENGTH} are accepted"
            )
        try:
            header = json.loads(self.header_text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header is not JSON ({error}); both sides must run the same fedauc") from error
        if not isinstance(header, dict):
            raise ValueError(f"the header is a {type(header).__name__}; it must be a JSON object")
        return header


def pack_payload(header: Mapping[str, Any], trees: Mapping[str, Tree] | None = None) -> Payload:
    """Pack a header and named trees of tensors; their layouts, and our version, are added to the header."""
    trees = trees or {}
    layouts = {name: tensor_layouts(tree) for name, tree in trees.items()}
    chunks = list[np.ndarray]()
    for leaf in tree_leaves(tuple(trees.values())):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            chunks.append(flat.view(torch.uint8).numpy())
    # The only copy of large tensors: what is sent, hashed and logged is this object.
    body = np.frombuffer(b"".join(chunk.data for chunk in chunks), np.uint8)
    return Payload(json.dumps({**stamp_version(header), "layouts": layouts}), body)


def tensor_layouts(tree: Tree) -> TensorLayouts:
    """The dtype and shape of every tensor of a tree, in order.

    >>> tensor_layouts((torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)))
    [['float32', 2, 3], ['int64']]
    """
    return [[str(leaf.dtype).removeprefix("torch."), *leaf.shape] for leaf in tree_leaves(tree)]


def unpack_tensors(payload: Payload, max_bytes: int | None = None) -> dict[str, list[Tensor]]:
    """The tensors of every tree, by the tree's name. The size is checked before anything is copied."""
    body = payload.body
    if body.dtype != np.uint8 or body.ndim != 1:
        raise ValueError(f"the body is {body.dtype} {body.shape}; it must be one flat array of uint8")
    if max_bytes is not None and len(body) > max_bytes:
        raise ValueError(f"the body has {len(body)} bytes; at most {max_bytes} are expected")
    layouts = payload.read_header().get("layouts")
    if not isinstance(layouts, dict):
        raise ValueError(f"layouts is {layouts!r}; it must be an object of lists")
    parsed = {name: _parse_layouts(entries) for name, entries in layouts.items()}
    expected = sum(size for entries in parsed.values() for *_, size in entries)
    if expected != len(body):
        raise ValueError(f"the body has {len(body)} bytes; its layouts describe {expected}")
    trees: dict[str, list[Tensor]] = {name: [] for name in parsed}
    offset = 0
    for name, entries in parsed.items():
        for dtype, shape, size in entries:
            # A copy, because a slice of the body need not be aligned as its dtype requires.
            chunk = bytearray(body[offset : offset + size])
            tensor = torch.frombuffer(chunk, dtype=dtype).reshape(shape) if size else torch.zeros(shape, dtype=dtype)
            trees[name].append(tensor)
            offset += size
    return trees


def rebuild_tree(tensors: list[Tensor], template: Tree, name: str, check_shapes: bool = True) -> Tree:
    """A tree with the template's structure and devices. Dtypes must match the template's; shapes may be unchecked."""
    received, expected = tensor_layouts(tuple(tensors)), tensor_layouts(template)
    if not check_shapes:
        received, expected = [entry[:1] for entry in received], [entry[:1] for entry in expected]
    if received != expected:
        texts = [text if len(text) <= 200 else text[:197] + "..." for text in map(json.dumps, (received, expected))]
        raise ValueError(f"{name} has tensors {texts[0]}; expected are {texts[1]}")
    remaining: Iterator[Tensor] = iter(tensors)
    return tree_map(lambda leaf: next(remaining).to(leaf.device), template)


def _parse_layouts(entries: Any) -> list[tuple[torch.dtype, list[int], int]]:
    """The dtype, shape and number of bytes of each tensor of a tree."""
    if not isinstance(entries, list):
        raise ValueError(f"a layout is {entries!r}; it must be a list")
    parsed = []
    for entry in entries:
        name, *shape = list[Any](entry) if isinstance(entry, list) and entry else list[Any]([None])
        dtype = ALLOWED_DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or not all(type(size) is int and size >= 0 for size in shape):
            expected = f"a dtype ({', '.join(ALLOWED_DTYPES)}) and a shape"
            raise ValueError(f"a layout entry is {entry!r}; it must be {expected}")
        parsed.append((dtype, shape, math.prod(shape) * dtype.itemsize))
    return parsed
