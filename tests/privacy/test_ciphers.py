"""The primitives against the test vectors of their RFCs, and against a ChaCha20 written from the RFC."""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys

import numpy as np
import pytest
import torch

from fedauc.privacy.ciphers import (
    BLOCK_BYTES,
    add_mask,
    agree_secret,
    derive_key,
    derive_public_key,
    mask_words,
    open_packet,
    seal_packet,
    stream_words,
)


def chacha_block(key: bytes, counter: int, nonce: bytes) -> list[int]:
    """The 16 words of a block, written after RFC 8439, section 2.3."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start += [*struct.unpack("<8I", key), counter, *struct.unpack("<3I", nonce)]
    words = list(start)

    def turn(a: int, b: int, c: int, d: int) -> None:
        for into, add, mix, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[into] = (words[into] + words[add]) % (1 << 32)
            mixed = words[mix] ^ words[into]
            words[mix] = (mixed << bits | mixed >> (32 - bits)) % (1 << 32)

    for _ in range(10):
        for column in range(4):
            turn(column, column + 4, column + 8, column + 12)
        for column in range(4):
            turn(column, (column + 1) % 4 + 4, (column + 2) % 4 + 8, (column + 3) % 4 + 12)
    return [(word + first) % (1 << 32) for word, first in zip(words, start, strict=True)]


def test_the_twin_of_chacha_agrees_with_the_rfc() -> None:
    """RFC 8439, section 2.3.2."""
    block = chacha_block(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"))
    assert block[:4] == [0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3]
    assert block[-4:] == [0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2]


def test_mask_words_are_those_of_the_rfc() -> None:
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter are zero."""
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    expected += "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    assert mask_words(bytes(32), 16).astype("<u4").tobytes().hex() == expected


def test_mask_words_are_those_of_the_twin_for_any_seed() -> None:
    for seed in (bytes(range(32)), b"\xa5" * 32):
        expected = [word for counter in range(3) for word in chacha_block(seed, counter, bytes(12))]
        assert mask_words(seed, 48).tolist() == expected
        doubled = np.array(expected, dtype="<u4").view("<u8")
        read_words = stream_words(seed)
        assert np.array_equal(np.concatenate([read_words(8), read_words(16)]), doubled)


@pytest.mark.parametrize("length", [1, 15, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, BLOCK_BYTES + 37])
def test_masks_are_added_modulo_two_to_the_32_across_blocks(length: int) -> None:
    seed, vector = b"k" * 32, torch.arange(length, dtype=torch.int32)
    masked = vector.clone()
    add_mask(masked, seed, 1)
    expected = (np.arange(length, dtype=np.uint64) + mask_words(seed, length)) % (1 << 32)
    assert np.array_equal(masked.numpy().view(np.uint32), expected.astype(np.uint32))
    add_mask(masked, seed, -1)
    assert torch.equal(masked, vector)


def test_long_streams_continue_across_blocks() -> None:
    seed, count = b"k" * 32, BLOCK_BYTES // 4 + 11
    assert np.array_equal(stream_words(seed)(count).view(np.uint32), mask_words(seed, 2 * count))


def test_key_agreement_is_that_of_the_rfc() -> None:
    """RFC 7748, section 6.1."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    alice_public = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    bob_public = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert [derive_public_key(key).hex() for key in (alice, bob)] == [alice_public, bob_public]
    assert agree_secret(alice, bytes.fromhex(bob_public)).hex() == shared
    assert agree_secret(bob, bytes.fromhex(alice_public)).hex() == shared


def test_derived_keys_are_those_of_hkdf() -> None:
    """HKDF of RFC 5869 written out: extract with a salt of zeros, then one step of expand."""
    pseudorandom = hmac.new(bytes(32), b"secret", hashlib.sha256).digest()
    expected = hmac.new(pseudorandom, b"purpose\x01", hashlib.sha256).digest()
    assert derive_key(b"secret", b"purpose") == expected


def test_changed_packets_are_refused() -> None:
    key, nonce = bytes(range(32)), bytes(12)
    packet = seal_packet(key, b"shares", b"session", nonce)
    assert open_packet(key, packet, b"session") == b"shares"
    for index in range(len(packet)):
        changed = bytearray(packet)
        changed[index] ^= 1
        with pytest.raises(ValueError, match="do not authenticate"):
            open_packet(key, bytes(changed), b"session")
    with pytest.raises(ValueError, match="do not authenticate"):
        open_packet(key, packet, b"another session")
    with pytest.raises(ValueError, match="do not authenticate"):
        open_packet(bytes(32), packet, b"session")


def test_keys_of_low_order_or_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="it has low order"):
        agree_secret(bytes(range(32)), bytes(32))
    with pytest.raises(ValueError, match="private_key has 31 bytes"):
        derive_public_key(bytes(31))
    with pytest.raises(ValueError, match="sign is 0"):
        add_mask(torch.zeros(1, dtype=torch.int32), bytes(32), 0)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    with pytest.raises(ValueError, match=r"privacy needs cryptography, .*: run pip install cryptography"):
        derive_key(b"secret", b"purpose")
