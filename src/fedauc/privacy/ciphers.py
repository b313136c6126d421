"""The cryptographic primitives that the secure sum is built of, from the package `cryptography`.

Key agreement: X25519 (RFC 7748). Key derivation: HKDF with SHA-256 (RFC 5869). Encryption with authentication:
ChaCha20-Poly1305. Masks and secret noise: the key stream of ChaCha20 (RFC 8439), whose words cannot be told from
uniform ones without the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedauc.privacy import import_privacy_package

if TYPE_CHECKING:
    from torch import Tensor

KEY_BYTES = 32
"""Bytes of a private key, a public key, a seed, and a symmetric key."""

NONCE_BYTES = 12

SEAL_BYTES = NONCE_BYTES + 16
"""How much longer a sealed packet is than its content: the nonce and the authentication tag."""

BLOCK_BYTES = 1 << 16
"""Key stream is made in blocks that stay in the cache."""

RandomWords: TypeAlias = "Callable[[int], np.ndarray]"
"""Returns so many random words, uint64, and other ones at every call."""


def derive_public_key(private_key: bytes) -> bytes:
    """The X25519 public key of a private key; any 32 random bytes are a private key."""
    _check_key(private_key, "private_key")
    x25519 = import_privacy_package("cryptography.hazmat.primitives.asymmetric.x25519")
    public: bytes = x25519.X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()
    return public


def agree_secret(private_key: bytes, public_key: bytes) -> bytes:
    """The X25519 secret that a private key shares with the owner of a public key."""
    _check_key(private_key, "private_key")
    _check_key(public_key, "public_key")
    x25519 = import_privacy_package("cryptography.hazmat.primitives.asymmetric.x25519")
    peer = x25519.X25519PublicKey.from_public_bytes(public_key)
    try:
        secret: bytes = x25519.X25519PrivateKey.from_private_bytes(private_key).exchange(peer)
    except ValueError:
        # The library refuses points of low order, with which the secret would be zero.
        raise ValueError(f"public_key is {public_key.hex()}; it has low order: make a new key pair") from None
    return secret


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose (HKDF-SHA256)."""
    hashes = import_privacy_package("cryptography.hazmat.primitives.hashes")
    hkdf = import_privacy_package("cryptography.hazmat.primitives.kdf.hkdf")
    key: bytes = hkdf.HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(secret)
    return key


def seal_packet(key: bytes, content: bytes, associated: bytes, nonce: bytes) -> bytes:
    """The content encrypted and authenticated together with the associated data, after its nonce."""
    aead = import_privacy_package("cryptography.hazmat.primitives.ciphers.aead")
    sealed: bytes = aead.ChaCha20Poly1305(key).encrypt(nonce, content, associated)
    return nonce + sealed


def open_packet(key: bytes, packet: bytes, associated: bytes, name: str = "packet") -> bytes:
    """The content of a packet of `seal_packet`; a packet that anyone has changed is refused."""
    aead = import_privacy_package("cryptography.hazmat.primitives.ciphers.aead")
    exceptions = import_privacy_package("cryptography.exceptions")
    try:
        content: bytes = aead.ChaCha20Poly1305(key).decrypt(packet[:NONCE_BYTES], packet[NONCE_BYTES:], associated)
    except exceptions.InvalidTag:
        reason = "it was changed on its way, or its sender took part in another session"
        raise ValueError(f"{name} has {len(packet)} bytes that do not authenticate; {reason}: start anew") from None
    return content


def add_mask(vector: Tensor, seed: bytes, sign: int) -> None:
    """Add to an int32 vector `[d]`, in place and modulo 2^32, the mask of a seed (`sign` 1), or subtract it (-1)."""
    if sign not in (1, -1):
        raise ValueError(f"sign is {sign}; it must be 1 or -1: pass one of them")
    words = vector.numpy().view(np.uint32)
    read_block, combine = _open_key_stream(seed), np.add if sign > 0 else np.subtract
    step = BLOCK_BYTES // words.itemsize
    for start in range(0, len(words), step):
        block = words[start : start + step]
        combine(block, read_block(block.nbytes).view("<u4"), out=block)


def mask_words(seed: bytes, count: int) -> np.ndarray:
    """The first words, uint32 `[count]`, of the ChaCha20 key stream of a seed, with nonce and counter 0."""
    return _open_key_stream(seed, 4 * count)(4 * count).view("<u4").astype(np.uint32)


def stream_words(key: bytes) -> RandomWords:
    """Random uint64 words from the ChaCha20 key stream of a secret key, of which there are 2^35.

    >>> read_words = stream_words(bytes(32))
    >>> len(read_words(3)), bool((read_words(3) == stream_words(bytes(32))(3)).any())
    (3, False)
    """
    read_block = _open_key_stream(key)

    def read_words(count: int) -> np.ndarray:
        words, step = np.empty(count, np.uint64), BLOCK_BYTES // 8
        for start in range(0, count, step):
            block = words[start : start + step]
            block[:] = read_block(block.nbytes).view("<u8")
        return words

    return read_words


def _open_key_stream(key: bytes, block_bytes: int = BLOCK_BYTES) -> Callable[[int], np.ndarray]:
    """Reads the next bytes of a key stream, at most a block at a time; a block is valid until the next is read."""
    _check_key(key, "seed")
    ciphers = import_privacy_package("cryptography.hazmat.primitives.ciphers")
    algorithms = import_privacy_package("cryptography.hazmat.primitives.ciphers.algorithms")
    # Every key is used for one stream, so that the nonce need not vary.
    encryptor = ciphers.Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros, stream = memoryview(bytes(block_bytes)), np.empty(block_bytes, np.uint8)

    def read_block(size: int) -> np.ndarray:
        encryptor.update_into(zeros[:size], stream)
        return stream[:size]

    return read_block


def _check_key(key: bytes, name: str) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"{name} has {len(key)} bytes; it must have {KEY_BYTES}: pass a key of this length")
