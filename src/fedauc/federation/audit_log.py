"""A site's audit log: one line for every message that leaves the site, chained by hashes and written before it leaves.

A line is a JSON object. Its `hash` is the SHA-256 of the line without it, and its `previous` the hash of the line
before, so that a line cannot be changed, removed or moved without breaking the chain after it. `audit-head.json` holds
the number and the hash of the last line, so that a shortened log is noticed. Somebody who can write both files could
write another log with a head that fits. The operator therefore notes the head elsewhere now and then, and gives it to
`verify_log`.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.files import append_durably, make_folder, write_atomically
from fedauc.locks import hold_lock

LOG_FILE, HEAD_FILE, LOCK_FILE = "audit.jsonl", "audit-head.json", ".audit.lock"

FIRST = "0" * 64
"""What the first line has for the hash of the line before it."""

LOCK_SECONDS = 30.0


class LogHead(NamedTuple):
    """The number of lines, the hash of the last one, and the bytes of the log."""

    entries: int = 0
    hash: str = FIRST
    size: int = 0


class LogReport(NamedTuple):
    """A verified log: its head as far as it is intact, and what is wrong with it, or an empty text."""

    head: LogHead
    problem: str = ""


def read_time() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class AuditLog:
    """Appends to the log of a folder; several processes may do so."""

    def __init__(self, folder: Path, clock: Callable[[], str] = read_time) -> None:
        make_folder(folder, 0o700)
        self._folder, self._clock = folder, clock

    def append(self, entry: Mapping[str, Any]) -> LogHead:
        """Add a line; when this returns, it is on the disk."""
        busy = f"{self._folder / LOG_FILE} is being written by process {{pid}}; wait until it ends"
        with hold_lock(self._folder / LOCK_FILE, busy, LOCK_SECONDS):
            head = self._recover_head()
            head = self._write_line(head, entry)
            self._write_head(head)
            return head

    def _recover_head(self) -> LogHead:
        """The head; after a crash, that of the complete lines. An incomplete line is kept in a file of its own."""
        path, head = self._folder / LOG_FILE, read_head(self._folder)
        size = path.stat().st_size if path.is_file() else 0
        if size == head.size:
            return head
        report = verify_log(self._folder, is_complete=False)
        # A line is on the disk before its head, so that a crash leaves no log that is shorter than its head says.
        if problem := report.problem or _compare_with_head(report.head, head):
            raise ValueError(f"{path} is damaged ({problem}); keep it, and start with another state folder")
        if report.head.size == size:
            return report.head
        with path.open("r+b") as file:
            file.seek(report.head.size)
            torn = file.read()
            digest = hashlib.sha256(torn).hexdigest()
            write_atomically(self._folder / f"audit-torn-{digest[:16]}.txt", torn, is_private=True)
            file.truncate(report.head.size)
        lost = {"event": "recovered", "rule": "a line that a crash left incomplete was set aside", "sha256": digest}
        head = self._write_line(report.head, lost)
        self._write_head(head)
        return head

    def _write_head(self, head: LogHead) -> None:
        write_atomically(self._folder / HEAD_FILE, json.dumps(head._asdict()).encode(), is_private=True)

    def _write_line(self, head: LogHead, entry: Mapping[str, Any]) -> LogHead:
        content = {"number": head.entries + 1, "time": self._clock(), **entry, "previous": head.hash}
        digest = _hash_entry(content)
        line = json.dumps({**content, "hash": digest}, sort_keys=True).encode() + b"\n"
        path = self._folder / LOG_FILE
        with append_durably(path, is_private=True) as file:
            file.write(line)
        return LogHead(head.entries + 1, digest, head.size + len(line))


def read_head(folder: Path) -> LogHead:
    """The head that was written last."""
    path = folder / HEAD_FILE
    if not path.is_file():
        return LogHead()
    try:
        return LogHead(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is damaged; delete it, and verify the log with a head noted elsewhere") from None


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """All lines of a log, unverified."""
    path = folder / LOG_FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def verify_log(folder: Path, known_head: str = "", is_complete: bool = True) -> LogReport:
    """Check every line, and that the log reaches its head; `known_head` is the hash of a line, noted elsewhere.

    The head of an empty log is part of every log. With `is_complete` false the log is not compared with its own head,
    and may end in half a line, as after a crash.
    """
    known_head = "" if known_head == FIRST else known_head
    path, head = folder / LOG_FILE, LogHead()
    if not path.is_file():
        stored = read_head(folder)
        problem = f"the log is missing, but its head counts {stored.entries} lines" if stored.entries else ""
        return LogReport(head, problem or ("the log has no line with the noted hash" if known_head else ""))
    knows_head = not known_head
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                problem = f"line {head.entries + 1} is incomplete" if is_complete else ""
                return LogReport(head, problem)
            if problem := _check_line(line, head):
                return LogReport(head, problem)
            head = LogHead(head.entries + 1, json.loads(line)["hash"], head.size + len(line))
            knows_head = knows_head or head.hash == known_head
    if not knows_head:
        return LogReport(head, "no line has the noted hash, so that lines were removed or the log was rewritten")
    if not is_complete:
        return LogReport(head)
    stored = read_head(folder)
    if problem := _compare_with_head(head, stored):
        return LogReport(head, problem)
    # A crash between a line and its head leaves the head one line behind.
    if stored.entries < head.entries - 1:
        return LogReport(head, f"the log has {head.entries} lines, but its head counts {stored.entries}")
    return LogReport(head)


def _compare_with_head(head: LogHead, stored: LogHead) -> str:
    """Whether a log that ends with `head` is shorter than the stored head says, or another log; empty if it is not."""
    if stored.entries > head.entries:
        return f"the log ends after line {head.entries}, but its head counts {stored.entries}"
    if stored.entries == head.entries and stored.hash != head.hash:
        return "its last line is not the one that its head names, so that the log was rewritten"
    return ""


def _check_line(line: bytes, head: LogHead) -> str:
    """What is wrong with the line after a head; empty if nothing is."""
    number = head.entries + 1
    try:
        entry = json.loads(line)
        digest = entry.pop("hash")
    except (ValueError, KeyError, AttributeError, RecursionError):
        return f"line {number} is not an entry of the log"
    if _hash_entry(entry) != digest:
        return f"line {number} was changed"
    if entry.get("number") != number or entry.get("previous") != head.hash:
        return f"line {number} does not follow the line before it: lines were removed, added or moved"
    return ""


def _hash_entry(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
