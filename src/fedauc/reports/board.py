"""The report page on this machine's own address, updating itself while runs go on.

The server listens on 127.0.0.1 only. It answers two paths: the page, and its numbers as JSON, which the page asks for
again and again. A request that names another host is refused, so that no foreign web page can read the numbers through
a name that points here.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from fedauc.federation.delivery import DELIVERY_FILE
from fedauc.federation.round_status import ROUND_TIMES_FILE, STATUS_FILE
from fedauc.reports.page import build_document, render_page
from fedauc.reports.report_runs import read_report_runs

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 8765

CHANGING_FILES = (
    *("records.jsonl", "timing.jsonl", "attendance.jsonl", "result.json", "stopped.txt", "comparison.json"),
    *(STATUS_FILE, ROUND_TIMES_FILE, DELIVERY_FILE),
)
"""Files by which a change in a folder is noticed."""


class ReportBoard:
    """The page and the numbers of folders; the numbers are built again only when a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        self._lock = threading.Lock()
        self._built: tuple[str, bytes] = ("", b"")

    def render_page(self) -> bytes:
        """The page with the newest numbers."""
        return render_page(read_report_runs(self._folders), live=True).encode()

    def read_version(self) -> str:
        """A hash that changes with the folders."""
        digest = hashlib.blake2b(digest_size=12)
        for folder in self._folders:
            for name in CHANGING_FILES:
                for path in sorted(folder.rglob(name)):
                    # A file may be deleted between the search and this line.
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        digest.update(f"{path} {status.st_mtime_ns} {status.st_size}\n".encode())
        return f'"{digest.hexdigest()}"'

    def build_numbers(self) -> tuple[str, bytes]:
        """The version and the JSON of the newest numbers."""
        with self._lock:
            version = self.read_version()
            if self._built[0] != version:
                runs = read_report_runs(self._folders)
                document = build_document(runs) | {"finished": all(run.status != "unfinished" for run in runs)}
                self._built = version, json.dumps(document, allow_nan=False).encode()
            return self._built


def make_server(folders: Sequence[Path], port: int = DEFAULT_PORT) -> ThreadingHTTPServer:
    """A server of these folders that is bound to a port; port 0 takes a free one."""
    board = ReportBoard(folders)
    # What keeps the page from being made, such as a missing package, must not wait for the first request.
    board.render_page()

    class Handler(BoardHandler):
        source = board

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise ValueError(f"port is {port}, which cannot be used ({error.strerror}); choose another --port") from error


class BoardHandler(BaseHTTPRequestHandler):
    """Answers `/` and `/data.json`."""

    source: ClassVar[ReportBoard]

    def do_GET(self) -> None:
        """Answer a request."""
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in (ADDRESS, "localhost"):
            self._send(HTTPStatus.FORBIDDEN, b"only this machine is served", "text/plain")
        elif self.path == "/":
            self._send(HTTPStatus.OK, self.source.render_page(), "text/html; charset=utf-8")
        elif self.path == "/data.json":
            version, content = self.source.build_numbers()
            if self.headers.get("If-None-Match") == version:
                self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", version)
            else:
                self._send(HTTPStatus.OK, content, "application/json", version)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is nothing here", "text/plain")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a page that asks every second would fill the terminal."""

    def _send(self, status: HTTPStatus, content: bytes, kind: str, version: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(content)
