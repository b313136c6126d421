"""Handlers for a site's resident worker in the tests: the small federation's real sites, in a process of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from fedauc.federation.serialization import Payload
from fedauc.federation.site_worker import Frame, FrameHandler
from federation.memory_grid import make_sites
from small_federations import small_federation


def serve_small_federation() -> FrameHandler:
    """Answers for every site of the small federation.

    A file `kill-before` or `kill-after` in the folder lets the worker kill itself before or after a visit's work.
    """
    sites: dict[str, dict[str, object]] = {}

    def answer(request: Frame) -> Frame:
        header, folder = request.header, Path(request.header["folder"])
        if str(folder) not in sites:
            sites[str(folder)] = dict(make_sites(small_federation(), folder))
        _die_if_asked(folder / "kill-before", header["text"])
        payload = Payload(header["text"], np.frombuffer(bytes(request.blobs[0]), np.uint8))
        reply = sites[str(folder)][header["site"]].answer_message(payload)  # type: ignore[attr-defined]
        _die_if_asked(folder / "kill-after", header["text"])
        return Frame({"text": reply.header_text}, (reply.body.tobytes(),))

    return answer


def serve_simple_requests() -> FrameHandler:
    """Answers without torch: the worker's process, a failure with a row in it, or silence."""

    def answer(request: Frame) -> Frame:
        if request.header["kind"] == "fail":
            raise ValueError("the row 17, 3.5 is bad")
        if request.header["kind"] == "sleep":
            time.sleep(60)
        return Frame({"pid": os.getpid()}, request.blobs)

    return answer


def _die_if_asked(path: Path, text: str) -> None:
    if '"kind": "visit"' in text and path.exists():
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
