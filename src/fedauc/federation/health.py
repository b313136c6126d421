"""Whether a server or a site is well, for the health checks of containers: exit code 0, or 1 with a line that says why.

    python -m fedauc.federation.health --server fed.example.org:9092 --certificate ca.pem
    python -m fedauc.federation.health --state /var/lib/fedauc

A site writes down until when it will be heard of again: soon while it waits for messages, and at a message's deadline
while it answers one. This module imports neither torch nor Flower, because it runs often.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import ssl
import sys
import time
from pathlib import Path

from fedauc.files import write_atomically

HEALTH_FILE = "health.json"
"""The file in a site's state folder."""

SILENCE_SECONDS = 60.0
"""How long a site that waits for messages may go without an answer from the SuperLink."""

WRITE_SECONDS = 5.0
"""A site that waits writes the file at most this often."""

CONNECT_SECONDS = 8.0


class Pulse:
    """Writes down until when a site will be heard of again, at most every few seconds."""

    def __init__(self, state: Path) -> None:
        self._path, self._written, self._until = state / HEALTH_FILE, float("-inf"), float("-inf")

    def wait(self) -> None:
        """The SuperLink has answered, and there was no message."""
        if time.time() - self._written >= WRITE_SECONDS:
            self._write("waits for messages", time.time() + SILENCE_SECONDS)

    def answer(self, seconds: float) -> None:
        """A message is being answered, which takes at most so many seconds."""
        until = time.time() + seconds + SILENCE_SECONDS
        if until - self._until >= WRITE_SECONDS:
            self._write("answers a message", until)

    def _write(self, activity: str, until: float) -> None:
        self._written, self._until = time.time(), until
        # Where the disk is full the file gets old, so that the check says that something is wrong; the site goes on.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps({"activity": activity, "until": until}).encode())


def find_site_problem(state: Path) -> str:
    """Why the site with that state folder is not well; empty if it is."""
    path = state / HEALTH_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        silence = time.time() - float(content["until"])
    except FileNotFoundError:
        return f"there is no {path}: the site has not reached the server yet"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read ({error}); the site writes it anew"
    if silence > 0:
        return f"the site should have been heard of {silence:.0f} s ago: can it reach the server?"
    return ""


def find_server_problem(server: str, certificate: Path) -> str:
    """Why a SuperLink is not well; empty if it answers with a certificate of that authority."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        return f"server is {server!r}; write HOST:PORT"
    try:
        trusted = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(host, int(port), timeout=CONNECT_SECONDS, context=trusted)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        return f"{server} cannot be reached: {error}"
    return "" if status == http.client.OK else f"{server} answers with the status {status}"


def main() -> None:
    """Check a site or a server, as the options say."""
    parser = argparse.ArgumentParser(description="Whether a site or a server of a federation is well.")
    parser.add_argument("--state", type=Path, help="a site's state folder")
    parser.add_argument("--server", metavar="HOST:PORT", help="a SuperLink")
    parser.add_argument("--certificate", type=Path, help="the certificate of the authority that signed the server's")
    options = parser.parse_args()
    if (options.state is None) == (options.server is None) or (options.server is None) != (options.certificate is None):
        parser.error("give either --state, or --server and --certificate")
    if options.state is not None:
        problem = find_site_problem(options.state)
    else:
        problem = find_server_problem(options.server, options.certificate)
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main()
