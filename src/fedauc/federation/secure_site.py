"""The site's side of a secure round: its key of the run, its masked upload, and the shares that it reveals.

A site stores what it is about to say before it says it. It answers a session once: a message that is repeated gets the
stored bytes again, and another message with the same session is refused. It also answers a round once, because the sum
of one session less that of another, with one survivor less, would be a single upload, and because an account counts one
participation per round: if the server crashes after the sites have answered, that round is lost.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fedauc.experiments.private_training import has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.federation.secure_rounds import (
    MASKED,
    PACKETS,
    SHARES,
    bytes_to_tensor,
    flatten_integers,
    tensor_to_bytes,
)
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.site_state import SiteRefusal, SiteState
from fedauc.interfaces import Upload
from fedauc.privacy.secure_sum import (
    SecureSumSession,
    SiteRecord,
    UnmaskRequest,
    mask_vector,
    read_session_round,
    reveal_shares,
)
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.secure_sum import SecureSum
from fedauc.uploads import UploadPipeline

RECORD_NAME, ANSWER_NAME = "secure-sum-record", "secure-sum-answer"
"""What a site stores for a run: its key with the sessions that it has answered, and its last masked upload."""


class SecureVisit(NamedTuple):
    """A visit whose upload is to be masked: the session, and the transform that encodes the upload."""

    session: SecureSumSession
    transform: PreparedSecureSum
    record: SiteRecord


def create_record(store: SiteState) -> SiteRecord:
    """The site's record of a run; a new one, with a new key, is stored before it is used."""
    record = load_record(store)
    if record is None:
        record = SiteRecord.create()
        save_record(store, record)
    return record


def load_record(store: SiteState) -> SiteRecord | None:
    """The site's record of a run, if it has one."""
    stored = store.load_payload(RECORD_NAME)
    if stored is None:
        return None
    (content,) = unpack_tensors(stored)["record"]
    return SiteRecord.from_plain(json.loads(tensor_to_bytes(content)))


def save_record(store: SiteState, record: SiteRecord) -> None:
    """Store a record, private key included."""
    # In the body, because a header has a limit that a long run's sessions would exceed.
    content = bytes_to_tensor(json.dumps(record.to_plain()).encode())
    store.save_payload(RECORD_NAME, pack_payload({}, {"record": content}))


def open_secure_visit(header: dict[str, Any], recipe: Recipe, store: SiteState, secret: bytes) -> SecureVisit | None:
    """What a visit needs for masking; None for a run without secure sums. Refuses what a site must not answer."""
    transform = recipe.transforms[-1] if recipe.transforms else None
    record = load_record(store)
    if not isinstance(transform, SecureSum):
        if record is not None:
            raise SiteRefusal("this site registered for secure sums; the server asks for an upload in the clear")
        return None
    if record is None:
        raise SiteRefusal("this site has no key for this run: its state was lost; it can take part in a new run")
    if "session" not in header or "secure_sum" not in header:
        raise SiteRefusal("the recipe has secure sums, but the server has opened no session")
    session = SecureSumSession.from_plain(header["session"])
    prepared = PreparedSecureSum.from_plain(transform, header["secure_sum"], secret)
    round, least = header["phase"]["round"], prepared.least_clients(len(session.members))
    if read_session_round(session.session_id) != round:
        raise SiteRefusal(f"the session is for another round than round {round}")
    if session.threshold < least:
        raise SiteRefusal(f"the session has the threshold {session.threshold}; this site needs {least}")
    answered = {name: read_session_round(bytes.fromhex(name)) for name in record.sessions}
    if session.session_id.hex() in answered:
        if repeat_answer(store, session) is None:
            raise SiteRefusal("this site has answered the session; a second answer would reveal its upload")
    elif round in answered.values():
        raise SiteRefusal(
            f"this site has answered round {round}; the sums of two answers to a round could differ by one upload"
        )
    elif has_client_noise(recipe):
        # An account of a private run counts one visit per cycle, whatever its schedule.
        turn = header["cycle_length"]
        if earlier := [number for number in answered.values() if number // turn == round // turn]:
            raise SiteRefusal(f"this site has answered round {earlier[0]} ; a second answer in its cycle costs privacy")
    return SecureVisit(session, prepared, record)


def repeat_answer(store: SiteState, session: SecureSumSession) -> Payload | None:
    """The stored answer to a session, the same bytes as before; None if the site has not answered it."""
    stored = store.load_payload(ANSWER_NAME)
    is_same = stored is not None and stored.read_header()["fingerprint"] == session.fingerprint.hex()
    return stored if is_same else None


def replace_secure_sum(uploads: UploadPipeline, transform: PreparedSecureSum) -> UploadPipeline:
    """The pipeline with the site's own secure sum, which is always last."""
    return UploadPipeline((*uploads.transforms[:-1], transform), uploads.mean, uploads.seed)


def mask_upload(visit: SecureVisit, client: int, upload: Upload, answer: dict[str, Any], store: SiteState) -> Payload:
    """The masked upload as a message, stored with the record before it is returned."""
    vector, minimum = flatten_integers(upload.mean), visit.transform.minimum_cohort
    try:
        masked, record = mask_vector(visit.session, client, visit.record, vector, minimum)
    except ValueError as error:
        # What the protocol refuses is said in terms of the session, which the server knows.
        raise SiteRefusal(str(error)) from error
    header = {**answer, "fingerprint": visit.session.fingerprint.hex()}
    payload = pack_payload(header, {MASKED: masked.vector, PACKETS: bytes_to_tensor(masked.packets)})
    # The record first: if the site crashes in between, it refuses the session instead of masking another vector.
    save_record(store, record)
    store.save_payload(ANSWER_NAME, payload)
    return payload


def answer_unmasking(header: dict[str, Any], payload: Payload, store: SiteState) -> Payload:
    """The shares that this site reveals for the survivors, and never for other survivors of the same session."""
    record = load_record(store)
    if record is None:
        raise SiteRefusal("this site has no key for this run: its state was lost; it can take part in a new run")
    session = SecureSumSession.from_plain(header["session"])
    (packets,) = unpack_tensors(payload)[PACKETS]
    request = UnmaskRequest(tuple(map(int, header["survivors"])), tensor_to_bytes(packets))
    try:
        shares, record = reveal_shares(session, int(header["client"]), record, request)
    except ValueError as error:
        raise SiteRefusal(str(error)) from error
    save_record(store, record)
    return pack_payload({"kind": "unmask"}, {SHARES: bytes_to_tensor(shares)})
