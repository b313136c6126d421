"""A message service in this process: real sites that answer at once, for a rehearsal without Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedauc.federation.exchange import Node, Reply
from fedauc.federation.serialization import Payload


class AnsweringSite(Protocol):
    """Whatever answers the server's messages: a site, or a site under its owner's control."""

    def answer_message(self, payload: Payload) -> Payload:
        """The answer to a message."""


class InProcessGrid:
    """Sites by name, all of them online."""

    def __init__(self, sites: Mapping[str, AnsweringSite]) -> None:
        self._sites = dict(enumerate(sites.items()))
        self._replies: dict[str, Reply] = {}
        self._sent = 0

    def online_nodes(self) -> list[Node]:
        """Every site."""
        return [Node(number, name) for number, (name, _) in self._sites.items()]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        """Let the site answer before this returns."""
        self._sent += 1
        message_id = f"message-{self._sent}"
        self._replies[message_id] = Reply(message_id, self._sites[node_id][1].answer_message(payload))
        return message_id

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        """The replies to these messages."""
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]
