"""Time that passes only when somebody waits for it: actions are called in the order of their moments."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualTime:
    """A clock with a list of actions to come; nothing sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Call an action so many seconds from now; actions of one moment are called in the order of this call."""
        self._scheduled += 1
        heapq.heappush(self._actions, (self.now + seconds, self._scheduled, action))

    def wait(self, seconds: float) -> None:
        """Let time pass, and call what is due meanwhile."""
        end = self.now + seconds
        while self._actions and self._actions[0][0] <= end:
            moment, _, action = heapq.heappop(self._actions)
            self.now = max(self.now, moment)
            action()
        self.now = end
