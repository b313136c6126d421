"""A site's resident worker: a process that has imported torch and the app, and answers one request after another.

The process that talks to the server starts the worker, sends it requests over a pair of connected sockets that no other
process can open, and notices at once when it dies. The worker holds a lock on the site's state folder, so that a worker
whose parent was killed and the worker of the next parent never write there together.

A frame is a JSON header and any number of blobs of bytes. This module imports neither torch nor Flower.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.federation.large_messages import prepare_for_large_messages
from fedauc.files import make_folder
from fedauc.locks import hold_lock

LOG = logging.getLogger("fedauc.site")

LOCK_NAME = "worker.lock"
"""The lock file in a site's state folder."""

LOCK_SECONDS = 20.0
"""How long a new worker waits for one whose parent was killed: that one ends within `PARENT_CHECK_SECONDS`."""

PARENT_CHECK_SECONDS = 0.5

STOP_SECONDS = 5.0
"""Time between asking a worker to stop and killing it."""

MAX_HEADER_BYTES = 1 << 24

FRAME_PREFIX = struct.Struct(">Q")
"""The length of a frame's header, in bytes."""


class Frame(NamedTuple):
    """A request or an answer: JSON values, and bytes that are not copied into them."""

    header: Mapping[str, Any]
    blobs: tuple[bytes | bytearray | memoryview, ...] = ()


FrameHandler = Callable[[Frame], Frame]


class WorkerFailure(Exception):
    """The worker gave no answer. The text says why, and contains no data: it goes to the server."""


class RequestExpired(Exception):
    """The worker was still busy when nobody needed the answer any more, so it was stopped."""


# ------------------------------------------------------------------------------------------------------- the frames


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Write a frame."""
    header = json.dumps({**frame.header, "sizes": [memoryview(blob).nbytes for blob in frame.blobs]}).encode()
    connection.sendall(FRAME_PREFIX.pack(len(header)) + header)
    for blob in frame.blobs:
        connection.sendall(blob)


def receive_frame(connection: socket.socket, seconds: float | None = None) -> Frame | None:
    """Read a frame; None where the connection has ended. After so many seconds a TimeoutError is raised."""
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        (length,) = FRAME_PREFIX.unpack(_receive_bytes(connection, FRAME_PREFIX.size, deadline))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a frame's header has {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
        header = json.loads(_receive_bytes(connection, length, deadline))
        blobs = tuple(_receive_bytes(connection, size, deadline) for size in header.pop("sizes"))
    except (EOFError, ConnectionError):
        return None
    return Frame(header, blobs)


def _receive_bytes(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection ended inside a frame")
        view = view[count:]
    return content


# ------------------------------------------------------------------------------------------- the parent's side


class SiteWorker:
    """The worker as its parent sees it. `factory` is `module:function`; the function makes the worker's handler."""

    def __init__(self, factory: str, state: Path) -> None:
        self._factory, self._state = factory, state
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The worker's process, if it lives."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process, in place of one that has died; it imports what it needs while nobody waits for it."""
        self.stop()
        make_folder(self._state, 0o700)
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = ("--socket", str(theirs.fileno()), "--factory", self._factory, "--state", str(self._state))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedauc.federation.site_worker", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = ours

    def ask(self, request: Frame, seconds: float | None = None) -> Frame:
        """The worker's answer. A worker that dies or does not answer in time is gone afterwards."""
        if self.pid is None or self._connection is None:
            raise WorkerFailure(f"the site's worker {self._describe_end()}")
        try:
            self._connection.settimeout(seconds)
            send_frame(self._connection, request)
            answer = receive_frame(self._connection, seconds)
        except TimeoutError:
            self.stop(signal.SIGKILL)
            raise RequestExpired(f"the worker was stopped after {seconds:.0f} s, when its answer had expired") from None
        except ConnectionError:
            answer = None
        if answer is None:
            raise WorkerFailure(f"the site's worker {self._describe_end()} while it answered")
        if "error" in answer.header:
            raise WorkerFailure(str(answer.header["error"]))
        return answer

    def stop(self, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the worker, if it lives."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.send_signal(signal_number)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._connection = None

    def _describe_end(self) -> str:
        """How the process ended, in words."""
        if self._process is None:
            return "is not running"
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop(signal.SIGKILL)
            return "closed its connection"
        if code < 0:
            return f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}; see the site's log"


# ------------------------------------------------------------------------------------------- the worker's side


def serve_frames(connection: socket.socket, answer_frame: FrameHandler) -> None:
    """Answer requests until the parent closes the connection. A request that fails gets an answer, too."""
    while (request := receive_frame(connection)) is not None:
        try:
            answer = answer_frame(request)
        except Exception as error:
            LOG.error("the worker could not answer", exc_info=error)
            # Its type alone, because an error message may quote rows.
            answer = Frame({"error": f"the site's worker failed with {type(error).__name__}; see the site's log"})
        del request
        try:
            send_frame(connection, answer)
        except ConnectionError:
            return


def log_to_stderr() -> None:
    """Write our log to standard error, where whoever started the process collects it."""
    logger = logging.getLogger("fedauc")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s fedauc: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, even in the middle of a visit: a visit can be repeated."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve the parent's requests on an inherited socket."""
    parser = argparse.ArgumentParser(description="A site's resident worker; the site's own process starts it.")
    parser.add_argument("--socket", type=int, required=True, help="the inherited socket")
    parser.add_argument("--factory", required=True, help="module:function that makes the handler of requests")
    parser.add_argument("--state", type=Path, required=True, help="the site's state folder")
    options = parser.parse_args()
    log_to_stderr()
    prepare_for_large_messages()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # An interrupt from the keyboard reaches the whole process group; the parent decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    busy = f"process {{pid}} uses the state folder {options.state}; give every site a folder of its own"
    module, _, function = options.factory.partition(":")
    with socket.socket(fileno=options.socket) as connection, hold_lock(options.state / LOCK_NAME, busy, LOCK_SECONDS):
        serve_frames(connection, getattr(importlib.import_module(module), function)())


if __name__ == "__main__":
    main()
