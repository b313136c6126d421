"""One exchange with many sites: send a message to each, wait up to a deadline, and report what each site answered.

A site is known by its registered name and key, and numbered by its row in the site table: this is its client number
in training. The message service's own id of a node is good for one message only, because a restarted node gets
another. A reply is matched by the id of the message that it answers. Nothing that a site or the service does makes an
exchange fail.

A caller that passes `open_messages` may use an answer that comes after its exchange has ended: messages without an
answer are kept there, and a later exchange receives their replies as well.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fedauc.federation.agreement import ServerPolicy, SiteEntry
from fedauc.federation.serialization import Payload
from fedauc.federation.site_state import MissingSiteState
from fedauc.federation.versions import find_version_problem

LOG = logging.getLogger("fedauc.server")

ONLINE_CHECK_INTERVAL = 1.0
"""Seconds between two queries of which sites are online."""

CLOSED_PAUSE = 10.0
"""Seconds at least before a site that is closed is asked again."""

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


class ExchangeView(NamedTuple):
    """An exchange as others see it while it goes on: whose answers have come after how many seconds, who is missing
    and why, and whether it is over. `kind` and `round` are those of its messages.
    """

    kind: str
    round: int | None
    elapsed: float
    seconds: float
    online: frozenset[int]
    answered: Mapping[int, float]
    waiting: Mapping[int, str]
    absent: Mapping[int, str]
    refused: Mapping[int, str]
    is_over: bool


class AnswerRefused(Exception):
    """The server does not use an answer; the text says why."""


class LateAnswerDropped(Exception):
    """An answer to a message of an earlier exchange is not used; the text says why. The site is free again."""


class SiteDeclined(AnswerRefused):
    """A site says itself that it does not answer, and why; that is no misbehaviour."""


class SiteClosed(SiteDeclined):
    """A site answers at other hours; it says in how many seconds."""

    def __init__(self, reason: str, opens_in: float) -> None:
        super().__init__(reason)
        self.opens_in = opens_in


@dataclass
class ExchangeResult(Generic[Answer]):
    """Per client, the accepted answer, or why the client counts as absent, or why its answer was refused.

    `excused` are the clients among the refused that have done nothing wrong by themselves: those that say that they do
    not answer, and those whose answer was refused because of what others sent. `late` are the clients in `answers`
    whose answer is to a message of an earlier exchange, and `dropped` says why other answers to such messages are not
    used.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)
    excused: set[int] = field(default_factory=set)

    @property
    def misbehaved(self) -> dict[int, str]:
        """Whose answers the server has refused for what they held, and why."""
        return {client: reason for client, reason in self.refused.items() if client not in self.excused}


@dataclass
class OpenMessage(Generic[Answer]):
    """A message without an answer when its exchange ended: to which node, until when, and how an answer is read.

    A message that was sent several times has several ids.
    """

    message_ids: set[str]
    node: Node
    expires: float
    read_payload: Callable[[int, Payload], Answer]


@dataclass(frozen=True)
class Clock:
    """The time source of an exchange; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Exchange:
    """The message service, the site table, and the server's policy. Clients that have `left` get no messages."""

    grid: Grid
    sites: tuple[SiteEntry, ...]
    policy: ServerPolicy
    clock: Clock = Clock()
    logged_warnings: set[str] = field(default_factory=set)
    left: frozenset[int] = frozenset()
    observers: list[Callable[[ExchangeView], None]] = field(default_factory=list)
    """Called about every second of an exchange, after every answer, and at its end."""

    def online_sites(self) -> dict[int, Node]:
        """The nodes of the sites that are online, by client; nodes with an unknown name or a wrong key are ignored."""
        clients = {site.name: client for client, site in enumerate(self.sites)}
        online: dict[int, Node] = {}
        for node in self.grid.online_nodes():
            client = clients.get(node.name)
            if client is None:
                self.warn_once(f"node {node.name!r} is registered but not in the site table; it is ignored")
            elif client in self.left:
                self.warn_once(f"site {node.name!r} has left the run; it is ignored")
            elif self.sites[client].key not in ("", node.key):
                self.warn_once(f"site {node.name!r} has another key than the one in the site table; it is ignored")
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
        open_messages: dict[int, OpenMessage[Answer]] | None = None,
        enough: int | None = None,
    ) -> ExchangeResult[Answer]:
        """Send every client its message and read the answers, until all have come, or enough, or the deadline.

        Without `seconds`, the deadline of a site is that of its group. A message is built when it is sent, because a
        site that has lost its state needs another one: `on_missing_state` is called with what was lost. `read_payload`
        raises `AnswerRefused` for an answer that must not be used; any other exception that it raises counts as a
        refusal too. After `enough` answers the other sites are absent.

        With `open_messages`, answers to messages of earlier exchanges are received as well. A client with such a
        message is waited for if it is among `messages`, but it gets no other one before it has answered.

        A site that is closed is asked again when it opens, until the deadline, as one that is offline, unless
        `read_payload` is wrapped by `decline_when_closed`.
        """
        deadlines = {client: seconds or self.policy.deadline_of(self.sites[client].group) for client in messages}
        collection = _AnswerCollection(self, dict(messages), read_payload, on_missing_state, deadlines, open_messages)
        return collection.collect_until_deadline(is_enough, enough or len(self.sites) + 1)

    def warn_once(self, warning: str) -> None:
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
        seconds: Mapping[int, float],
        open_messages: dict[int, OpenMessage[Answer]] | None,
    ) -> None:
        self._closed_until: dict[int, float] = {}
        self._exchange, self._messages = exchange, messages
        self._read_payload, self._on_missing_state = read_payload, on_missing_state
        start = exchange.clock.now()
        self._deadlines = {client: start + limit for client, limit in seconds.items()}
        # An answer that may be late needs a message that outlives its round.
        rounds = 1 if open_messages is None else 1 + exchange.policy.max_staleness
        self._expiries = {client: start + rounds * limit for client, limit in seconds.items()}
        self._keeps_messages = open_messages is not None
        self._open = {} if open_messages is None else open_messages
        self._waiting = set(messages)
        self._client_of_message: dict[str, int] = {}
        self._node_written_to: dict[int, Node] = {}
        self._attempts = dict.fromkeys(messages, 0)
        self._reported_missing = set[tuple[int, str]]()
        self._status = dict.fromkeys(messages, "was not online before the deadline")
        self._result: ExchangeResult[Answer] = ExchangeResult()
        self._online: frozenset[int] = frozenset()
        self._answered_after: dict[int, float] = {}
        self._asked: tuple[str, int | None] | None = None
        self._started, self._seconds = start, max(seconds.values(), default=0.0)

    def collect_until_deadline(self, is_enough: Callable[[], bool], enough: int) -> ExchangeResult[Answer]:
        """Wait until every client has answered, enough have, or the deadlines have passed."""
        clock, last_check = self._exchange.clock, float("-inf")
        while self._waiting:
            now = clock.now()
            if now - last_check >= ONLINE_CHECK_INTERVAL:
                last_check = now
                self._send_messages(now)
                self._inform_observers()
            received = self._count_received()
            self._receive_replies()
            if self._count_received() > received:
                self._inform_observers()
            if is_enough():
                break
            if len(self._result.answers) >= enough:
                for client in sorted(self._waiting):
                    self._mark_absent(client, f"had not answered when {enough} sites had")
            for client in sorted(self._waiting):
                if clock.now() >= self._deadlines[client]:
                    self._mark_absent(client, self._status[client])
            if self._waiting:
                clock.sleep(self._exchange.policy.poll_interval)
        self._inform_observers(is_over=True)
        return self._result

    def _send_messages(self, now: float) -> None:
        """Write to every online site without a message on its way; a site that has restarted has lost its message."""
        online = self._exchange.online_sites()
        self._forget_lost_messages(online, now)
        self._online = frozenset(online)
        for client in sorted(self._waiting & set(online)):
            node = online[client]
            if client in self._open:
                self._status[client] = "is still busy with the message of an earlier round"
                continue
            if self._node_written_to.get(client) == node or self._has_no_attempts_left(client):
                continue
            if now < self._closed_until.get(client, now):
                continue
            self._attempts[client] += 1
            seconds = max(self._expiries[client] - now, 1.0)
            message = self._messages[client]()
            if self._asked is None and self._exchange.observers:
                self._asked = _describe_message(message.read_header())
            message_id = self._exchange.grid.push_message(node.node_id, message, seconds)
            self._status[client] = "did not answer before the deadline" if message_id else "could not be written to"
            if message_id:
                self._node_written_to[client] = node
                self._client_of_message[message_id] = client

    def _forget_lost_messages(self, online: Mapping[int, Node], now: float) -> None:
        """Give up messages of earlier exchanges that have expired, or whose site has restarted meanwhile."""
        for client, message in list(self._open.items()):
            if now >= message.expires:
                self._drop_open_message(client, "the message of an earlier round has expired")
            elif client in online and online[client] != message.node:
                self._drop_open_message(client, "it has restarted, and has lost the message of an earlier round")

    def _receive_replies(self) -> None:
        pending = [message for message, client in self._client_of_message.items() if client in self._waiting]
        late = {message_id: client for client, message in self._open.items() for message_id in message.message_ids}
        pending.extend(late)
        for reply in self._exchange.grid.pull_replies(pending) if pending else []:
            if reply.message_id in late:
                self._receive_late_reply(late[reply.message_id], reply)
            else:
                self._receive_reply(reply)

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
        except SiteClosed as closed:
            self._ask_when_open(client, reply, closed)
        except Exception as reason:  # A malformed answer can break a reader anywhere, and must not break the run.
            self._refuse_answer(client, reason)
        else:
            self._waiting.discard(client)
            self._result.answers[client] = answer
            self._answered_after[client] = self._exchange.clock.now() - self._started

    def _count_received(self) -> int:
        return len(self._result.answers) + len(self._result.refused) + len(self._result.dropped)

    def _inform_observers(self, is_over: bool = False) -> None:
        kind, round = self._asked or ("", None)
        for observe in self._exchange.observers:
            observe(
                ExchangeView(
                    kind=kind,
                    round=round,
                    elapsed=self._exchange.clock.now() - self._started,
                    seconds=self._seconds,
                    online=self._online,
                    answered=dict(self._answered_after),
                    waiting={client: self._status[client] for client in sorted(self._waiting)},
                    absent=dict(self._result.absent),
                    refused=dict(self._result.refused),
                    is_over=is_over,
                )
            )

    def _receive_late_reply(self, client: int, reply: Reply) -> None:
        """The reply to a message of an earlier exchange; without an answer the site is free for another message."""
        message = self._open.get(client)
        if message is None:
            LOG.info("ignored a second reply to message %r", reply.message_id)
            return
        if reply.payload is None:
            message.message_ids.discard(reply.message_id)
            if not message.message_ids:
                self._drop_open_message(client, reply.error)
            return
        try:
            answer = message.read_payload(client, reply.payload)
        except MissingSiteState as missing:
            if self._on_missing_state is not None:
                self._on_missing_state(client, str(missing))
            self._drop_open_message(client, f"no longer has its {missing}")
        except (LateAnswerDropped, SiteClosed) as reason:
            self._drop_open_message(client, str(reason))
        except Exception as reason:  # As for an answer in time.
            del self._open[client]
            self._refuse_answer(client, reason)
        else:
            del self._open[client]
            self._waiting.discard(client)
            self._result.answers[client] = answer
            self._result.late.add(client)

    def _drop_open_message(self, client: int, reason: str) -> None:
        del self._open[client]
        self._result.dropped[client] = reason
        LOG.warning("the late answer of site %r is dropped: %s", self._exchange.sites[client].name, reason)

    def _refuse_answer(self, client: int, reason: Exception) -> None:
        self._waiting.discard(client)
        self._result.refused[client] = str(reason)
        if isinstance(reason, SiteDeclined):
            self._result.excused.add(client)
        LOG.warning("the answer of site %r is refused: %s", self._exchange.sites[client].name, reason)

    def _ask_when_open(self, client: int, reply: Reply, closed: SiteClosed) -> None:
        """Send the message again when the site opens; that is no further attempt."""
        if client not in self._closed_until:
            LOG.warning("site %r is asked again when it opens: %s", self._exchange.sites[client].name, closed)
        self._closed_until[client] = self._exchange.clock.now() + max(closed.opens_in, CLOSED_PAUSE)
        self._attempts[client] -= 1
        self._send_again(client, reply, str(closed))

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
        """Wait for a client no longer; its message stays open where late answers may be used."""
        self._waiting.discard(client)
        self._result.absent[client] = reason
        LOG.warning("site %r is marked absent: %s", self._exchange.sites[client].name, reason)
        message_ids = {message for message, receiver in self._client_of_message.items() if receiver == client}
        if self._keeps_messages and message_ids and client in self._node_written_to:
            node, expires = self._node_written_to[client], self._expiries[client]
            self._open[client] = OpenMessage(message_ids, node, expires, self._read_payload)


def _describe_message(header: Mapping[str, Any]) -> tuple[str, int | None]:
    """The kind of a message, and the round that it belongs to."""
    phase = header.get("phase")
    round = phase["round"] if isinstance(phase, Mapping) else header.get("round")
    return str(header.get("kind")), round if isinstance(round, int) else None


def describe_missing_sites(reasons: Mapping[str, str]) -> str:
    """The end of a sentence that names the sites that gave no answer, and why.

    >>> describe_missing_sites({"north": "was not online before the deadline"})
    "; site 'north': was not online before the deadline"
    """
    return "".join(f"; site {name!r}: {reason}" for name, reason in reasons.items())


def decline_when_closed(read_payload: Callable[[int, Payload], Answer]) -> Callable[[int, Payload], Answer]:
    """A reader with which a site that is closed has declined, and is not waited for."""

    def read(client: int, payload: Payload) -> Answer:
        try:
            return read_payload(client, payload)
        except SiteClosed as closed:
            raise SiteDeclined(str(closed)) from closed

    return read


def read_answer(payload: Payload, kind: str) -> dict[str, Any]:
    """The header of a site's answer of the expected kind; a site's refusal or missing state is raised.

    An answer of another message format is refused before anything else is read of it.
    """
    header = payload.read_header()
    if problem := find_version_problem(header, "the site", "the server"):
        raise AnswerRefused(problem)
    if header.get("kind") == "missing-state":
        raise MissingSiteState(str(header.get("what")))
    if header.get("kind") == "refusal":
        reason, opens_in = f"the site reports: {str(header.get('reason'))[:300]}", header.get("opens_in")
        if isinstance(opens_in, int | float) and 0 <= opens_in < math.inf:
            raise SiteClosed(reason, float(opens_in))
        raise SiteDeclined(reason)
    if header.get("kind") != kind:
        raise AnswerRefused(f"it is of kind {header.get('kind')!r}; expected is {kind!r}")
    return header
