"""The little a federation needs of a message service, so that Flower stays at the edge and tests need none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fedauc.federation.wire import Parcel


class Node(NamedTuple):
    """A site that is online: its number of the moment, its registered name and key, and when it last came online."""

    number: int
    name: str
    key: str = ""
    since: str = ""


class Reply(NamedTuple):
    """What came back for a message: a parcel, or the service's word on why there is none."""

    message: str
    parcel: Parcel | None
    error: str = ""


class Grid(Protocol):
    """Who is online, and letters to and from them. Nothing here blocks for long."""

    def nodes(self) -> list[Node]:
        """Every site that is online now."""

    def push(self, node: int, parcel: Parcel, seconds: float) -> str:
        """Send a parcel that is of use for so many seconds; the message's name, or "" if it could not be sent."""

    def pull(self, messages: Sequence[str]) -> list[Reply]:
        """The replies to these messages that have come since the last call."""
