"""Real vectors as integers modulo 2^32, in which masks cancel exactly.

A value v becomes round(v · scale), an int32. Sums of up to `clients` such integers stay within (-2^31, 2^31) because
every summand is at most (2^31 - 1) // clients in absolute value; a larger one is refused, never wrapped or clipped.
Masks may wrap around: int32 addition in torch is addition modulo 2^32, so a sum of masked integers whose masks cancel
is the plain sum, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedauc.fields import check_fields, describe

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SUM = (1 << 31) - 1
"""The largest absolute value of a sum."""

NOISE_TAIL = 12.0
"""Deviations of noise for which `choose_scale` leaves room: noise beyond them has probability below 10^-32."""


@dataclass(frozen=True)
class FixedPoint:
    """How real numbers become integers: round(v · scale), for sums over at most `clients` clients.

    Guarantees. `decode_sum` of the modular sum of encoded vectors is exactly the sum of the rounded values divided by
    `scale`; each rounding moves a number by at most 1 / (2 · scale).

    >>> code = FixedPoint(scale=4.0, clients=2)
    >>> code.decode_sum(code.encode_vector(torch.tensor([0.5, -1.3])) + code.encode_vector(torch.tensor([0.25, 0.0])))
    tensor([ 0.7500, -1.2500], dtype=torch.float64)
    """

    scale: float = field(metadata=describe("Integer steps per unit.", above=0))
    clients: int = field(metadata=describe("Most clients in a sum.", at_least=1, at_most=LARGEST_SUM))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def largest_integer(self) -> int:
        """The largest absolute value of one client's integer."""
        return LARGEST_SUM // self.clients

    def encode_vector(self, vector: Tensor, name: str = "vector") -> Tensor:
        """The integers, int32, of real numbers of any shape; numbers out of range, and NaN, are refused."""
        # float64 holds every integer in range exactly, and a float32 number times a power of two as well.
        return self._check_range(torch.round(vector.double() * self.scale), name)

    def add_integers(self, encoded: Tensor, integers: Tensor, name: str = "noise") -> Tensor:
        """Encoded numbers plus integers, such as discrete noise; a sum out of range is refused."""
        return self._check_range(encoded.long() + integers.long(), f"vector with {name}")

    def decode_sum(self, total: Tensor) -> Tensor:
        """The real numbers, float64, that a modular sum of encoded vectors stands for."""
        if total.dtype != torch.int32:
            raise ValueError(f"total has dtype {total.dtype}; it must be int32: sum with sum_modulo or with int32 +")
        return total.double() / self.scale

    def _check_range(self, integers: Tensor, name: str) -> Tensor:
        # Written so that NaN, which compares false, counts as out of range.
        outside = ~(integers.abs() <= self.largest_integer)
        if outside.any():
            position = tuple(int(index) for index in outside.nonzero()[0])
            value = float(integers[position]) / self.scale
            bound = f"with scale {self.scale:g} and {self.clients} clients it must be within "
            limit = f"±{self.largest_integer / self.scale:.6g}"
            remedy = "clip it to a smaller norm or lower the scale (choose_scale)"
            raise ValueError(f"{name}{list(position)} is {value:.6g}; {bound}{limit}: {remedy}")
        return integers.to(torch.int32)


def sum_modulo(stack: Tensor) -> Tensor:
    """The sum modulo 2^32 over the first dimension of int32 `[M, ...]`."""
    if stack.dtype != torch.int32:
        raise ValueError(f"stack has dtype {stack.dtype}; it must be int32: encode it with FixedPoint.encode_vector")
    total = torch.zeros_like(stack[0])
    for vector in stack:
        total += vector
    return total


def choose_scale(largest_norm: float, clients: int, noise_deviation: float = 0.0) -> float:
    """The largest power of two with which vectors of that norm, and noise of that deviation each, fit a sum.

    Both are in units of the vector, for one client. A number of the vector is at most its norm, the noise counts with
    `NOISE_TAIL` deviations, and rounding with one step:

    (largest_norm + NOISE_TAIL · noise_deviation) · scale + 1 <= (2^31 - 1) // clients

    >>> choose_scale(1.0, 10)
    134217728.0
    """
    for name, value in (("largest_norm", largest_norm), ("noise_deviation", noise_deviation)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}; it must be a finite number of at least 0: correct {name}")
    reach = largest_norm + NOISE_TAIL * noise_deviation
    if reach == 0:
        raise ValueError("largest_norm is 0; it must be above 0: give the norm to which updates are clipped")
    largest_integer = FixedPoint(1.0, clients).largest_integer
    if largest_integer < 2:
        raise ValueError(f"clients is {clients}; 32 bits hold sums of at most {LARGEST_SUM // 2}: lower clients")
    return 2.0 ** math.floor(math.log2((largest_integer - 1) / reach))
