"""Secret sharing: recovery from any shares, no information in fewer, and refusals."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from fedauc.privacy.shamir import PRIME, Share, interpolate_shares, recover_secret, share_secret, unpack_share
from privacy.secret_sources import SeededSource


def test_the_modulus_is_a_prime_above_every_secret() -> None:
    """The test of Miller and Rabin with 40 random bases errs with probability below 4^-40."""
    assert PRIME > 1 << 256
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    draw = random.Random(0)
    for _ in range(40):
        power = pow(draw.randrange(2, PRIME - 1), odd, PRIME)
        chain = [power := (power if step == 0 else power * power % PRIME) for step in range(twos)]
        assert chain[0] == 1 or PRIME - 1 in chain


@pytest.mark.parametrize(("threshold", "count"), [(1, 1), (1, 3), (2, 3), (3, 5), (5, 5), (26, 50)])
def test_any_threshold_many_shares_recover_the_secret(threshold: int, count: int) -> None:
    draw = random.Random(count)
    for secret in (bytes(32), b"\xff" * 32, draw.randbytes(32)):
        shares = share_secret(secret, threshold, count)
        for _ in range(5):
            chosen = draw.sample(shares, draw.randint(threshold, count))
            assert recover_secret(chosen, threshold) == secret


def test_one_share_less_is_consistent_with_every_secret() -> None:
    """For threshold - 1 shares and any other secret there is a polynomial of the right degree through both."""
    shares = share_secret(b"s" * 32, 3, 5)
    for pair in combinations(shares, 2):
        third = interpolate_shares([Share(0, 12345), *pair], 9)
        assert recover_secret([*pair, Share(9, third)], 3) == (12345).to_bytes(32, "little")


def test_single_shares_are_spread_over_the_field_whatever_the_secret() -> None:
    """2,000 first bytes of share 1: a chi-square of 15 degrees of freedom stays below its 1 - 10^-6 quantile, 55.9."""
    for secret in (bytes(32), b"\xff" * 32):
        source = SeededSource(1)
        counts = [0] * 16
        for _ in range(2000):
            counts[share_secret(secret, 2, 2, source)[0].value >> 252 & 15] += 1
        assert sum((count - 125) ** 2 / 125 for count in counts) < 55.9


def test_a_wrong_share_beyond_the_threshold_is_noticed() -> None:
    shares = share_secret(b"s" * 32, 2, 3)
    wrong = Share(3, (shares[2].value + 1) % PRIME)
    with pytest.raises(ValueError, match="share 3 is wrong"):
        recover_secret([*shares[:2], wrong], 2)


def test_shares_travel_as_33_bytes() -> None:
    share = share_secret(b"s" * 32, 2, 3)[1]
    assert unpack_share(2, share.pack_value()) == share
    assert len(share.pack_value()) == 33
    with pytest.raises(ValueError, match="share 2 has 32 bytes"):
        unpack_share(2, bytes(32))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="threshold is 4; it must be from 1 to the 3 shares"):
        share_secret(bytes(32), 4, 3)
    with pytest.raises(ValueError, match="threshold is 0"):
        share_secret(bytes(32), 0, 3)
    with pytest.raises(ValueError, match="secret has 31 bytes"):
        share_secret(bytes(31), 2, 3)
    shares = share_secret(bytes(32), 2, 3)
    with pytest.raises(ValueError, match="no number may occur twice"):
        recover_secret([shares[0], shares[0]], 2)
    with pytest.raises(ValueError, match="1 shares are given; 2 are needed"):
        recover_secret(shares[:1], 2)
    with pytest.raises(ValueError, match="out of range"):
        recover_secret([shares[0], Share(2, PRIME)], 2)
    with pytest.raises(ValueError, match="out of range"):
        recover_secret([shares[0], Share(0, 5)], 2)
