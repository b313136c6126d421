"""The adapter to Flower: its Grid, Message and Context in terms of ours. Nothing else in the library imports Flower.

The server has its own main loop, because a Flower Strategy fixes one exchange per round and one record per message. It
pushes and pulls messages itself, because `send_and_receive` sleeps three seconds between checks.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedauc.federation.exchange import Node, Reply
from fedauc.federation.run_config import serve_run
from fedauc.federation.serialization import Payload
from fedauc.federation.site import ModelBuilder, Site, SiteLoader, answer_failure
from fedauc.federation.site_control import answer_at_site, read_owner_policy
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_table import SiteTable
from fedauc.federation.site_worker import log_to_stderr

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.serverapp import Grid as FlwrGrid

HEADER_RECORD, BODY_RECORD = "header", "body"
"""The records of a message: a text with a small body, or a text and one array."""

INLINE_BYTES = 1 << 20
"""Largest body that travels beside its header. Every record and array is a request of its own to the SuperLink, which
costs it several milliseconds; Flower sends an array in parts, which suits large bodies."""

BODY_FORMAT = "fedauc.bytes"
"""The serialization type of a large body, as Flower calls it."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before a part of a reply that a site is still sending is asked for again."""


class FlowerGrid:
    """A Flower grid as a `Grid`.

    Replies are fetched here and not by Flower's grid, which waits for one after the other. A reply is listed as soon as
    its site begins to send it, so that a site that dies meanwhile would make the server wait for minutes.
    """

    def __init__(self, grid: FlwrGrid) -> None:
        self._grid: Any = grid
        self._fetching = set[str]()
        self._fetched = queue.SimpleQueue[Reply]()

    def online_nodes(self) -> list[Node]:
        """Every SuperNode that is online, with its registered name and key and when it was last activated."""
        return [
            Node(node.node_id, node.name, normalize_public_key(node.public_key), node.last_activated_at)
            for node in self._grid.get_nodes()
        ]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        """Send a message; after so many seconds the SuperLink drops it and its reply."""
        from flwr.app import Message

        message = Message(payload_to_records(payload), dst_node_id=node_id, message_type="train", ttl=seconds)
        message_ids = list(self._grid.push_messages([message]))
        return str(message_ids[0]) if message_ids and message_ids[0] else ""

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        """The replies that have come as a whole; an error for a node that has died comes from the SuperLink itself."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        asked = [message_id for message_id in message_ids if message_id not in self._fetching]
        if asked:
            listed = self._grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for envelope, tree in zip(listed.messages_list, listed.message_object_trees, strict=True):
                self._fetching.add(envelope.metadata.reply_to_message_id)
                # It must not keep the process alive when the run ends.
                threading.Thread(target=self._fetch_reply, args=(envelope.metadata, tree), daemon=True).start()
        replies = list[Reply]()
        with contextlib.suppress(queue.Empty):
            while True:
                replies.append(self._fetched.get_nowait())
        self._fetching -= {reply.message_id for reply in replies}
        return replies

    def _fetch_reply(self, metadata: Any, tree: Any) -> None:
        """Fetch the parts of a reply, and put it together."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        client, node, run_id = self._grid._runtime_client, self._grid.node, self._grid.run.run_id
        try:
            pull = make_pull_object_fn_protobuf(client.PullObject, node, run_id)
            names = dict.fromkeys(member.object_id for member in iterate_object_tree(tree))
            contents = {name: fetch_part(pull, name) for name in names}
            received = ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=metadata.message_id)
            client.ConfirmMessageReceived(received)
            message: Any = inflate_object_from_contents(metadata.message_id, contents)
            reply = read_reply(message)
        except Exception as error:
            reply = Reply(metadata.reply_to_message_id, None, f"its reply could not be fetched: {error}")
        self._fetched.put(reply)


class ContextSiteState:
    """Site state in the context that Flower keeps for a node. It is lost when the SuperNode or the run ends."""

    def __init__(self, state: RecordDict, run_id: str) -> None:
        self._state, self._prefix = state, f"{run_id}/"

    def list_names(self) -> list[str]:
        """The names of all stored payloads."""
        return sorted(key.removeprefix(self._prefix) for key in self._state if key.startswith(self._prefix))

    def load_payload(self, name: str) -> Payload | None:
        """The payload of that name, or None."""
        if self._prefix + name not in self._state:
            return None
        record: Any = self._state[self._prefix + name]
        return Payload(record["header"], np.frombuffer(record["body"], np.uint8))

    def save_payload(self, name: str, payload: Payload) -> None:
        """Store a payload, replacing one of the same name."""
        from flwr.app import ConfigRecord

        record = ConfigRecord({"header": payload.header_text, "body": payload.body_bytes()})
        self._state[self._prefix + name] = record

    def delete_payload(self, name: str) -> None:
        """Delete a payload, if it exists."""
        self._state.pop(self._prefix + name, None)


def payload_to_records(payload: Payload) -> RecordDict:
    """A payload as Flower records; a large body is an array of bytes in a format of our own: the bytes."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    header = ConfigRecord({"text": payload.header_text})
    if payload.body.nbytes <= INLINE_BYTES:
        header["body"] = payload.body_bytes()
        return RecordDict({HEADER_RECORD: header})
    # Flower would write the array in numpy's format, with two more copies of it.
    array = Array("uint8", (payload.body.nbytes,), BODY_FORMAT, payload.body_bytes())
    return RecordDict({HEADER_RECORD: header, BODY_RECORD: ArrayRecord({"flat": array})})


def payload_from_records(records: RecordDict) -> Payload:
    """The payload in Flower records."""
    header: Any = records[HEADER_RECORD]
    text: Any = header["text"]
    if not isinstance(text, str):
        raise ValueError(f"the header is a {type(text).__name__}; it must be text")
    if BODY_RECORD not in records:
        return Payload(text, np.frombuffer(header["body"], np.uint8))
    flat: Any = records[BODY_RECORD]["flat"]
    if flat.stype != BODY_FORMAT:
        raise ValueError(f"the body has the format {flat.stype!r}; it must be {BODY_FORMAT!r}")
    return Payload(text, np.frombuffer(flat.data, np.uint8))


def read_any_records(records: RecordDict) -> Payload:
    """The payload in records that may contain anything; one that cannot be read has no body, and is refused later.

    Its header is kept where it is text, because it says which version wrote it.
    """
    try:
        return payload_from_records(records)
    except Exception as error:
        header: Any = records.get(HEADER_RECORD)
        text = header.get("text") if isinstance(header, Mapping) else None
        return Payload(text if isinstance(text, str) else f'"{type(error).__name__}"', np.zeros(0, np.uint8))


def fetch_part(pull: Callable[[str], bytes], name: str) -> bytes:
    """A part of a reply, as soon as its site has sent it; an error where the SuperLink no longer waits for it."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    pause = SHORTEST_PAUSE
    while True:
        try:
            return pull(name)
        except ObjectUnavailableError:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def read_reply(message: Message) -> Reply:
    """A reply of Flower, or its explanation of why there is none."""
    message_id = message.metadata.reply_to_message_id
    if message.has_error():
        return Reply(message_id, None, f"Flower error {message.error.code}: {message.error.reason}")
    return Reply(message_id, read_any_records(message.content))


def normalize_public_key(key: bytes | str) -> str:
    """A public key as PEM, whether it is given as PEM (by the SuperLink) or as an OpenSSH line (in the site table)."""
    from cryptography.hazmat.primitives import serialization

    data = key.encode() if isinstance(key, str) else key
    if not data.strip():
        return ""
    load_key = serialization.load_ssh_public_key if data.startswith(b"ecdsa-") else serialization.load_pem_public_key
    key_format = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return str(load_key(data).public_bytes(*key_format).decode().strip())


# ---------------------------------------------------------------------------------------------------- what apps call


def run_server(grid: FlwrGrid, context: Context, build_model: ModelBuilder | None = None) -> None:
    """The main function of a ServerApp: start the run that the run configuration describes, or resume it."""
    log_to_stderr()
    serve_run(FlowerGrid(grid), dict(context.run_config), build_model, normalize_public_key)


def answer_message(
    message: Message,
    context: Context,
    load_data: Callable[[Mapping[str, Any]], SiteData | SiteTable],
    build_model: ModelBuilder | None = None,
) -> Message:
    """The handler of a ClientApp: one message in, one answer out.

    The node's configuration names the site's policy file, `policy`, or holds `share` (nothing, histograms or scores)
    and `share-auc`; and `state`, the folder in which the site keeps its state and its audit log.
    """
    from flwr.app import Message

    log_to_stderr()
    try:
        payload, load_rows = read_any_records(message.content), lambda: load_data(context.node_config)
        if "state" in context.node_config:
            reply = answer_at_site(context.node_config, payload, load_rows, build_model)
        else:
            reply = _open_site_without_folder(context, load_rows, build_model).answer_message(payload)
    except Exception as error:  # A handler that raises would end the SuperNode's service.
        reply = answer_failure(error)
    return Message(payload_to_records(reply), reply_to=message)


def _open_site_without_folder(context: Context, load_rows: SiteLoader, build_model: ModelBuilder | None) -> Site:
    """The site that the node's configuration describes; without a folder for its state it keeps no audit log."""
    node_config = context.node_config
    policy = read_owner_policy(node_config)
    if node_config.get("policy"):
        raise ValueError("the site has a policy file, but no folder for its state; add state to --node-config")
    return Site(
        load_rows,
        lambda run_id: ContextSiteState(context.state, run_id),
        policy.to_site_policy(),
        build_model,
    )
