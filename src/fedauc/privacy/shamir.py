"""Shamir's secret sharing: any `threshold` of `count` shares give a secret of 32 bytes back, fewer say nothing of it.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo a prime above
2^256; share number k is its value at k, for k from 1 to `count`. Any threshold - 1 shares are independent uniform
numbers whatever the secret is.

Reference: Shamir, How to share a secret, Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

PRIME = (1 << 256) + 297
"""The smallest prime above 2^256."""

SECRET_BYTES = 32

SHARE_BYTES = 33
"""Bytes of a share's value, little-endian."""


class SecretSource(Protocol):
    """Where secret numbers come from: the module `secrets`, or a seeded stand-in of a test."""

    def token_bytes(self, nbytes: int, /) -> bytes:
        """So many random bytes."""

    def randbelow(self, exclusive_upper_bound: int, /) -> int:
        """A random integer from 0 to below the bound."""


class Share(NamedTuple):
    """The value of the polynomial at a number from 1 on."""

    number: int
    value: int

    def pack_value(self) -> bytes:
        """The value as `SHARE_BYTES` bytes."""
        return self.value.to_bytes(SHARE_BYTES, "little")


def unpack_share(number: int, packed: bytes) -> Share:
    """The share of that number from the bytes of `Share.pack_value`."""
    if len(packed) != SHARE_BYTES:
        raise ValueError(f"share {number} has {len(packed)} bytes; it must have {SHARE_BYTES}: send it again")
    return Share(number, int.from_bytes(packed, "little"))


def share_secret(secret: bytes, threshold: int, count: int, randomness: SecretSource = secrets) -> list[Share]:
    """Shares 1 to `count` of a secret of 32 bytes, of which any `threshold` suffice.

    >>> shares = share_secret(b"a secret of thirty-two bytes....", 2, 3)
    >>> recover_secret(shares[1:], 2)
    b'a secret of thirty-two bytes....'
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret has {len(secret)} bytes; it must have {SECRET_BYTES}: share a key of this length")
    if not 1 <= threshold <= count:
        raise ValueError(f"threshold is {threshold}; it must be from 1 to the {count} shares: lower the threshold")
    coefficients = [int.from_bytes(secret, "little"), *(randomness.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for number in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * number + coefficient) % PRIME
        shares.append(Share(number, value))
    return shares


def recover_secret(shares: Sequence[Share], threshold: int) -> bytes:
    """The secret of at least `threshold` shares; shares beyond these must lie on the same polynomial."""
    numbers = tuple(share.number for share in shares)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"shares are numbered {list(numbers)}; no number may occur twice: pass each share once")
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares are given; {threshold} are needed: collect more shares")
    for number, value in shares:
        if not (0 < number < PRIME and 0 <= value < PRIME):
            raise ValueError(f"share {number} is out of range; number and value must be below {PRIME}: send it again")
    for share in shares[threshold:]:
        if interpolate_shares(shares[:threshold], share.number) != share.value:
            reason = f"it contradicts shares {list(numbers[:threshold])}"
            raise ValueError(f"share {share.number} is wrong, or another is: {reason}; collect the shares again")
    secret = interpolate_shares(shares[:threshold], 0)
    if secret >> (8 * SECRET_BYTES):
        raise ValueError(f"the secret has more than {SECRET_BYTES} bytes; a share is wrong: collect the shares again")
    return secret.to_bytes(SECRET_BYTES, "little")


def interpolate_shares(shares: Sequence[Share], at: int) -> int:
    """The value at a number of the polynomial of lowest degree through the shares (Lagrange's formula)."""
    weights = _lagrange_weights(tuple(share.number for share in shares), at)
    return sum(weight * share.value for weight, share in zip(weights, shares, strict=True)) % PRIME


@lru_cache(maxsize=1024)
def _lagrange_weights(numbers: tuple[int, ...], at: int) -> tuple[int, ...]:
    # Cached, because a round recovers many secrets from shares of the same numbers.
    weights = []
    for number in numbers:
        numerator = denominator = 1
        for factor in numbers:
            if factor != number:
                numerator = numerator * (at - factor) % PRIME
                denominator = denominator * (number - factor) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)
