"""Uploads as integers modulo 2^32, so that a server can add them up without seeing any of them.

    client m:  x_m = round(s · Δ_m)                             s: integer steps per unit, a power of two
    sum:       X   = Σ_m x_m  modulo 2^32                       what the server learns
    server:    mean = X / (s · M)                               M: the expected number of clients, not how many came

A federation hides the x_m behind masks that cancel in X (`fedauc.privacy.secure_sum`). Masks cancel exactly and leave
no rounding error, so a simulation adds none: its X has the bits of the federation's. A number that does not fit is
refused, never wrapped or clipped.

After `client-dp` every client also adds discrete Gaussian noise to its integers, unless the server is trusted with that
(`noise="server"`). The noise of the least number of clients that a sum can have is enough for the guarantee, which then
holds against the server as well. Histograms of scores are noised in every round, like the rest of an upload, and not
once per cycle: the server must not see a round's histograms without noise. In a simulation the noise follows from the
seed, or from the run's secret; a site draws it from the operating system's generator and ChaCha20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fedauc.fields import option
from fedauc.interfaces import ServerRound, Upload
from fedauc.privacy.fixed_point import LARGEST_SUM, NOISE_TAIL, FixedPoint, choose_scale
from fedauc.privacy.secure_sum import MINIMUM_COHORT, choose_threshold
from fedauc.transforms._summing import SummingTransform
from fedauc.trees import Tree, is_empty, tree_map

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_LARGEST = 16.0
"""The largest number that a client sends, where nothing is known of it: changes of a model are far below."""

DEFAULT_CLIENTS = 1000
"""Clients that a sum has room for, before the cohorts of a run are known."""

ROUNDING_SLACK = 1 + 1e-6
"""How much clipping in float32 may exceed the norm."""


class OutOfRangeError(ValueError):
    """A client's upload does not fit the integers of a secure sum."""


@dataclass(frozen=True, kw_only=True)
class SecureSum(SummingTransform):
    """Sends the change as 32-bit integers of which the server learns the sum over the cohort only.

    Formal guarantees. The server and sites that work with it learn the sum over at least `threshold` of a cohort, see
    `fedauc.privacy.secure_sum`. Together with `client-dp` the sum is noised before the server sees it: (ε, δ) then
    holds against the server, which follows the protocol but keeps everything it sees, and `colluding` sites. Against
    them no draw of clients is secret, so that sampling does not amplify; correlated noise would need a server that
    knows earlier noise, so that noise is independent from round to round.
    """

    name: ClassVar[str] = "secure-sum"

    largest: float | None = option(
        None, "Largest number of an upload; larger ones are refused. By default the norm of client-dp, or 16.", above=0
    )
    scale_bits: int | None = option(
        None, "Bits after the binary point; by default all that a sum over the largest cohort leaves.", at_least=0
    )
    noise: Literal["clients", "server"] = option(
        "clients", "Who adds the noise of client-dp: clients, or a server that is trusted with the sum."
    )
    threshold: float = option(
        2 / 3, "Share of a cohort; a sum needs more of its clients than that.", at_least=0.5, at_most=1
    )
    minimum_cohort: int = option(MINIMUM_COHORT, "Smallest cohort; of two, each learns the other's part.", at_least=2)
    colluding: int = option(
        1,
        "Clients that may work together, or with the server, against another: each knows its own noise, which does not "
        "count.",
        at_least=0,
    )

    @property
    def largest_number(self) -> float:
        """The largest number of an upload."""
        return DEFAULT_LARGEST if self.largest is None else self.largest

    @property
    def scale(self) -> float:
        """Integer steps per unit."""
        if self.scale_bits is None:
            return choose_scale(self.largest_number, DEFAULT_CLIENTS)
        return 2.0**self.scale_bits

    @property
    def largest_deviation(self) -> float:
        """The largest deviation of a client's noise, in integer steps; without preparation there is no noise."""
        return 0.0

    @property
    def capacity(self) -> int:
        """How many clients a sum has room for."""
        reach = self.largest_number * ROUNDING_SLACK * self.scale + NOISE_TAIL * self.largest_deviation + 1
        return LARGEST_SUM // math.ceil(reach)

    def least_clients(self, due: int) -> int:
        """How many of the clients that are due must come for a sum: more than the share `threshold` of them."""
        return max(self.minimum_cohort, choose_threshold(due, self.threshold))

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """The change in fixed point, int32; a number out of range is refused."""
        if is_empty(upload.mean):
            return upload, state
        return upload._replace(mean=tree_map(self._encode_leaf, upload.mean)), state

    def zero_mean(self, zeros: Tree) -> Tree:
        """The sum over nobody."""
        return tree_map(lambda leaf: torch.zeros_like(leaf, dtype=torch.int32), zeros)

    def server(self, mean: Tree, state: Tree, server_round: ServerRound) -> tuple[Tree, Tree]:
        """The mean that a sum of integers stands for, in the types of the shared state."""
        # A round without anybody who is due has a sum of zeros, and any denominator will do.
        divisor, code = server_round.cohort.divisor or 1.0, FixedPoint(self.scale, 1)
        decoded = tree_map(
            lambda like, total: (code.decode_sum(total) / divisor).to(like.dtype), server_round.shared, mean
        )
        return decoded, state

    def _encode_leaf(self, leaf: Tensor) -> Tensor:
        # Written so that NaN, which compares false, counts as out of range.
        outside = ~(leaf.abs() <= self.largest_number * ROUNDING_SLACK)
        if outside.any():
            value = float(leaf[outside][0])
            remedy = f"raise --transforms.{self.name}.largest, or lower the learning rate"
            raise OutOfRangeError(
                f"an upload holds {value:.6g}; a secure sum takes numbers up to {self.largest_number:g}: {remedy}"
            )
        return FixedPoint(self.scale, self.capacity).encode_vector(leaf)
