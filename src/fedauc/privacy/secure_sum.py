"""Secure sums: the server learns the sum of a cohort's vectors modulo 2^32, and no single vector.

The protocol is that of Bonawitz et al. (2017), arranged so that a round takes two exchanges with the sites. Site i of
the cohort holds an integer vector x_i. Two sites i and j derive the same secret seed s_ij from their keys and the
session; b_i is a fresh random seed of site i. PRG expands a seed to a mask (`ciphers.py`), and all sums are modulo
2^32.

Exchange 1, with the visit (`mask_vector`). Site i sends

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)

and a packet for every member k of the cohort, itself included, that only k can read. It holds share k of b_i and of
every s_ij (`shamir.py`). Because the shares travel with the upload, a site may go offline at any time after it, and a
site need store nothing between the exchanges but its `SiteRecord`.

Exchange 2 (`reveal_shares`). The server sends the set S of the sites whose uploads it has added, the survivors, and
the packets for the receiver. The receiver returns, for every survivor i, its share of b_i and its shares of s_id for
the absent members d. From any `threshold` answers the server recovers these seeds, subtracts the masks
(`SecureSumServer.recover_sum`), and holds the sum of x_i over S; the other masks have cancelled.

Formal guarantees
-----------------
Let n be the size of the cohort, t the threshold, and c < t the number of sites that collude with the server.

1. The server follows the protocol and reads what it can (honest but curious). It and the c sites learn the sum of x_i
   over the survivors who do not collude, at least t - c sites, and nothing else about their vectors: a survivor's y_i
   stays masked by its seeds with the other survivors, and a vector that comes too late by b_d, of which no share was
   revealed. Each site reveals about a peer either the share of its own seed b or the shares of the survivors' pair
   seeds with it, never both. Security rests on X25519, HKDF and ChaCha20.
2. The server tells different sites different survivor sets. No site answers twice for different sets, so each of the
   h = n - c honest sites answers for one set with at most n - t absent members. Say that the server learns the sum
   over a set T of honest sites. For each i in T it needs b_i, hence at least t - c honest sites told that i is a
   survivor. For each honest j outside T it needs s_ij, hence either t - c honest sites told that j is a survivor and i
   is absent, which t > (n + c) / 2 makes impossible, since 2 (t - c) > h; or t - c honest sites told that j is absent.
   Counting absent members over all honest answers gives (h - |T|) (t - c) <= h (n - t), so that

       |T| >= h (2t - c - n) / (t - c)                                      (`smallest_revealed_group`)

   Any t > n / 2 therefore keeps every single vector secret from a server that nobody helps, but at t just above n / 2
   sums of two sites may be revealed; with t = 2n/3 every revealed sum covers at least half of the cohort. This is why
   a site reveals shares of its own pair seeds only, like those of all others, and not the seeds themselves: with those
   it would be a single site's word that counts, not that of t sites.
3. The server describes the session differently to different sites (members, keys, threshold, length). All seeds and
   packets are derived from a hash of the description, so that masks do not cancel and packets do not open.

Not protected. A server that replaces public keys when a site meets a peer for the first time can play that peer: pin
the keys beforehand (`SiteRecord.pin_keys`) where this matters. A server may compose the cohort of sites that collude
with it. The sum itself may tell much about a vector: add noise (`discrete_noise.py`). A site that sends a wrong vector
or wrong shares spoils the sum; neither is detected, except for wrong shares when more than t sites answer. Which sites
take part, and when, is public.

Reference: Bonawitz et al., Practical secure aggregation for privacy-preserving machine learning, CCS 2017.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedauc.privacy.ciphers import (
    KEY_BYTES,
    NONCE_BYTES,
    SEAL_BYTES,
    add_mask,
    agree_secret,
    derive_key,
    derive_public_key,
    open_packet,
    seal_packet,
)
from fedauc.privacy.shamir import SHARE_BYTES, SecretSource, recover_secret, share_secret, unpack_share

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = b"fedauc secure sum 1"

MINIMUM_COHORT = 3
"""Members of the smallest cohort unless the caller says otherwise; of two, each learns the other's vector."""

SESSION_ID_BYTES = 16
"""Random bytes at the start of a session id, at least."""


# --------------------------------------------------------------------------------------------------- the session


@dataclass(frozen=True, kw_only=True)
class SecureSumSession:
    """What the server tells all members about one sum: its id, who takes part with which key, and the threshold.

    `members` are client numbers in ascending order, `public_keys` their keys; `length` is that of the vectors.
    """

    session_id: bytes
    members: tuple[int, ...]
    public_keys: tuple[bytes, ...]
    threshold: int
    length: int

    def __post_init__(self) -> None:
        count = len(self.members)
        if len(self.session_id) < SESSION_ID_BYTES:
            remedy = "make it with create_session_id"
            raise ValueError(
                f"session_id has {len(self.session_id)} bytes; it must have at least {SESSION_ID_BYTES}: {remedy}"
            )
        if list(self.members) != sorted(set(self.members)) or any(member < 0 for member in self.members):
            raise ValueError(f"members is {self.members}; it must hold client numbers in ascending order: sort them")
        if len(self.public_keys) != count or len(set(self.public_keys)) != count:
            raise ValueError(f"public_keys holds {len(set(self.public_keys))} keys; each of {count} members needs one")
        if any(len(key) != KEY_BYTES for key in self.public_keys):
            raise ValueError(f"public_keys holds a key that has not {KEY_BYTES} bytes; use those of the sites' records")
        if not count < 2 * self.threshold <= 2 * count:
            bound = f"it must be above half of the {count} members, and at most {count}"
            raise ValueError(f"threshold is {self.threshold}; {bound}: use choose_threshold")
        if self.length < 1:
            raise ValueError(f"length is {self.length}; it must be at least 1: give the length of the vectors")

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of everything above."""
        count = len(self.members)
        head = struct.pack("<IIIQ", len(self.session_id), count, self.threshold, self.length) + self.session_id
        return hashlib.sha256(
            PROTOCOL + head + struct.pack(f"<{count}Q", *self.members) + b"".join(self.public_keys)
        ).digest()

    @property
    def packet_bytes(self) -> int:
        """Bytes of one packet: a share of each of the sender's secrets, encrypted."""
        return SHARE_BYTES * len(self.members) + SEAL_BYTES

    def find_position(self, client: int) -> int:
        """A client's position among the members."""
        if client not in self.members:
            raise ValueError(f"client {client} is not a member of {self.members}; choose a member")
        return self.members.index(client)

    def to_plain(self) -> dict[str, Any]:
        """The session as JSON values."""
        keys = [key.hex() for key in self.public_keys]
        numbers = {"members": list(self.members), "threshold": self.threshold, "length": self.length}
        return {"session_id": self.session_id.hex(), "public_keys": keys, **numbers}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> SecureSumSession:
        """The session that `to_plain` wrote."""
        return SecureSumSession(
            session_id=bytes.fromhex(values["session_id"]),
            members=tuple(map(int, values["members"])),
            public_keys=tuple(map(bytes.fromhex, values["public_keys"])),
            threshold=int(values["threshold"]),
            length=int(values["length"]),
        )


def create_session_id(round: int, randomness: SecretSource = secrets) -> bytes:
    """An id that no other session has: 16 random bytes, and the round."""
    return randomness.token_bytes(SESSION_ID_BYTES) + struct.pack("<q", round)


def read_session_round(session_id: bytes) -> int:
    """The round in an id of `create_session_id`; -1 for an id of another form.

    >>> read_session_round(create_session_id(7))
    7
    """
    number = session_id[SESSION_ID_BYTES:]
    return int(struct.unpack("<q", number)[0]) if len(number) == struct.calcsize("<q") else -1


def choose_threshold(members: int, fraction: float = 0.5) -> int:
    """How many of a cohort must answer: more than this fraction, and never more than all.

    >>> [choose_threshold(count) for count in (2, 3, 4, 10)], choose_threshold(9, 2 / 3)
    ([2, 2, 3, 6], 7)
    """
    if not 0.5 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}; it must be from 0.5 to 1: a lower one would show single vectors")
    # An exact fraction, so that 2/3 of 9 is 6 and not a little less.
    return min(members, math.floor(members * Fraction(fraction).limit_denominator(1000)) + 1)


def smallest_revealed_group(members: int, threshold: int, colluding: int = 0) -> int:
    """How many honest sites a revealed sum covers at least if the server sends different survivor sets.

    See guarantee 2 of this module; 1 means that single vectors are not protected against such a server.

    >>> smallest_revealed_group(9, 5), smallest_revealed_group(9, 7), smallest_revealed_group(9, 7, colluding=2)
    (2, 7, 5)
    """
    honest, answers = members - colluding, threshold - colluding
    if answers <= 0 or 2 * threshold <= members + colluding:
        return 1
    return max(1, -(-honest * (2 * threshold - colluding - members) // answers))


# ------------------------------------------------------------------------------------------------------ the site


class AnsweredSession(NamedTuple):
    """What a site has done in a session: the fingerprint that it saw, and the survivors that it answered for."""

    fingerprint: str
    survivors: tuple[int, ...] = ()


@dataclass(frozen=True)
class SiteRecord:
    """What a site stores during a run: its private key, the sessions that it has answered, and its peers' keys.

    One record holds them all, because a key whose answered sessions are lost must not be used again: a second answer
    to the same session would reveal the difference of two vectors. Store a new record before sending the answer that
    it came with.
    """

    private_key: bytes = field(repr=False)
    sessions: Mapping[str, AnsweredSession] = field(default_factory=dict)
    known_keys: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def create(randomness: SecretSource = secrets) -> SiteRecord:
        """A record with a new key, for a new run."""
        return SiteRecord(randomness.token_bytes(KEY_BYTES))

    @property
    def public_key(self) -> bytes:
        """The key to register with the server."""
        return derive_public_key(self.private_key)

    def pin_keys(self, keys: Iterable[tuple[int, bytes]]) -> SiteRecord:
        """A record that knows these clients' keys; a key other than the known one of a client is refused."""
        known = dict(self.known_keys)
        for client, key in keys:
            if known.setdefault(client, key.hex()) != key.hex():
                reason = f"this site knows it with {known[client]}"
                raise ValueError(
                    f"client {client} has the key {key.hex()}; {reason}: ask its owner, or start a new run"
                )
        return replace(self, known_keys=known)

    def to_plain(self) -> dict[str, Any]:
        """The record as JSON values, private key included."""
        sessions = {name: [answered.fingerprint, list(answered.survivors)] for name, answered in self.sessions.items()}
        known = {str(client): key for client, key in self.known_keys.items()}
        return {"private_key": self.private_key.hex(), "sessions": sessions, "known_keys": known}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> SiteRecord:
        """The record that `to_plain` wrote."""
        sessions = {name: AnsweredSession(seen, tuple(members)) for name, (seen, members) in values["sessions"].items()}
        known = {int(client): key for client, key in values["known_keys"].items()}
        return SiteRecord(bytes.fromhex(values["private_key"]), sessions, known)


class MaskedUpload(NamedTuple):
    """What a site sends in exchange 1: the masked vector, int32 `[length]`, and one packet per member, in order."""

    vector: Tensor
    packets: bytes


class UnmaskRequest(NamedTuple):
    """What a site is sent in exchange 2: the survivors in ascending order, and their packets for it, in order."""

    survivors: tuple[int, ...]
    packets: bytes


def mask_vector(
    session: SecureSumSession,
    client: int,
    record: SiteRecord,
    vector: Tensor,
    minimum_cohort: int = MINIMUM_COHORT,
    randomness: SecretSource = secrets,
) -> tuple[MaskedUpload, SiteRecord]:
    """A site's answer to exchange 1, and the record to store before it is sent.

    A session id that the site has answered before is refused, and so is a small cohort, or a peer with a new key.
    """
    _check_cohort(session, minimum_cohort)
    position, name = session.find_position(client), session.session_id.hex()
    if session.public_keys[position] != record.public_key:
        raise ValueError(f"client {client} is listed with a key that is not this site's; register the site again")
    if name in record.sessions:
        raise ValueError(
            f"session_id is {name}; this site has answered it, and a second answer would reveal the vector"
        )
    if vector.dtype != torch.int32 or vector.shape != (session.length,):
        actual = f"{vector.dtype} {tuple(vector.shape)}"
        raise ValueError(f"vector is {actual}; it must be int32 ({session.length},): encode it with FixedPoint")
    record = record.pin_keys(zip(session.members, session.public_keys, strict=True))
    agreed = _agree_secrets(session, record.private_key)
    seeds = [_derive_mask_seed(session, secret, position, peer) for peer, secret in enumerate(agreed)]
    seeds[position] = randomness.token_bytes(KEY_BYTES)
    masked = vector.detach().cpu().clone()
    for peer, seed in enumerate(seeds):
        add_mask(masked, seed, _mask_sign(position, peer))
    shares = [share_secret(seed, session.threshold, len(seeds), randomness) for seed in seeds]
    packets = []
    for receiver, secret in enumerate(agreed):
        content = b"".join(of_secret[receiver].pack_value() for of_secret in shares)
        key = _derive_packet_key(session, secret, position, receiver)
        packets.append(seal_packet(key, content, session.fingerprint, randomness.token_bytes(NONCE_BYTES)))
    sessions = {**record.sessions, name: AnsweredSession(session.fingerprint.hex())}
    return MaskedUpload(masked, b"".join(packets)), replace(record, sessions=sessions)


def reveal_shares(
    session: SecureSumSession, client: int, record: SiteRecord, request: UnmaskRequest
) -> tuple[bytes, SiteRecord]:
    """A site's answer to exchange 2, and the record to store before it is sent.

    The answer holds, for every survivor i, the shares of b_i and then of s_id for the absent members d. A request is
    refused for a session that the site did not take part in, for too few survivors, for survivors without the site
    itself, and for other survivors than those of an earlier request; the same request gets the same answer.
    """
    position, name, survivors = session.find_position(client), session.session_id.hex(), tuple(request.survivors)
    answered = record.sessions.get(name)
    if answered is None or answered.fingerprint != session.fingerprint.hex():
        raise ValueError(f"session_id is {name}; this site has masked no vector for it as described: start a new one")
    _check_survivors(session, survivors)
    if client not in survivors:
        raise ValueError(f"survivors is {survivors}; it must include client {client} itself: this site reveals nothing")
    if answered.survivors not in ((), survivors):
        reason = f"this site has answered for {answered.survivors}, and a second set could reveal a vector"
        raise ValueError(f"survivors is {survivors}; {reason}: start a new session")
    packets = _split_bytes(request.packets, session.packet_bytes, len(survivors), "packets")
    agreed, revealed = _agree_secrets(session, record.private_key), []
    for sender, packet in zip(survivors, packets, strict=True):
        sender_position = session.find_position(sender)
        key = _derive_packet_key(session, agreed[sender_position], sender_position, position)
        content = open_packet(key, packet, session.fingerprint, f"the packet of client {sender} for client {client}")
        shares = _split_bytes(content, SHARE_BYTES, len(session.members), "shares")
        revealed += [shares[owner] for owner in _revealed_positions(session, survivors, sender_position)]
    sessions = {**record.sessions, name: answered._replace(survivors=survivors)}
    return b"".join(revealed), replace(record, sessions=sessions)


# ---------------------------------------------------------------------------------------------------- the server


class SecureSumServer:
    """The server's side of one session. It keeps a running sum of masked vectors, never a single one.

    Order of calls: `add_upload` for every upload of exchange 1; `request_unmasking` for every survivor, after which no
    upload is added any more; `add_shares` for every answer of exchange 2; `recover_sum`.
    """

    def __init__(self, session: SecureSumSession, minimum_cohort: int = MINIMUM_COHORT) -> None:
        _check_cohort(session, minimum_cohort)
        self._session = session
        self._total = torch.zeros(session.length, dtype=torch.int32)
        self._packets: dict[int, list[bytes]] = {}
        self._shares: dict[int, list[bytes]] = {}
        self._is_closed = False

    @property
    def survivors(self) -> tuple[int, ...]:
        """The members whose uploads are in the sum, in ascending order."""
        return tuple(sorted(self._packets))

    @property
    def has_enough_shares(self) -> bool:
        """Whether as many survivors have revealed their shares as the threshold asks for."""
        return len(self._shares) >= self._session.threshold

    def add_upload(self, client: int, upload: MaskedUpload) -> None:
        """Add a member's masked vector to the sum; the vector itself is not kept."""
        session = self._session
        session.find_position(client)
        if self._is_closed or client in self._packets:
            reason = "the survivors are fixed" if self._is_closed else "its upload is in the sum already"
            raise ValueError(f"the upload of client {client} comes too late: {reason}; leave it out")
        if upload.vector.dtype != torch.int32 or upload.vector.shape != (session.length,):
            actual = f"{upload.vector.dtype} {tuple(upload.vector.shape)}"
            raise ValueError(f"the vector of client {client} is {actual}; it must be int32 ({session.length},)")
        packets = _split_bytes(upload.packets, session.packet_bytes, len(session.members), "packets")
        self._packets[client] = packets
        self._total += upload.vector.cpu()

    def request_unmasking(self, client: int) -> UnmaskRequest:
        """The request of exchange 2 for a survivor; the first one fixes the survivors."""
        survivors, position = self.survivors, self._session.find_position(client)
        _check_survivors(self._session, survivors)
        if client not in survivors:
            raise ValueError(f"client {client} is not among the survivors {survivors}; ask survivors only")
        self._is_closed = True
        return UnmaskRequest(survivors, b"".join(self._packets[sender][position] for sender in survivors))

    def add_shares(self, client: int, shares: bytes) -> None:
        """Take the answer of a survivor to exchange 2."""
        if not self._is_closed or client not in self._packets:
            raise ValueError(f"client {client} has revealed shares without a request; ask it by request_unmasking")
        survivors = self.survivors
        count = len(survivors) * (1 + len(self._session.members) - len(survivors))
        self._shares[client] = _split_bytes(shares, SHARE_BYTES, count, f"shares of client {client}")

    def recover_sum(self) -> Tensor:
        """The sum of the survivors' vectors modulo 2^32, int32 `[length]`; can be called again after more answers."""
        session, survivors = self._session, self.survivors
        if not self.has_enough_shares:
            bound = f"{session.threshold} are needed"
            raise ValueError(f"{len(self._shares)} sites have revealed shares; {bound}: wait, or repeat the round")
        numbers = {client: session.find_position(client) + 1 for client in sorted(self._shares)}
        total, field_number = self._total.clone(), 0
        for survivor in survivors:
            sender = session.find_position(survivor)
            for owner in _revealed_positions(session, survivors, sender):
                shares = [
                    unpack_share(number, self._shares[client][field_number]) for client, number in numbers.items()
                ]
                add_mask(total, recover_secret(shares, session.threshold), -_mask_sign(sender, owner))
                field_number += 1
        return total


# ---------------------------------------------------------------------------------------------- what both sides do


def _mask_sign(position: int, peer: int) -> int:
    """The sign with which a member adds the mask of its seed with a peer; its own mask, of b, counts as plus."""
    return 1 if peer >= position else -1


def _revealed_positions(session: SecureSumSession, survivors: tuple[int, ...], sender: int) -> list[int]:
    """Which of a survivor's secrets are revealed, by position: its own b, and its seeds with absent members."""
    absent = [number for number, member in enumerate(session.members) if member not in survivors]
    return [sender, *absent]


def _agree_secrets(session: SecureSumSession, private_key: bytes) -> list[bytes]:
    """The secret that the owner of a private key shares with each member, itself included."""
    return [agree_secret(private_key, public_key) for public_key in session.public_keys]


def _derive_mask_seed(session: SecureSumSession, secret: bytes, position: int, peer: int) -> bytes:
    """The seed s_ij of two members' masks, the same for both."""
    pair = struct.pack("<II", min(position, peer), max(position, peer))
    return derive_key(secret, PROTOCOL + b" mask " + session.fingerprint + pair)


def _derive_packet_key(session: SecureSumSession, secret: bytes, sender: int, receiver: int) -> bytes:
    """The key of the one packet from a member to another."""
    return derive_key(secret, PROTOCOL + b" packet " + session.fingerprint + struct.pack("<II", sender, receiver))


def _check_cohort(session: SecureSumSession, minimum_cohort: int) -> None:
    if minimum_cohort < 2:
        raise ValueError(f"minimum_cohort is {minimum_cohort}; it must be at least 2: a sum of one is its vector")
    if len(session.members) < minimum_cohort:
        reason = "the sum would show too much of a vector"
        raise ValueError(
            f"the cohort has {len(session.members)} members; at least {minimum_cohort} are needed: {reason}"
        )


def _check_survivors(session: SecureSumSession, survivors: Sequence[int]) -> None:
    if list(survivors) != sorted(set(survivors) & set(session.members)):
        raise ValueError(f"survivors is {survivors}; it must hold members of {session.members} in ascending order")
    if len(survivors) < session.threshold:
        bound = f"at least {session.threshold} are needed"
        raise ValueError(f"{len(survivors)} sites survive; {bound}: repeat the round with sites that are online")


def _split_bytes(packed: bytes, size: int, count: int, name: str) -> list[bytes]:
    if len(packed) != size * count:
        raise ValueError(f"{name} has {len(packed)} bytes; it must have {count} of {size} bytes: send it again")
    return [packed[start : start + size] for start in range(0, len(packed), size)]
