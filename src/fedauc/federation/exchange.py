"""One exchange with many sites: send, wait up to a deadline, and say of everyone what came of it.

Sites are known by their registered name and key; the service's number for a node is good for one letter only. A reply
is matched by the message it answers, whoever brings it. Nothing a site or the service does makes an exchange fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from fedauc.federation.agreement import ServerPolicy, SiteEntry
from fedauc.federation.serialization import Payload
from fedauc.federation.visit_messages import MissingSiteState


class Node(NamedTuple):
    """A site that is online: its number of the moment, its registered name and key, and when it last came online."""

    node_id: int
    name: str
    key: str = ""
    online_since: str = ""


class Reply(NamedTuple):
    """What came back for a message: a parcel, or the service's word on why there is none."""

    message_id: str
    payload: Payload | None
    error: str = ""


class Grid(Protocol):
    """Who is online, and letters to and from them. Nothing here blocks for long."""

    def online_nodes(self) -> list[Node]:
        """Every site that is online now."""

    def push_message(self, node: int, parcel: Payload, seconds: float) -> str:
        """Send a parcel that is of use for so many seconds; the message's name, or "" if it could not be sent."""

    def pull_replies(self, messages: Sequence[str]) -> list[Reply]:
        """The replies to these messages that have come since the last call."""


LOG = logging.getLogger("fedauc.server")

LOOK = 1.0
"""Seconds between two looks at who is online."""

T = TypeVar("T")


class AnswerRefused(Exception):
    """Why an answer is not used."""


@dataclass
class ExchangeResult(Generic[T]):
    """What came of an exchange: the answers that may be used, who did not answer, whose answer was refused."""

    answers: dict[int, T] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Clock:
    """Time as the exchange sees it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Exchange:
    """The grid, the table of sites, and the terms. Sites go by their place in the table."""

    grid: Grid
    sites: tuple[SiteEntry, ...]
    policy: ServerPolicy
    clock: Clock = Clock()
    said: set[str] = field(default_factory=set)

    def online_sites(self) -> dict[int, Node]:
        """The sites that are online, by place; a node under a wrong key is not one of them."""
        places = {site.name: place for place, site in enumerate(self.sites)}
        found: dict[int, Node] = {}
        for node in self.grid.online_nodes():
            place = places.get(node.name)
            if place is None:
                self._once(f"node {node.name!r} is registered but not in the table of sites; it is left out")
            elif self.sites[place].key not in ("", node.key):
                self._once(f"site {node.name!r} shows another key than the table has; it is left out")
            elif place not in found or node.online_since >= found[place].online_since:
                found[place] = node
        return found

    def ask_sites(
        self,
        letters: Mapping[int, Callable[[], Payload]],
        read: Callable[[int, Payload], T],
        lacking: Callable[[int, str], None] | None = None,
        seconds: float | None = None,
    ) -> ExchangeResult[T]:
        """Send every site its letter and read the answers.

        A letter is written when it is sent, since what a site lacks may change it (`lacking` is told). `read` raises
        `Refused` for an answer that must not be used, and whatever else it raises counts as that.
        """
        talk = _Talk(self, dict(letters), read, lacking, seconds or self.policy.deadline)
        return talk.run()

    def _once(self, warning: str) -> None:
        """Who is online is asked every second; what is wrong with it is said once."""
        if warning not in self.said:
            self.said.add(warning)
            LOG.warning("%s", warning)


class _Talk(Generic[T]):
    """The state of one exchange."""

    def __init__(
        self,
        exchange: Exchange,
        letters: dict[int, Callable[[], Payload]],
        read: Callable[[int, Payload], T],
        lacking: Callable[[int, str], None] | None,
        seconds: float,
    ) -> None:
        self._exchange, self._letters, self._read, self._lacking = exchange, letters, read, lacking
        self._end = exchange.clock.now() + seconds
        self._due = set(letters)
        self._sent: dict[str, int] = {}
        self._at: dict[int, Node] = {}
        self._tries = dict.fromkeys(letters, 0)
        self._last = dict.fromkeys(letters, "was not online before the deadline")
        self._outcome: ExchangeResult[T] = ExchangeResult()

    def run(self) -> ExchangeResult[T]:
        """Until everyone has answered or the deadline has passed."""
        clock, looked = self._exchange.clock, float("-inf")
        while self._due:
            now = clock.now()
            if now - looked >= LOOK:
                looked = now
                self._send(self._exchange.online_sites(), self._end - now)
            waiting = [message for message, place in self._sent.items() if place in self._due]
            for reply in self._exchange.grid.pull_replies(waiting) if waiting else []:
                self._receive(reply)
            if not self._due or clock.now() >= self._end:
                break
            clock.sleep(self._exchange.policy.poll_interval)
        for place in sorted(self._due):
            self._give_up(place, self._last[place])
        return self._outcome

    def _send(self, online: dict[int, Node], left: float) -> None:
        """To whoever is online and has no letter on its way; one that came back since has lost it."""
        for place in sorted(self._due & set(online)):
            node = online[place]
            if self._at.get(place) == node:
                continue
            if self._tries[place] >= self._exchange.policy.max_attempts:
                continue
            self._tries[place] += 1
            message = self._exchange.grid.push_message(node.node_id, self._letters[place](), max(left, 1.0))
            self._last[place] = "did not answer before the deadline" if message else "could not be written to"
            if message:
                self._at[place] = node
                self._sent[message] = place

    def _receive(self, reply: Reply) -> None:
        place = self._sent.get(reply.message_id)
        if place is None or place not in self._due:
            LOG.info("a reply to message %r came twice or unasked for; it is left out", reply.message_id)
            return
        if reply.payload is None:
            self._lost(place, reply)
            return
        try:
            answer = self._read(place, reply.payload)
        except MissingSiteState as lacking:
            self._again(place, reply, str(lacking))
        except Exception as reason:  # What a stranger sends may break a reader anywhere; it must not break the run.
            self._due.discard(place)
            self._outcome.refused[place] = str(reason)
            LOG.warning("the answer of site %r is refused: %s", self._name(place), reason)
        else:
            self._due.discard(place)
            self._outcome.answers[place] = answer

    def _lost(self, place: int, reply: Reply) -> None:
        """The service could not deliver or got no answer: try again while tries and time last."""
        del self._sent[reply.message_id]
        self._last[place] = reply.error
        LOG.warning("site %r: %s (try %d)", self._name(place), reply.error, self._tries[place])
        if place in self._sent.values():
            return
        self._at.pop(place, None)
        if self._tries[place] >= self._exchange.policy.max_attempts:
            self._give_up(place, reply.error)

    def _again(self, place: int, reply: Reply, what: str) -> None:
        # A service may hand out the same reply for as long as it is asked for it.
        del self._sent[reply.message_id]
        LOG.warning("site %r no longer has its %s", self._name(place), what)
        self._last[place] = f"no longer has its {what}"
        if self._lacking is not None:
            self._lacking(place, what)
        self._at.pop(place, None)
        if self._tries[place] >= self._exchange.policy.max_attempts:
            self._give_up(place, self._last[place])

    def _give_up(self, place: int, reason: str) -> None:
        self._due.discard(place)
        self._outcome.absent[place] = reason
        LOG.warning("site %r is marked absent: %s", self._name(place), reason)

    def _name(self, place: int) -> str:
        return self._exchange.sites[place].name


def present(outcome: ExchangeResult[T], order: Iterable[int]) -> list[int]:
    """Who came, in the given order."""
    return [place for place in order if place in outcome.answers]
