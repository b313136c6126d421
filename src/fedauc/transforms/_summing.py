"""Transforms whose uploads are added up as integers, as a server can do that must not see them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedauc.interfaces import UploadTransform


@dataclass(frozen=True, kw_only=True)
class SummingTransform(UploadTransform):
    """`client` returns int32 tensors, and their plain sum modulo 2^32 takes the place of the mean until `server`.

    `client` refuses what does not fit, so that a compiler cannot trace it; engines call it eagerly.
    """

    encodes: ClassVar[bool] = True
    needs_fixed_denominator: ClassVar[bool] = True
    refuses_pools: ClassVar[bool] = True

    @abstractmethod
    def least_clients(self, due: int) -> int:
        """How many of the clients that are due must come, or the round is skipped."""
