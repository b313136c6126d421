"""Random tensors that are pure functions of a key, for noise inside a visit.

A key is an int64 tensor with one entry per client (or none, at the server). Its words are those of SplitMix64 (see
`keys.py`), in torch, so that a stack of clients draws at once what each of them would draw alone, on any device, and a
compiler can trace it.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedauc import keys

if TYPE_CHECKING:
    from torch import Tensor

MANTISSA_BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""How many random bits a number in [0, 1) of each type can hold."""


def client_keys(clients: Sequence[int] | np.ndarray, *key: Hashable) -> np.ndarray:
    """A key for every client, int64 `[M]`; a client's key does not depend on the other clients."""
    return keys.client_words(clients, *key).view(np.int64)


def server_key(*key: Hashable) -> Tensor:
    """The key that `key` names, for a draw at the server."""
    return torch.from_numpy(keys.random_words(1, *key).view(np.int64))[0]


def fold_in(key: Tensor, number: int) -> Tensor:
    """Another key for each key: the words of different numbers are independent."""
    return _mix_words(key, torch.full_like(key, _as_signed((number + 1) * keys.SPLITMIX_GAMMA)))


def random_uniform(key: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers in [0, 1), `[..., count]`, for a key `[...]`; float32 unless another type is given.

    >>> random_uniform(server_key(0, "example"), 3).tolist() == random_uniform(server_key(0, "example"), 3).tolist()
    True
    """
    dtype = dtype or torch.float32
    bits = MANTISSA_BITS[str(dtype).removeprefix("torch.")]
    words = _shift_right(_draw_words(key, count), 64 - bits)
    return words.to(dtype) * 2.0**-bits


def random_normal(key: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers, `[..., count]`, for a key `[...]`, by the method of Box and Muller (1958)."""
    half = (count + 1) // 2
    uniform = random_uniform(key, 2 * half, torch.float64)
    # 1 - u lies in (0, 1], so that the logarithm is finite.
    radius, angle = torch.sqrt(-2 * torch.log1p(-uniform[..., :half])), 2 * math.pi * uniform[..., half:]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[..., :count].to(
        dtype or torch.float32
    )


class NoiseSource(ABC):
    """Where the server's noise of one round comes from: independent standard normal numbers, a stream per number."""

    @abstractmethod
    def draw_normal(self, stream: int, count: int, device: torch.device | None = None) -> Tensor:
        """Standard normal numbers, float64 `[count]`, always the same ones for the same stream."""


class KeyedNoise(NoiseSource):
    """Noise that follows from a key, so that a simulation can be repeated. Who knows the seed knows the noise."""

    def __init__(self, *key: Hashable) -> None:
        self._key = server_key(*key)

    def draw_normal(self, stream: int, count: int, device: torch.device | None = None) -> Tensor:
        """The numbers of `random_normal`."""
        return random_normal(fold_in(self._key.to(device or "cpu"), stream), count, torch.float64)


class SecretNoise(NoiseSource):
    """Noise from the ChaCha20 stream of a secret of 32 bytes: nobody without the secret can compute it.

    Numbers are rounded to float64 like those of any generator, which the proofs for real numbers neglect (Mironov, On
    significance of the least significant bits for differential privacy, CCS 2012).
    """

    def __init__(self, secret: bytes, *key: Hashable) -> None:
        self._secret, self._key = secret, key

    def draw_normal(self, stream: int, count: int, device: torch.device | None = None) -> Tensor:
        """By the method of Box and Muller (1958), from words of the cipher's key stream."""
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError:
            reason = "noise from a secret needs cryptography, which is not installed"
            raise ValueError(f"{reason}: run pip install cryptography") from None
        # A key per stream instead of a nonce: the cipher's nonce is too short to hash into.
        name = "\x1f".join(map(str, (*self._key, stream))).encode()
        stream_key = hashlib.blake2b(name, key=self._secret, digest_size=32).digest()
        encryptor = Cipher(algorithms.ChaCha20(stream_key, bytes(16)), mode=None).encryptor()
        half = (count + 1) // 2
        words = np.frombuffer(encryptor.update(bytes(16 * half)), dtype="<u8")
        uniform = torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
        radius, angle = torch.sqrt(-2 * torch.log1p(-uniform[:half])), 2 * math.pi * uniform[half:]
        normal = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]
        return normal.to(device or "cpu")


def _draw_words(key: Tensor, count: int) -> Tensor:
    counters = torch.arange(1, count + 1, dtype=torch.int64, device=key.device)
    # A compiler that knows the counters would compute bounds of the products, which exceed 64 bits; ^ 0 hides them.
    return _mix_words(key[..., None], (counters ^ 0) * _as_signed(keys.SPLITMIX_GAMMA))


def _mix_words(first: Tensor, second: Tensor) -> Tensor:
    """SplitMix64's output function of the sum; int64 products and sums wrap around, as those of uint64 do."""
    words = first + second
    words = (words ^ _shift_right(words, 30)) * _as_signed(keys.FIRST_FACTOR)
    words = (words ^ _shift_right(words, 27)) * _as_signed(keys.SECOND_FACTOR)
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """A shift that fills with zeros, as that of uint64 does; torch's shift of int64 repeats the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _as_signed(word: int) -> int:
    """The int64 with the bits of a word of 64 bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
