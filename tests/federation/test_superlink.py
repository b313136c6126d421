"""The layer of our SuperLink that passes bodies on as a whole."""

from __future__ import annotations

import asyncio
from typing import Any

from fedauc.federation.superlink import WholeBodies


class RecordingApp:
    """An ASGI app that receives until the body or the connection has ended, and once more."""

    def __init__(self) -> None:
        self.received = list[Any]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while not self.received or self.received[-1].get("more_body", False):
            self.received.append(await receive())
        self.received.append(await receive())


def receive_all(messages: list[dict[str, Any]], scope_type: str = "http") -> list[Any]:
    app, waiting = RecordingApp(), iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent")

    asyncio.run(WholeBodies(app)({"type": scope_type}, receive, send))
    return app.received


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


LATER = {"type": "http.disconnect", "later": True}


def test_a_body_in_parts_arrives_as_one_message() -> None:
    received = receive_all([part(b"ab", True), part(b"", True), part(b"c", False), LATER])
    assert received == [{"type": "http.request", "body": b"abc"}, LATER]


def test_a_request_without_a_body_arrives_at_once() -> None:
    assert receive_all([{"type": "http.request"}, LATER]) == [{"type": "http.request", "body": b""}, LATER]


def test_a_client_that_goes_away_inside_its_body_has_gone_for_the_app_too() -> None:
    """Half a body must not look like a whole one."""
    assert receive_all([part(b"ab", True), {"type": "http.disconnect"}, LATER]) == [{"type": "http.disconnect"}, LATER]


def test_what_is_no_request_passes_unchanged() -> None:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    assert receive_all(messages, "lifespan") == messages
