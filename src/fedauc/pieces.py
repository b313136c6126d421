"""A flat vector kept in pieces: large parameters each in a tensor of their own, the small ones together.

The clients' rules see a model as one vector and only add and scale it. In pieces the same arithmetic needs no vector to
be put together first, so that a compiler can write each gradient into its weights where it arises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.trees import Tree, tree_map

LARGE = 1 << 14
"""Parameters of at least so many numbers have a piece of their own; every piece costs a kernel."""


class SplitVector:
    """Sums, differences, multiples and quotients of vectors in pieces `[..., n]`; other operands are one number each.

    Such a number may be the same for all vectors, or a tensor `[...]` or `[..., 1]` of one for each.

    >>> [piece.tolist() for piece in 2 * Pieces(torch.ones(2), torch.zeros(1)) - Pieces(torch.ones(2), torch.ones(1))]
    [[1.0, 1.0], [-1.0]]
    """

    def __init__(self, *parts: Tensor) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._parts)

    def __add__(self, other: Any) -> SplitVector:
        return self._each(torch.add, other)

    def __sub__(self, other: Any) -> SplitVector:
        return self._each(torch.sub, other)

    def __mul__(self, other: Any) -> SplitVector:
        return self._each(torch.mul, other)

    def __truediv__(self, other: Any) -> SplitVector:
        return self._each(torch.div, other)

    def __neg__(self) -> SplitVector:
        return self * -1

    def __rsub__(self, other: Any) -> SplitVector:
        return self.__neg__().__add__(other)

    __radd__, __rmul__ = __add__, __mul__

    def _each(self, act: Callable[..., Tensor], other: Any) -> SplitVector:
        if isinstance(other, SplitVector):
            return SplitVector(*(act(mine, its) for mine, its in zip(self, other, strict=True)))
        if isinstance(other, Tensor) and other.ndim:
            shape, leading = tuple(other.shape), tuple(self._parts[0].shape[:-1])
            if shape not in (leading, (*leading, 1)):
                raise TypeError(f"vectors {leading} in pieces meet a tensor of shape {shape}; it must be {leading}")
            other = other.view(*leading, 1)
        return SplitVector(*(act(part, other) for part in self))


class PerClientScalar:
    """A number for each vector `[...]`, which multiplies vectors in pieces and such numbers, and nothing else.

    As a plain tensor it would also meet a batch of as many rows as there are vectors, and be wrong in silence.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, SplitVector | int | float):
            return self._numbers * other
        if isinstance(other, Tensor) and other.shape == self._numbers.shape:
            return self._numbers * other
        raise TypeError(f"a number for each of {tuple(self._numbers.shape)} vectors meets something else")

    __rmul__ = __mul__


class Window(NamedTuple):
    """The part of a convolution's weights that ever meets a pixel, which on small images is not all of the kernel.

    `shape` is the weights' in the vector, `axis` where its rows are, with its columns next; `rows` and `columns` say
    where the window starts and how long it is.
    """

    shape: tuple[int, ...]
    axis: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    def view(self, part: Tensor) -> Tensor:
        """What is inside of weights `[..., n]`, with the axes of their shape."""
        at = part.ndim - 1 + self.axis
        wide = part.view(*part.shape[:-1], *self.shape)
        return wide.narrow(at, *self.rows).narrow(at + 1, *self.columns)

    @property
    def share(self) -> float:
        """How much of the kernel is inside."""
        return self.rows[1] * self.columns[1] / math.prod(self.shape[self.axis : self.axis + 2])


class Cut(NamedTuple):
    """How a vector comes apart: the length of each of its consecutive parts, in order. Without any, it stays whole.

    Of parts with a window, named by their place, only what is inside is a piece like the others. The whole part is a
    piece of its own, after all others, whose gradient is zero: so an engine may move it once instead of step by step.
    """

    lengths: tuple[int, ...] = ()
    windows: tuple[tuple[int, Window], ...] = ()

    def apart(self, tree: Tree, leading: int) -> Tree:
        """A tree whose vectors, after so many leading dimensions, are in pieces."""

        def cut(leaf: Tensor) -> Any:
            mine = len(self.lengths) > 1 and leaf.ndim == leading + 1 and leaf.shape[-1] == sum(self.lengths)
            return self.pieces(leaf) if mine else leaf

        return tree_map(cut, tree)

    def pieces(self, vector: Tensor) -> SplitVector:
        """The large parts as views, the small ones, if there are any, as one piece; then those with windows."""
        parts = torch.split(vector, list(self.lengths), -1)
        return SplitVector(*gathered(self._inside(parts)), *(parts[place] for place, _ in self.windows))

    def parts(self, pieces: SplitVector) -> list[Tensor]:
        """The parts in their order; of those with a window what is inside."""
        *large, last = list(pieces)[: len(list(pieces)) - len(self.windows)]
        lengths = self.inner_lengths()
        if all(map(is_large, lengths)):
            return [*large, last]
        big, small = iter(large), iter(torch.split(last, [n for n in lengths if not is_large(n)], -1))
        return [next(big if is_large(length) else small) for length in lengths]

    def whole(self, pieces: SplitVector) -> list[Tensor]:
        """The parts in their order, whole."""
        return list(torch.split(self._vector(pieces), list(self.lengths), -1)) if self.windows else self.parts(pieces)

    def gradient(self, parts: Sequence[Tensor]) -> SplitVector:
        """A gradient's parts, whole or inside their windows, as pieces: outside the windows it is zero."""
        own, wide = self._inside(parts), parts[0]
        shapes = [(*wide.shape[:-1], self.lengths[place]) for place, _ in self.windows]
        return SplitVector(*gathered(own), *(torch.zeros(s, dtype=wide.dtype, device=wide.device) for s in shapes))

    def joined(self, tree: Tree) -> Tree:
        """The tree with whole vectors again."""
        if isinstance(tree, SplitVector):
            return self._vector(tree)
        if isinstance(tree, Tensor):
            return tree
        children = [self.joined(child) for child in tree]
        return type(tree)(*children) if type(tree) is not tuple else tuple(children)

    def inner_lengths(self) -> list[int]:
        """The length of each part; of those with a window, of what is inside."""
        shares = {place: window.share for place, window in self.windows}
        return [round(length * shares.get(place, 1)) for place, length in enumerate(self.lengths)]

    def _inside(self, parts: Sequence[Tensor]) -> list[Tensor]:
        found = list(parts)
        for place, window in self.windows:
            if found[place].shape[-1] == self.lengths[place]:
                found[place] = window.view(found[place]).flatten(found[place].ndim - 1)
        return found

    def _vector(self, pieces: SplitVector) -> Tensor:
        parts, all_ = self.parts(pieces), list(pieces)
        inside = [parts[place] for place, _ in self.windows]
        for (place, _), part in zip(self.windows, all_[len(all_) - len(self.windows) :], strict=True):
            parts[place] = part
        vector = torch.cat(parts, -1)
        for (place, window), own in zip(self.windows, inside, strict=True):
            room = window.view(torch.split(vector, list(self.lengths), -1)[place])
            room.copy_(own.view(room.shape))
        return vector


def gathered(parts: Sequence[Tensor]) -> SplitVector:
    """Parts `[..., n]` in order as pieces: the large ones as they are, the small ones, if any, as the last."""
    small = [part for part in parts if not is_large(part.shape[-1])]
    large = [part for part in parts if is_large(part.shape[-1])]
    return SplitVector(*large, *([torch.cat(small, -1)] if small else []))


def is_large(length: int) -> bool:
    """Whether a parameter of so many numbers has a piece of its own."""
    return length >= LARGE
