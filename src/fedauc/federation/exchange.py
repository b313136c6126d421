"""One exchange with many sites: send a message to each, wait up to a deadline, and report what each site answered.

A site is known by its registered name and key, and numbered by its row in the site table: this is its client number
in training. The message service's own id of a node is good for one message only, because a restarted node gets
another. A reply is matched by the id of the message that it answers. Nothing that a site or the service does makes an
exchange fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedauc.federation.agreement import ServerPolicy, SiteEntry
from fedauc.federation.serialization import Payload
from fedauc.federation.site_state import MissingSiteState

LOG = logging.getLogger("fedauc.server")

ONLINE_CHECK_INTERVAL = 1.0
"""Seconds between two queries of which sites are online."""

REPLACEABLE_STATE = ("plan", "anchor", "client state")
"""What a site may have lost, and is sent again or starts afresh without."""

Answer = TypeVar("Answer")


# ------------------------------------------------------------------------- what is needed of a message service


class Node(NamedTuple):
    """A site that is online: its current id, its registered name and key, and when it last came online."""

    node_id: int
    name: str
    key: str = ""
    online_since: str = ""


class Reply(NamedTuple):
    """The reply to a message: a payload, or the message service's explanation of why there is none."""

    message_id: str
    payload: Payload | None
    error: str = ""


class Grid(Protocol):
    """A message service: which nodes are online, messages to them, and their replies. No method blocks for long."""

    def online_nodes(self) -> list[Node]:
        """Every node that is online now."""

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        """Send a message that expires after so many seconds; returns its id, or "" if it could not be sent."""

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        """The replies to these messages that have arrived."""


# ------------------------------------------------------------------------------------------------- the exchange


class AnswerRefused(Exception):
    """The server does not use an answer; the text says why."""


@dataclass
class ExchangeResult(Generic[Answer]):
    """Per client, the accepted answer, or why the client counts as absent, or why its answer was refused."""

    answers: dict[int, Answer] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Clock:
    """The time source of an exchange; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Exchange:
    """The message service, the site table, and the server's policy."""

    grid: Grid
    sites: tuple[SiteEntry, ...]
    policy: ServerPolicy
    clock: Clock = Clock()
    logged_warnings: set[str] = field(default_factory=set)

    def online_sites(self) -> dict[int, Node]:
        """The nodes of the sites that are online, by client; nodes with an unknown name or a wrong key are ignored."""
        clients = {site.name: client for client, site in enumerate(self.sites)}
        online: dict[int, Node] = {}
        for node in self.grid.online_nodes():
            client = clients.get(node.name)
            if client is None:
                self._warn_once(f"node {node.name!r} is registered but not in the site table; it is ignored")
            elif self.sites[client].key not in ("", node.key):
                self._warn_once(f"site {node.name!r} has another key than the one in the site table; it is ignored")
            elif client not in online or node.online_since >= online[client].online_since:
                online[client] = node
        return online

    def ask_sites(
        self,
        messages: Mapping[int, Callable[[], Payload]],
        read_payload: Callable[[int, Payload], Answer],
        on_missing_state: Callable[[int, str], None] | None = None,
        seconds: float | None = None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> ExchangeResult[Answer]:
        """Send every client its message and read the answers, until all have come, or enough, or the deadline.

        A message is built when it is sent, because a site that has lost its state needs another one:
        `on_missing_state` is called with what was lost. `read_payload` raises `AnswerRefused` for an answer that must
        not be used; any other exception that it raises counts as a refusal too.
        """
        collection = _AnswerCollection(self, dict(messages), read_payload, on_missing_state)
        return collection.collect_until_deadline(seconds or self.policy.deadline, is_enough)

    def _warn_once(self, warning: str) -> None:
        """Log a warning the first time only: the online sites are queried every second."""
        if warning not in self.logged_warnings:
            self.logged_warnings.add(warning)
            LOG.warning("%s", warning)


class _AnswerCollection(Generic[Answer]):
    """The state of one exchange while answers are collected."""

    def __init__(
        self,
        exchange: Exchange,
        messages: dict[int, Callable[[], Payload]],
        read_payload: Callable[[int, Payload], Answer],
        on_missing_state: Callable[[int, str], None] | None,
    ) -> None:
        self._exchange, self._messages = exchange, messages
        self._read_payload, self._on_missing_state = read_payload, on_missing_state
        self._waiting = set(messages)
        self._client_of_message: dict[str, int] = {}
        self._node_written_to: dict[int, Node] = {}
        self._attempts = dict.fromkeys(messages, 0)
        self._reported_missing = set[tuple[int, str]]()
        self._status = dict.fromkeys(messages, "was not online before the deadline")
        self._result: ExchangeResult[Answer] = ExchangeResult()

    def collect_until_deadline(self, seconds: float, is_enough: Callable[[], bool]) -> ExchangeResult[Answer]:
        """Wait until every client has answered, enough have, or the deadline has passed."""
        clock, last_check = self._exchange.clock, float("-inf")
        deadline = clock.now() + seconds
        while self._waiting:
            now = clock.now()
            if now - last_check >= ONLINE_CHECK_INTERVAL:
                last_check = now
                self._send_messages(max(deadline - now, 1.0))
            pending = [message for message, client in self._client_of_message.items() if client in self._waiting]
            for reply in self._exchange.grid.pull_replies(pending) if pending else []:
                self._receive_reply(reply)
            if is_enough():
                return self._result
            if not self._waiting or clock.now() >= deadline:
                break
            clock.sleep(self._exchange.policy.poll_interval)
        for client in sorted(self._waiting):
            self._mark_absent(client, self._status[client])
        return self._result

    def _send_messages(self, seconds: float) -> None:
        """Write to every online site without a message on its way; a site that has restarted has lost its message."""
        online = self._exchange.online_sites()
        for client in sorted(self._waiting & set(online)):
            node = online[client]
            if self._node_written_to.get(client) == node or self._has_no_attempts_left(client):
                continue
            self._attempts[client] += 1
            message_id = self._exchange.grid.push_message(node.node_id, self._messages[client](), seconds)
            self._status[client] = "did not answer before the deadline" if message_id else "could not be written to"
            if message_id:
                self._node_written_to[client] = node
                self._client_of_message[message_id] = client

    def _receive_reply(self, reply: Reply) -> None:
        client = self._client_of_message.get(reply.message_id)
        if client is None or client not in self._waiting:
            LOG.info("ignored a second or unexpected reply to message %r", reply.message_id)
            return
        name = self._exchange.sites[client].name
        if reply.payload is None:
            LOG.warning("site %r: %s (attempt %d)", name, reply.error, self._attempts[client])
            self._send_again(client, reply, reply.error)
            return
        try:
            answer = self._read_payload(client, reply.payload)
        except MissingSiteState as missing:
            LOG.warning("site %r no longer has its %s", name, missing)
            if self._on_missing_state is not None:
                self._on_missing_state(client, str(missing))
                if (client, str(missing)) not in self._reported_missing and str(missing) in REPLACEABLE_STATE:
                    # What is missing is sent once, whatever the number of attempts: nothing was lost on the way.
                    self._reported_missing.add((client, str(missing)))
                    self._attempts[client] -= 1
            self._send_again(client, reply, f"no longer has its {missing}")
        except Exception as reason:  # A malformed answer can break a reader anywhere, and must not break the run.
            self._waiting.discard(client)
            self._result.refused[client] = str(reason)
            LOG.warning("the answer of site %r is refused: %s", name, reason)
        else:
            self._waiting.discard(client)
            self._result.answers[client] = answer

    def _send_again(self, client: int, reply: Reply, reason: str) -> None:
        """Let the next check send the message again, while attempts and time last."""
        # The message is forgotten, because a service may return the same reply whenever it is asked for it.
        del self._client_of_message[reply.message_id]
        self._status[client] = reason
        if reply.payload is None and client in self._client_of_message.values():
            return
        self._node_written_to.pop(client, None)
        if self._has_no_attempts_left(client):
            self._mark_absent(client, reason)

    def _has_no_attempts_left(self, client: int) -> bool:
        return self._attempts[client] >= self._exchange.policy.max_attempts

    def _mark_absent(self, client: int, reason: str) -> None:
        self._waiting.discard(client)
        self._result.absent[client] = reason
        LOG.warning("site %r is marked absent: %s", self._exchange.sites[client].name, reason)


def describe_missing_sites(reasons: Mapping[str, str]) -> str:
    """The end of a sentence that names the sites that gave no answer, and why.

    >>> describe_missing_sites({"north": "was not online before the deadline"})
    "; site 'north': was not online before the deadline"
    """
    return "".join(f"; site {name!r}: {reason}" for name, reason in reasons.items())


def read_answer(payload: Payload, kind: str) -> dict[str, Any]:
    """The header of a site's answer of the expected kind; a site's refusal or missing state is raised."""
    header = payload.read_header()
    if header.get("kind") == "missing-state":
        raise MissingSiteState(str(header.get("what")))
    if header.get("kind") == "refusal":
        raise AnswerRefused(f"the site reports: {str(header.get('reason'))[:300]}")
    if header.get("kind") != kind:
        raise AnswerRefused(f"it is of kind {header.get('kind')!r}; expected is {kind!r}")
    return header
