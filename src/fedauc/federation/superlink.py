"""Flower's SuperLink for large models: `fedauc federation superlink`, with the options of `flower-superlink`.

Most of what a round costs is spent in the SuperLink, in one thread. Beside the settings of `large_messages` it does two
things in another way, through places that Flower has for extensions:

- **Parts of messages stay in memory.** Flower's database would hold them for seconds only. Sites, runs and the list of
  messages are in the database as before. A SuperLink that is killed loses the parts of the round under way; Flower
  ends the run then in any case, and resuming it repeats that round.
- **The body of a request is read as a whole** before Flower's layers pass it on: four of them would start a group of
  tasks for every 64 kB that arrive.
"""

from __future__ import annotations

import sys
from typing import Any

from fedauc.federation.large_messages import prepare_for_large_messages

IN_MEMORY = ":flwr-in-memory:"
"""Flower's name for a store that is no database."""


class WholeBodies:
    """An ASGI layer that passes the body of a request on as one message."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the body, then let the app answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts, message = list[bytes](), await receive()
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                message = {"type": "http.request", "body": b"".join(parts)}
                break
            message = await receive()
        first = [message]

        async def receive_whole_body() -> Any:
            return first.pop() if first else await receive()

        await self._app(scope, receive_whole_body, send)


def extend_flower() -> None:
    """Let the SuperLink of this process keep parts of messages in memory, and read bodies as a whole."""
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink import config_loader, extensions
    from starlette.middleware import Middleware

    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(WholeBodies), *others())
    config_loader.ObjectStoreFactory = lambda database: ObjectStoreFactory(IN_MEMORY)


def main() -> None:
    """Run the SuperLink with this process's arguments."""
    prepare_for_large_messages()
    extend_flower()
    from flwr.superlink.cli.flower_superlink import flower_superlink

    sys.argv[0] = "fedauc federation superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
