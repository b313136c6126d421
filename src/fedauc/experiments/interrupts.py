"""Ctrl-C and SIGTERM wait for the end of the round, so that a run can be saved before the process ends."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from fedauc.experiments.ranks import is_distributed, maximum_over_ranks

LOG = logging.getLogger("fedauc")


class DeferredInterrupts:
    """Inside the block the first signal is only noted; a second Ctrl-C interrupts at once.

    `torchrun` repeats a Ctrl-C to its processes by itself, so there every signal is only noted.
    """

    def __init__(self) -> None:
        self._received = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread set handlers. A signal that was ignored stays ignored.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if number == self._received == signal.SIGINT and not is_distributed():
            raise KeyboardInterrupt
        if not self._received:
            # Printing fails if the signal has come in the middle of a print.
            with suppress(RuntimeError):
                again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
                LOG.info("the round under way is finished and saved first%s", again)
        self._received = number

    def received_signal(self) -> int:
        """The number of a signal that any rank has received, or 0. Every rank calls this after every round."""
        return maximum_over_ranks(self._received)


def deliver_signal(number: int) -> None:
    """Do what a deferred signal would have done; where that is the end of the process, let `finally` blocks run."""
    if callable(signal.getsignal(number)):
        signal.raise_signal(number)
    raise SystemExit(128 + number)
