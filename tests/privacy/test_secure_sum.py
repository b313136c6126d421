"""The secure sum: exact for every pattern of dropouts, blind for the server, and its refusals."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedauc.privacy import secure_sum
from fedauc.privacy.ciphers import agree_secret, mask_words, open_packet
from fedauc.privacy.fixed_point import FixedPoint, choose_scale
from fedauc.privacy.secure_sum import (
    MaskedUpload,
    SecureSumServer,
    SecureSumSession,
    SiteRecord,
    UnmaskRequest,
    choose_threshold,
    create_session_id,
    mask_vector,
    reveal_shares,
    smallest_revealed_group,
)
from fedauc.privacy.shamir import SHARE_BYTES, recover_secret, unpack_share
from privacy.secret_sources import SeededSource

Vectors = dict[int, Tensor]


class Cohort:
    """A session, the record of every member, and the messages that they would send."""

    def __init__(self, members: Iterable[int], length: int, seed: int = 0, threshold: int | None = None) -> None:
        self.source = SeededSource(seed)
        self.members = tuple(members)
        self.records = {client: SiteRecord.create(self.source) for client in self.members}
        self.length, self.threshold = length, threshold or choose_threshold(len(self.members))
        self.session = self.open_session(0)

    def open_session(self, round: int) -> SecureSumSession:
        return SecureSumSession(
            session_id=create_session_id(round, self.source),
            members=self.members,
            public_keys=tuple(self.records[client].public_key for client in self.members),
            threshold=self.threshold,
            length=self.length,
        )

    def mask(self, client: int, vector: Tensor) -> MaskedUpload:
        upload, record = mask_vector(self.session, client, self.restore(client), vector, 2, self.source)
        self.records[client] = record
        return upload

    def reveal(self, client: int, request: UnmaskRequest) -> bytes:
        shares, record = reveal_shares(self.session, client, self.restore(client), request)
        self.records[client] = record
        return shares

    def restore(self, client: int) -> SiteRecord:
        """The record after a trip through the site's disk, as in a new process."""
        return SiteRecord.from_plain(json.loads(json.dumps(self.records[client].to_plain())))


def random_vectors(members: Iterable[int], length: int, seed: int) -> Vectors:
    draw = np.random.default_rng(seed)
    words = {client: draw.integers(0, 1 << 32, length, dtype=np.uint32).view(np.int32) for client in members}
    return {client: torch.from_numpy(vector) for client, vector in words.items()}


def plain_sum(vectors: Iterable[Tensor]) -> list[int]:
    """The sum modulo 2^32 in Python's integers, as int32."""
    columns = zip(*(vector.tolist() for vector in vectors), strict=True)
    return [(sum(column) + (1 << 31)) % (1 << 32) - (1 << 31) for column in columns]


def run_round(cohort: Cohort, vectors: Vectors, uploading: Iterable[int], answering: Iterable[int]) -> Tensor:
    server = SecureSumServer(SecureSumSession.from_plain(json.loads(json.dumps(cohort.session.to_plain()))), 2)
    for client in uploading:
        server.add_upload(client, cohort.mask(client, vectors[client]))
    for client in answering:
        server.add_shares(client, cohort.reveal(client, server.request_unmasking(client)))
    return server.recover_sum()


# ------------------------------------------------------------------------------------------------------ exact sums


@pytest.mark.parametrize("size", range(2, 13))
def test_the_sum_is_exact_for_random_dropouts(size: int) -> None:
    """Sites are lost before exchange 1 and between the exchanges; any number from the threshold on may be left."""
    draw = random.Random(size)
    for trial in range(6):
        members = sorted(draw.sample(range(1000), size))
        threshold = draw.randint(choose_threshold(size), size)
        cohort = Cohort(members, draw.choice([1, 2, 33]), trial, threshold)
        vectors = random_vectors(members, cohort.length, trial)
        uploading = draw.sample(members, draw.randint(threshold, size))
        answering = draw.sample(uploading, draw.randint(threshold, len(uploading)))
        total = run_round(cohort, vectors, uploading, answering)
        assert total.dtype == torch.int32
        assert total.tolist() == plain_sum(vectors[client] for client in uploading)


def test_the_sum_is_exact_for_every_pattern_of_dropouts_of_five() -> None:
    members = (2, 3, 5, 8, 13)
    vectors = random_vectors(members, 3, 0)
    expected = {}
    for size in (3, 4, 5):
        for survivors in combinations(members, size):
            expected[survivors] = plain_sum(vectors[client] for client in survivors)
            for count in range(3, size + 1):
                answering = list(combinations(survivors, count))
                # Every set of answers for five survivors, the first and the last one for fewer.
                for answers in answering if size == 5 else answering[:: max(1, len(answering) - 1)]:
                    cohort = Cohort(members, 3, seed=size)
                    assert run_round(cohort, vectors, survivors, answers).tolist() == expected[survivors]


def test_real_vectors_sum_to_their_rounded_sum() -> None:
    members, code = range(6), FixedPoint(choose_scale(2.0, 6), 6)
    draw = np.random.default_rng(0)
    values = {client: torch.from_numpy(draw.uniform(-2, 2, 100)) for client in members}
    encoded = {client: code.encode_vector(vector) for client, vector in values.items()}
    total = code.decode_sum(run_round(Cohort(members, 100), encoded, range(1, 6), range(2, 6)))
    exact = sum(values[client] for client in range(1, 6))
    rounded = torch.stack([encoded[client].double() for client in range(1, 6)]).sum(0)
    assert torch.equal(total, rounded / code.scale)
    assert (total - exact).abs().max() <= 5 / (2 * code.scale)


def test_vectors_longer_than_a_block_of_key_stream_sum_exactly() -> None:
    members = (0, 1, 2, 3)
    vectors = random_vectors(members, 40_000, 1)
    total = run_round(Cohort(members, 40_000), vectors, (0, 2, 3), (0, 2, 3))
    assert np.array_equal(total.numpy(), sum(vectors[client].numpy() for client in (0, 2, 3)))


def test_the_caller_may_ask_again_after_more_answers_have_come() -> None:
    members = (0, 1, 2, 3)
    cohort, vectors = Cohort(members, 5), random_vectors(members, 5, 2)
    server = SecureSumServer(cohort.session)
    for client in members:
        server.add_upload(client, cohort.mask(client, vectors[client]))
    for count, client in enumerate(members, start=1):
        server.add_shares(client, cohort.reveal(client, server.request_unmasking(client)))
        assert server.has_enough_shares == (count >= 3)
        if count < 3:
            with pytest.raises(ValueError, match=f"{count} sites have revealed shares; 3 are needed"):
                server.recover_sum()
        else:
            assert server.recover_sum().tolist() == plain_sum(vectors.values())


def test_a_late_upload_is_refused_and_the_sum_stays_right() -> None:
    members = (0, 1, 2, 3)
    cohort, vectors = Cohort(members, 5), random_vectors(members, 5, 2)
    server = SecureSumServer(cohort.session)
    late = cohort.mask(3, vectors[3])
    for client in (0, 1, 2):
        server.add_upload(client, cohort.mask(client, vectors[client]))
    requests = {client: server.request_unmasking(client) for client in (0, 1, 2)}
    with pytest.raises(ValueError, match="client 3 comes too late: the survivors are fixed"):
        server.add_upload(3, late)
    for client, request in requests.items():
        server.add_shares(client, cohort.reveal(client, request))
    assert server.recover_sum().tolist() == plain_sum(vectors[client] for client in (0, 1, 2))


# -------------------------------------------------------------------------------------------- what the server sees


def masked_words(vector: Tensor, seed: int, size: int = 3) -> np.ndarray:
    cohort = Cohort(range(size), len(vector), seed)
    return cohort.mask(1, vector).vector.numpy().view(np.uint32)


def test_masked_words_are_uniform_whatever_the_vector() -> None:
    """Chi-square over the 256 values of the highest and of the lowest byte, for a constant and a sparse vector."""
    length = 50_000
    for vector in (torch.zeros(length, dtype=torch.int32), torch.arange(length, dtype=torch.int32) // 1000 - 25):
        words = masked_words(vector, seed=3)
        for bits in (0, 24):
            counts = np.bincount(words >> bits & 255, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4


def test_masked_vectors_of_different_inputs_look_alike() -> None:
    length = 50_000
    zeros, ones = torch.zeros(length, dtype=torch.int32), torch.ones(length, dtype=torch.int32) * 1_000_000
    first, second = (masked_words(vector, seed).astype(float) for vector, seed in ((zeros, 1), (ones, 2)))
    assert stats.ks_2samp(first, second).pvalue > 1e-4
    signal = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 26), 1 << 26, length).astype(np.int32))
    masked = masked_words(signal, 4).view(np.int32).astype(float)
    # The correlation of independent sequences has deviation 1 / sqrt(length).
    assert abs(np.corrcoef(masked, signal.numpy())[0, 1]) < 4 / math.sqrt(length)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(length)


def test_partial_sums_stay_uniform_without_the_shares() -> None:
    """The sum of all masked vectors still holds the masks of the sites' own seeds."""
    members, length = (0, 1, 2), 50_000
    cohort = Cohort(members, length)
    total = torch.zeros(length, dtype=torch.int32)
    for client in members:
        total += cohort.mask(client, torch.zeros(length, dtype=torch.int32)).vector
    assert stats.chisquare(np.bincount(total.numpy().view(np.uint32) >> 24, minlength=256)).pvalue > 1e-4


def test_the_same_vector_is_masked_differently_in_every_session() -> None:
    cohort, vector = Cohort(range(3), 1000), torch.zeros(1000, dtype=torch.int32)
    first = cohort.mask(0, vector).vector
    cohort.session = cohort.open_session(1)
    second = cohort.mask(0, vector).vector
    # Two uniform words are equal with probability 2^-32.
    assert int((first == second).sum()) == 0
    assert int((first == -second).sum()) == 0


def test_the_server_keeps_no_single_vector() -> None:
    """Whatever tensor the server holds is the sum; the vectors that were added are gone."""
    members = (0, 1, 2)
    cohort, vectors = Cohort(members, 64), random_vectors(members, 64, 3)
    server = SecureSumServer(cohort.session)
    for client in members:
        server.add_upload(client, cohort.mask(client, vectors[client]))
    tensors = [value for value in vars(server).values() if isinstance(value, Tensor)]
    assert len(tensors) == 1
    assert tensors[0].shape == (64,)
    assert sum(len(packet) for packets in server._packets.values() for packet in packets) == 9 * (3 * 33 + 28)


def test_masks_are_the_key_streams_of_the_seeds() -> None:
    """y_i rebuilt from the definition, with seeds recovered from the packets of exchange 1."""
    members, length, member = (0, 1, 2, 3), 20, 2
    cohort, vectors = Cohort(members, length), random_vectors(members, length, 4)
    upload = cohort.mask(member, vectors[member])
    opened = [_open_packet(cohort, member, receiver, upload) for receiver in members]
    seeds = [recover_secret([unpack_share(k + 1, opened[k][peer]) for k in (0, 1, 3)], 3) for peer in members]
    expected = vectors[member].numpy().view(np.uint32).astype(np.int64)
    for peer, seed in enumerate(seeds):
        expected += (-1 if peer < member else 1) * mask_words(seed, length).astype(np.int64)
    assert np.array_equal(upload.vector.numpy().view(np.uint32), (expected % (1 << 32)).astype(np.uint32))
    peer_upload = cohort.mask(0, vectors[0])
    peer_shares = [_open_packet(cohort, 0, receiver, peer_upload)[member] for receiver in members]
    assert recover_secret([unpack_share(k + 1, share) for k, share in enumerate(peer_shares)], 3) == seeds[0]


def _open_packet(cohort: Cohort, sender: int, receiver: int, upload: MaskedUpload) -> list[bytes]:
    """The shares in a packet, read with the receiver's private key; members are 0, 1, 2 ..."""
    size = cohort.session.packet_bytes
    secret = agree_secret(cohort.records[receiver].private_key, cohort.session.public_keys[sender])
    key = secure_sum._derive_packet_key(cohort.session, secret, sender, receiver)
    packet = upload.packets[receiver * size : (receiver + 1) * size]
    content = open_packet(key, packet, cohort.session.fingerprint)
    return [content[start : start + SHARE_BYTES] for start in range(0, len(content), SHARE_BYTES)]


# ---------------------------------------------------------------------------------------------- what sites refuse


def test_a_site_reveals_one_kind_of_share_per_peer() -> None:
    """For every survivor set: of a peer's secrets, its own seed if it survives, pair seeds with it if it does not."""
    members, length = (0, 1, 2, 3, 4), 4
    for size in (3, 4, 5):
        for survivors in combinations(members, size):
            cohort = Cohort(members, length)
            uploads = {client: cohort.mask(client, torch.zeros(length, dtype=torch.int32)) for client in members}
            for client in survivors:
                contents = {sender: _open_packet(cohort, sender, client, uploads[sender]) for sender in members}
                answer = cohort.reveal(client, _request_for(cohort, client, survivors, uploads))
                sent = {answer[start : start + SHARE_BYTES] for start in range(0, len(answer), SHARE_BYTES)}
                for sender, peer in product(members, members):
                    is_own_seed_of_survivor = sender == peer and sender in survivors
                    is_pair_with_absent = sender in survivors and peer not in survivors
                    assert (contents[sender][peer] in sent) == (is_own_seed_of_survivor or is_pair_with_absent)


def _request_for(
    cohort: Cohort, client: int, survivors: tuple[int, ...], uploads: dict[int, MaskedUpload]
) -> UnmaskRequest:
    """A request that a server may make up."""
    size, position = cohort.session.packet_bytes, cohort.session.find_position(client)
    packets = [uploads[sender].packets[position * size : (position + 1) * size] for sender in survivors]
    return UnmaskRequest(survivors, b"".join(packets))


@pytest.fixture
def uploaded() -> tuple[Cohort, dict[int, MaskedUpload]]:
    cohort = Cohort(range(5), 3)
    return cohort, {client: cohort.mask(client, torch.zeros(3, dtype=torch.int32)) for client in range(5)}


def test_a_replayed_session_is_refused(uploaded: tuple[Cohort, dict[int, MaskedUpload]]) -> None:
    cohort, _ = uploaded
    with pytest.raises(ValueError, match=r"this site has answered it"):
        cohort.mask(0, torch.ones(3, dtype=torch.int32))
    # Nor with another description of the session.
    cohort.session = replace(cohort.session, threshold=4)
    with pytest.raises(ValueError, match=r"this site has answered it"):
        cohort.mask(0, torch.ones(3, dtype=torch.int32))


def test_survivor_sets_that_could_reveal_a_vector_are_refused(
    uploaded: tuple[Cohort, dict[int, MaskedUpload]],
) -> None:
    cohort, uploads = uploaded
    for survivors, message in (
        ((0, 1), "2 sites survive; at least 3 are needed"),
        ((0,), "1 sites survive"),
        ((1, 2, 3), "it must include client 0 itself"),
        ((0, 2, 1), "in ascending order"),
        ((0, 1, 1, 2), "in ascending order"),
    ):
        with pytest.raises(ValueError, match=message):
            cohort.reveal(0, _request_for(cohort, 0, survivors, uploads))
    with pytest.raises(ValueError, match="it must hold members"):
        cohort.reveal(0, UnmaskRequest((0, 1, 9), b""))
    request = _request_for(cohort, 0, (0, 1, 2), uploads)
    first = cohort.reveal(0, request)
    assert cohort.reveal(0, request) == first, "the same request gets the same answer"
    with pytest.raises(ValueError, match=r"this site has answered for \(0, 1, 2\)"):
        cohort.reveal(0, _request_for(cohort, 0, (0, 1, 2, 3), uploads))


def test_a_changed_or_misdirected_packet_is_refused(uploaded: tuple[Cohort, dict[int, MaskedUpload]]) -> None:
    cohort, uploads = uploaded
    survivors, packets = _request_for(cohort, 0, (0, 1, 2), uploads)
    for index in (0, 20, len(packets) - 1):
        changed = bytearray(packets)
        changed[index] ^= 4
        with pytest.raises(ValueError, match="do not authenticate"):
            cohort.reveal(0, UnmaskRequest(survivors, bytes(changed)))
    with pytest.raises(ValueError, match=r"the packet of client 0 for client 0 has .* do not authenticate"):
        cohort.reveal(0, _request_for(cohort, 1, survivors, uploads))
    with pytest.raises(ValueError, match="packets has"):
        cohort.reveal(0, UnmaskRequest(survivors, packets[:-1]))


def test_a_session_that_is_described_differently_later_is_refused(
    uploaded: tuple[Cohort, dict[int, MaskedUpload]],
) -> None:
    cohort, uploads = uploaded
    request = _request_for(cohort, 0, (0, 1, 2), uploads)
    for changes in ({"threshold": 4}, {"length": 4}, {"session_id": bytes(24)}):
        with pytest.raises(ValueError, match="this site has masked no vector for it as described"):
            reveal_shares(replace(cohort.session, **changes), 0, cohort.records[0], request)


def test_masks_do_not_cancel_when_sites_are_told_different_cohorts() -> None:
    """Two sites that see different members derive different seeds, though they are the same pair."""
    cohort = Cohort(range(4), 100)
    zeros = torch.zeros(100, dtype=torch.int32)
    session = cohort.session
    smaller = replace(session, members=(0, 1, 2), public_keys=session.public_keys[:3], threshold=2)
    secret = agree_secret(cohort.records[0].private_key, session.public_keys[1])
    seeds = {secure_sum._derive_mask_seed(described, secret, 0, 1) for described in (session, smaller)}
    assert len(seeds) == 2
    uploads = {client: cohort.mask(client, zeros) for client in range(3)}
    cohort.session = smaller
    with pytest.raises(ValueError, match="as described"):
        cohort.reveal(0, _request_for(cohort, 0, (0, 1, 2), uploads))


def test_keys_are_pinned_when_first_seen() -> None:
    cohort = Cohort(range(4), 3)
    cohort.mask(0, torch.zeros(3, dtype=torch.int32))
    cohort.records[3] = SiteRecord.create(SeededSource(99))
    cohort.session = cohort.open_session(1)
    with pytest.raises(ValueError, match=r"client 3 has the key .*; this site knows it with"):
        cohort.mask(0, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="client 1 is listed with a key that is not this site's"):
        mask_vector(cohort.session, 1, SiteRecord.create(), torch.zeros(3, dtype=torch.int32))


def test_small_cohorts_are_refused_on_both_sides() -> None:
    cohort = Cohort(range(2), 3)
    with pytest.raises(ValueError, match="the cohort has 2 members; at least 3 are needed"):
        SecureSumServer(cohort.session)
    with pytest.raises(ValueError, match="the cohort has 2 members; at least 3 are needed"):
        mask_vector(cohort.session, 0, cohort.records[0], torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="minimum_cohort is 1; it must be at least 2"):
        SecureSumServer(Cohort(range(1), 3, threshold=1).session, minimum_cohort=1)


def test_vectors_of_another_type_or_length_are_refused() -> None:
    cohort = Cohort(range(3), 3)
    for vector in (torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="it must be int32"):
            cohort.mask(0, vector)
    server, upload = SecureSumServer(cohort.session), cohort.mask(0, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="it must be int32"):
        server.add_upload(0, upload._replace(vector=torch.zeros(2, dtype=torch.int32)))
    with pytest.raises(ValueError, match="packets has"):
        server.add_upload(0, upload._replace(packets=upload.packets + b"x"))
    with pytest.raises(ValueError, match="client 7 is not a member"):
        server.add_upload(7, upload)
    server.add_upload(0, upload)
    with pytest.raises(ValueError, match="already"):
        server.add_upload(0, upload)
    with pytest.raises(ValueError, match="1 sites survive; at least 2 are needed"):
        server.request_unmasking(0)
    with pytest.raises(ValueError, match="without a request"):
        server.add_shares(0, b"")


def test_sessions_out_of_range_are_refused() -> None:
    session = Cohort(range(4), 3).session
    for changes, message in (
        ({"session_id": bytes(15)}, "session_id has 15 bytes"),
        ({"members": (0, 1, 1, 2)}, "members is"),
        ({"members": (0, 1, 3, 2)}, "members is"),
        ({"public_keys": session.public_keys[:3]}, "public_keys holds 3 keys"),
        ({"public_keys": session.public_keys[:3] + session.public_keys[:1]}, "public_keys holds 3 keys"),
        ({"public_keys": (*session.public_keys[:3], b"short")}, "has not 32 bytes"),
        ({"threshold": 2}, "threshold is 2; it must be above half of the 4 members"),
        ({"threshold": 5}, "threshold is 5"),
        ({"length": 0}, "length is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(session, **changes)
    with pytest.raises(ValueError, match=r"fraction is 0\.4"):
        choose_threshold(5, 0.4)


def test_a_wrong_share_is_noticed_when_more_than_the_threshold_answer() -> None:
    members = (0, 1, 2, 3)
    cohort, vectors = Cohort(members, 5), random_vectors(members, 5, 2)
    server = SecureSumServer(cohort.session)
    for client in members:
        server.add_upload(client, cohort.mask(client, vectors[client]))
    for client in members:
        shares = bytearray(cohort.reveal(client, server.request_unmasking(client)))
        shares[0] ^= client == 3
        server.add_shares(client, bytes(shares))
    with pytest.raises(ValueError, match="share 4 is wrong, or another is"):
        server.recover_sum()


def test_the_private_key_is_not_printed() -> None:
    record = SiteRecord.create()
    assert record.private_key.hex() not in repr(record)
    assert str(record.private_key) not in repr(record)


# ------------------------------------------------------------------- a server that tells sites different survivors


def revealed_groups(size: int, threshold: int, survivor_sets: tuple[frozenset[int], ...]) -> set[frozenset[int]]:
    """The sets of sites whose sums the server learns when site k answers for the survivors survivor_sets[k].

    Straight from the protocol: the own seed of i is known with `threshold` answers for sets with i; the pair seed of
    i and j with `threshold` answers for sets with i and without j, or the other way round. Sites joined by an unknown
    pair seed can only be summed together, and only if all their own seeds are known.
    """
    sites = range(size)
    own_known = {i for i in sites if sum(i in group for group in survivor_sets) >= threshold}

    def pair_known(i: int, j: int) -> bool:
        return any(
            sum(a in group and b not in group for group in survivor_sets) >= threshold for a, b in ((i, j), (j, i))
        )

    label = list(sites)
    for i, j in combinations(sites, 2):
        if not pair_known(i, j):
            label = [label[i] if value == label[j] else value for value in label]
    groups = {frozenset(i for i in sites if label[i] == value) for value in label}
    return {group for group in groups if group <= own_known}


@pytest.mark.parametrize(("size", "threshold"), [(2, 2), (3, 2), (3, 3), (4, 3)])
def test_no_choice_of_survivor_sets_reveals_a_smaller_group(size: int, threshold: int) -> None:
    """Every combination of sets that sites accept; with a threshold of half, single vectors would be revealed."""
    choices = [
        [
            frozenset(group)
            for count in range(threshold, size + 1)
            for group in combinations(range(size), count)
            if k in group
        ]
        for k in range(size)
    ]
    bound = smallest_revealed_group(size, threshold)
    for survivor_sets in product(*choices):
        assert all(len(group) >= bound for group in revealed_groups(size, threshold, survivor_sets))


def test_larger_cohorts_meet_the_bound_on_random_and_on_rotating_sets() -> None:
    """Sets that rotate absences over all sites but two are the strongest attack that the counting bound allows."""
    draw = random.Random(0)
    for size, threshold in ((5, 3), (7, 4), (9, 5), (11, 6), (9, 7)):
        bound = smallest_revealed_group(size, threshold)
        for _ in range(300):
            absences = [draw.sample([i for i in range(size) if i != k], size - threshold) for k in range(size)]
            survivor_sets = tuple(frozenset(range(size)) - frozenset(absent) for absent in absences)
            assert all(len(group) >= bound for group in revealed_groups(size, threshold, survivor_sets))


def test_a_low_threshold_lets_a_lying_server_see_the_sum_of_two() -> None:
    """The reason for the advice of 2/3: eleven sites, threshold six, sets that agree on sites 0 and 1 alone."""
    size, threshold = 11, 6
    others = list(range(2, size))
    survivor_sets = []
    for k in range(size):
        start = others.index(k) if k in others else 4 * k
        window = [others[(start + step) % len(others)] for step in range(threshold - 2)]
        survivor_sets.append(frozenset({0, 1, *window}))
    assert all(k in group and len(group) == threshold for k, group in enumerate(survivor_sets))
    assert frozenset({0, 1}) in revealed_groups(size, threshold, tuple(survivor_sets))
    assert smallest_revealed_group(size, threshold) == 2
    assert smallest_revealed_group(size, choose_threshold(size, 2 / 3)) >= size / 2


def test_colluding_sites_weaken_the_bound() -> None:
    assert smallest_revealed_group(9, 5, colluding=1) == 1
    # 30 (42 - 30) / 21 = 17.1...
    assert smallest_revealed_group(30, choose_threshold(30, 2 / 3)) == 18
    # (30 - 5) (42 - 5 - 30) / (21 - 5) = 10.9...
    assert smallest_revealed_group(30, 21, colluding=5) == 11
    for size in range(2, 60):
        assert smallest_revealed_group(size, choose_threshold(size)) >= 2
        assert smallest_revealed_group(size, choose_threshold(size, 2 / 3)) >= size / 2
