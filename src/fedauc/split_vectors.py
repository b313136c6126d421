"""Split vectors: a flat vector of parameters kept as several tensors, so that nothing has to be concatenated.

An algorithm sees a model as one flat vector and only adds and scales it. A split vector offers the same arithmetic on a
tensor per large parameter (all small parameters share one tensor), so that a compiler can write every gradient into its
weights where it arises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc.trees import Tree, tree_map

OWN_PART_FROM = 1 << 14
"""Parameters with at least so many numbers become a part of their own; every part costs a kernel launch."""


class SplitVector:
    """Vectors in parts `[..., n]`, with +, -, * and /. Other operands are scalars, or one scalar per vector.

    Scalars per vector are tensors of shape `[...]` or `[..., 1]`.

    >>> a, b = SplitVector(torch.ones(2), torch.zeros(1)), SplitVector(torch.ones(2), torch.ones(1))
    >>> [part.tolist() for part in 2 * a - b]
    [[1.0, 1.0], [-1.0]]
    """

    def __init__(self, *parts: Tensor) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._parts)

    def __add__(self, operand: Any) -> SplitVector:
        return self._combine_parts(torch.add, operand)

    def __sub__(self, operand: Any) -> SplitVector:
        return self._combine_parts(torch.sub, operand)

    def __mul__(self, operand: Any) -> SplitVector:
        return self._combine_parts(torch.mul, operand)

    def __truediv__(self, operand: Any) -> SplitVector:
        return self._combine_parts(torch.div, operand)

    def __neg__(self) -> SplitVector:
        return self * -1

    def __rsub__(self, operand: Any) -> SplitVector:
        return self.__neg__().__add__(operand)

    __radd__, __rmul__ = __add__, __mul__

    def _combine_parts(self, function: Callable[..., Tensor], operand: Any) -> SplitVector:
        if isinstance(operand, SplitVector):
            return SplitVector(*(function(left, right) for left, right in zip(self, operand, strict=True)))
        if isinstance(operand, Tensor) and operand.ndim:
            shape, leading = tuple(operand.shape), tuple(self._parts[0].shape[:-1])
            if shape not in (leading, (*leading, 1)):
                raise TypeError(f"split vectors {leading} meet a tensor of shape {shape}; it must be {leading}")
            operand = operand.view(*leading, 1)
        return SplitVector(*(function(part, operand) for part in self))


class PerClientScalar:
    """One number per client `[...]`, which multiplies split vectors and other per-client numbers, and nothing else.

    A plain tensor would also multiply a batch that happens to have as many rows as there are clients, silently wrong.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def __mul__(self, operand: Any) -> Any:
        if isinstance(operand, SplitVector | int | float):
            return self._numbers * operand
        if isinstance(operand, Tensor) and operand.shape == self._numbers.shape:
            return self._numbers * operand
        shape = tuple(self._numbers.shape)
        raise TypeError(f"a per-client scalar {shape} meets something that is neither a split vector nor of its shape")

    __rmul__ = __mul__


class KernelWindow(NamedTuple):
    """The part of a convolution's kernel that ever meets a pixel; on small images the rest only multiplies padding.

    `shape` is the shape of the weights in the flat vector, `axis` the position of the kernel's rows in it (its columns
    come next); `rows` and `columns` hold the window's start and length.
    """

    shape: tuple[int, ...]
    axis: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    def view_inside(self, part: Tensor) -> Tensor:
        """The weights inside the window, out of weights `[..., n]`, as a view with the axes of `shape`."""
        axis = part.ndim - 1 + self.axis
        return part.view(*part.shape[:-1], *self.shape).narrow(axis, *self.rows).narrow(axis + 1, *self.columns)

    @property
    def kernel_share(self) -> float:
        """The fraction of the kernel that lies inside the window."""
        return self.rows[1] * self.columns[1] / math.prod(self.shape[self.axis : self.axis + 2])


class VectorSplit(NamedTuple):
    """How a vector is split: the length of each parameter, in order. Without lengths it is not split.

    For parameters with a window, given by their position, a split vector holds the weights inside the window like any
    other part, and the full parameter as one more part at the end. Its gradient is zero, so that an engine may update
    it once per visit instead of at every step (`engines/cuda/padding_weights.py`).
    """

    lengths: tuple[int, ...] = ()
    windows: tuple[tuple[int, KernelWindow], ...] = ()

    def split_tree(self, tree: Tree, leading: int) -> Tree:
        """The tree with its vectors, which have so many leading dimensions, split."""

        def split_leaf(leaf: Tensor) -> Any:
            is_vector = leaf.ndim == leading + 1 and leaf.shape[-1] == sum(self.lengths)
            return self.split_vector(leaf) if len(self.lengths) > 1 and is_vector else leaf

        return tree_map(split_leaf, tree)

    def split_vector(self, vector: Tensor) -> SplitVector:
        """Large parameters as views, the small ones as one part, and then the full parameters that have a window."""
        parameters = torch.split(vector, list(self.lengths), -1)
        full = (parameters[position] for position, _ in self.windows)
        return SplitVector(*group_small_parts(self._crop_to_windows(parameters)), *full)

    def list_parameters(self, vector: SplitVector) -> list[Tensor]:
        """The parameters in their order, cropped to their windows."""
        parts = list(vector)
        *large, last = parts[: len(parts) - len(self.windows)]
        lengths = self.cropped_lengths()
        if all(map(is_large, lengths)):
            return [*large, last]
        large_parts, small_parts = iter(large), iter(torch.split(last, [n for n in lengths if not is_large(n)], -1))
        return [next(large_parts if is_large(length) else small_parts) for length in lengths]

    def list_full_parameters(self, vector: SplitVector) -> list[Tensor]:
        """The parameters in their order, complete."""
        if not self.windows:
            return self.list_parameters(vector)
        return list(torch.split(self._join_vector(vector), list(self.lengths), -1))

    def split_gradient(self, gradients: Sequence[Tensor]) -> SplitVector:
        """A split gradient from each parameter's own, complete or cropped; outside the windows it is zero."""
        like = gradients[0]
        shapes = [(*like.shape[:-1], self.lengths[position]) for position, _ in self.windows]
        zeros = (torch.zeros(shape, dtype=like.dtype, device=like.device) for shape in shapes)
        return SplitVector(*group_small_parts(self._crop_to_windows(gradients)), *zeros)

    def join_tree(self, tree: Tree) -> Tree:
        """The tree with flat vectors again."""
        if isinstance(tree, SplitVector):
            return self._join_vector(tree)
        if isinstance(tree, Tensor):
            return tree
        children = [self.join_tree(child) for child in tree]
        return type(tree)(*children) if type(tree) is not tuple else tuple(children)

    def cropped_lengths(self) -> list[int]:
        """The length of each parameter inside its window."""
        shares = {position: window.kernel_share for position, window in self.windows}
        return [round(length * shares.get(position, 1)) for position, length in enumerate(self.lengths)]

    def _crop_to_windows(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        cropped = list(parameters)
        for position, window in self.windows:
            if cropped[position].shape[-1] == self.lengths[position]:
                cropped[position] = window.view_inside(cropped[position]).flatten(cropped[position].ndim - 1)
        return cropped

    def _join_vector(self, vector: SplitVector) -> Tensor:
        parameters, parts = self.list_parameters(vector), list(vector)
        inside = [parameters[position] for position, _ in self.windows]
        for (position, _), full in zip(self.windows, parts[len(parts) - len(self.windows) :], strict=True):
            parameters[position] = full
        joined = torch.cat(parameters, -1)
        for (position, window), weights in zip(self.windows, inside, strict=True):
            target = window.view_inside(torch.split(joined, list(self.lengths), -1)[position])
            target.copy_(weights.view(target.shape))
        return joined


def group_small_parts(parts: Sequence[Tensor]) -> SplitVector:
    """A split vector of parts `[..., n]`: the large ones in their order, then the small ones, if any, concatenated."""
    small = [part for part in parts if not is_large(part.shape[-1])]
    large = [part for part in parts if is_large(part.shape[-1])]
    return SplitVector(*large, *([torch.cat(small, -1)] if small else []))


def is_large(length: int) -> bool:
    """Whether a parameter of so many numbers is a part of its own."""
    return length >= OWN_PART_FROM
