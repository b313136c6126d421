"""What a run is doing just now, in a small file that is replaced as answers arrive, and how long its rounds took.

Nothing is computed from these files: `fedauc board` and `fedauc federation show` read them. `status.json` is deleted
when the run is done; `round_times.jsonl` has a line per round.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedauc.experiments.folder import RunFolder
from fedauc.federation.exchange import LOG, ExchangeView
from fedauc.files import write_atomically

STATUS_FILE = "status.json"
ROUND_TIMES_FILE = "round_times.jsonl"

WRITE_INTERVAL = 0.5
"""Seconds between two writes while answers arrive; the beginning and the end of an exchange are always written."""

UNCHANGED_INTERVAL = 10.0
"""Seconds after which the file is written again although nothing has changed: a reader sees that the server lives."""


class StatusWriter:
    """Observes a run's exchanges. A file that cannot be written is reported once and does not stop the run."""

    def __init__(
        self,
        folder: RunFolder,
        names: Sequence[str],
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._names = folder, list(names)
        self._monotonic, self._now = monotonic, now
        self._written_at = float("-inf")
        self._written: tuple[Any, ...] = ()
        self._round, self._round_began = -1, 0.0
        self._answered_after: dict[str, float] = {}
        self._has_failed = False

    def observe(self, view: ExchangeView) -> None:
        """Write what an exchange is waiting for, unless that was written a moment ago."""
        if view.kind == "visit" and view.round is not None and view.round != self._round:
            self._round, self._round_began = view.round, self._monotonic() - view.elapsed
        if view.kind == "visit":
            self._answered_after = {self._names[client]: round(at, 3) for client, at in view.answered.items()}
        seen = (
            view.kind,
            view.round,
            view.online,
            *map(tuple, (view.answered, view.waiting, view.absent, view.refused)),
        )
        since = self._monotonic() - self._written_at
        is_new = seen[:2] != self._written[:2] or view.is_over
        if is_new or since >= UNCHANGED_INTERVAL or (seen != self._written and since >= WRITE_INTERVAL):
            self._written, self._written_at = seen, self._monotonic()
            self._write(self._describe(view))

    def write_round(self, number: int) -> None:
        """Add the line of a round that is over: when it ended, its seconds, and how long each site took."""
        seconds = self._monotonic() - self._round_began if number == self._round else 0.0
        answered = self._answered_after if number == self._round else {}
        line = {"round": number, "ended": _format_time(self._now()), "seconds": round(seconds, 3)}
        try:
            self._folder.append_line(ROUND_TIMES_FILE, {**line, "answered_after": answered})
        except OSError as error:
            self._report(error)

    def delete(self) -> None:
        """Remove the status of a run that is done."""
        (self._folder.path / STATUS_FILE).unlink(missing_ok=True)

    def _describe(self, view: ExchangeView) -> dict[str, Any]:
        names = self._names
        return {
            "kind": view.kind,
            "round": view.round,
            "began": self._now() - view.elapsed,
            "written": self._now(),
            "deadline": view.seconds,
            "is_over": view.is_over,
            "online": [names[client] for client in sorted(view.online)],
            "answered": {names[client]: round(seconds, 3) for client, seconds in view.answered.items()},
            "waiting": {names[client]: reason for client, reason in view.waiting.items()},
            "absent": {names[client]: reason for client, reason in view.absent.items()},
            "refused": {names[client]: reason for client, reason in view.refused.items()},
        }

    def _write(self, status: dict[str, Any]) -> None:
        try:
            write_atomically(self._folder.path / STATUS_FILE, json.dumps(status).encode(), is_durable=False)
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            LOG.warning("the status of the run cannot be written, so that the board is out of date: %s", error)


def read_status(path: Path) -> dict[str, Any]:
    """What the server of a run's folder has last written; empty for a run that is done or has asked nobody yet."""
    file = path / STATUS_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    # It is empty where the machine has crashed.
    status: dict[str, Any] = json.loads(text) if text.strip("\0 \n") else {}
    return status


def _format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
