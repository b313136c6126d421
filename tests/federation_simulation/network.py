"""A message service under virtual time, which loses, repeats, delays and reorders as the scenario says.

A message is delivered to a site's process, or lost where that has ended; messages of a server that has been killed stay
on their way. Replies stay for whoever asks for them, as in Flower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedauc.federation.exchange import Node, Reply
from fedauc.federation.serialization import Payload
from fedauc.keys import numpy_generator
from federation_simulation.scenario import MESSAGE_FAULTS, Fault
from federation_simulation.virtual_time import VirtualTime

if TYPE_CHECKING:
    from federation_simulation.sites import SimulatedSite

HEARTBEAT = 3.0
"""Virtual seconds after which the service notices that a site has gone, and says so."""


class SimulatedNetwork:
    """Between the server and the sites. `take_step` is called at every call of the server."""

    def __init__(
        self,
        seed: int,
        sites: Mapping[str, SimulatedSite],
        time: VirtualTime,
        take_step: Callable[[str], None],
        log: Callable[[str, str], None],
    ) -> None:
        self._seed, self._sites, self._time, self._take_step, self._log = seed, sites, time, take_step, log
        self._faults = dict[int, list[Fault]]()
        self._cut_off = dict[str, tuple[float, float]]()
        self._replies: dict[str, list[Reply]] = {}
        self._sent, self._counted_from = 0, 0

    def arm(self, faults: Sequence[Fault]) -> None:
        """Let faults happen to messages, which are counted from now on."""
        self._counted_from = self._sent
        for fault in faults:
            if fault.kind in MESSAGE_FAULTS:
                self._faults.setdefault(fault.number, []).append(fault)

    def disarm(self) -> None:
        """Let every message arrive from now on."""
        self._faults.clear()
        self._cut_off.clear()

    def cut_off(self, name: str, seconds: float) -> None:
        """Let nothing through from or to a site for so many seconds; what is on its way waits."""
        self._cut_off[name] = (self._time.now, self._time.now + seconds)

    # ------------------------------------------------------------------------------------------- for the server

    def online_nodes(self) -> list[Node]:
        """The sites whose last heartbeat is not long ago."""
        self._take_step("ask who is online")
        return [
            Node(site.node_id, name, site.key, site.online_since)
            for name, site in self._sites.items()
            if not self._is_silent(name, site)
        ]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        """Put a message on its way."""
        self._take_step("send a message")
        name = next((name for name, site in self._sites.items() if site.node_id == node_id), "")
        number, self._sent = self._sent - self._counted_from, self._sent + 1
        kinds = {fault.kind: fault for fault in self._faults.get(number, ())}
        message_id, kind = f"message-{number}-{self._sent}", payload.read_header()["kind"]
        self._log("network", f"message {number} ({kind}) to {name}" + "".join(f", {kind}" for kind in kinds))
        if "refuse to send" in kinds or not name:
            return ""
        draws = numpy_generator(self._seed, "network", self._sent).uniform(0.05, 1.2, size=2)
        to_site, to_server = float(draws[0]), float(draws[1])
        to_site += kinds["delay request"].seconds if "delay request" in kinds else 0.0
        to_server += kinds["delay reply"].seconds if "delay reply" in kinds else 0.0
        expiry, site = self._time.now + seconds, self._sites[name]

        def deliver(is_first: bool = True) -> None:
            wait = self._seconds_cut_off(name)
            if wait > 0:
                self._time.schedule(wait, lambda: deliver(is_first))
            elif is_first and (site.node_id != node_id or self._time.now > expiry):
                self._log("network", f"{message_id} expires")
            else:
                # A repeated message may arrive at any time, even at a process that was started later.
                answer = site.receive(payload, message_id)
                if answer is not None and "lose reply" not in kinds:
                    self._time.schedule(to_server, lambda: self._return(name, Reply(message_id, answer)))

        if "report error" in kinds:
            self._time.schedule(HEARTBEAT, lambda: self._return(name, Reply(message_id, None, "error 5: no answer")))
        elif "lose request" not in kinds:
            self._time.schedule(to_site, deliver)
        if "repeat request" in kinds:
            self._time.schedule(to_site + kinds["repeat request"].seconds, lambda: deliver(False))
        return message_id

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        """The replies that have arrived, as often as they have."""
        self._take_step("ask for replies")
        return [reply for message_id in message_ids for reply in self._replies.get(message_id, ())]

    # ------------------------------------------------------------------------------------------- for the sites

    def report_error(self, message_id: str, text: str) -> None:
        """Tell the server why there is no answer."""
        self._replies.setdefault(message_id, []).append(Reply(message_id, None, text))

    def _return(self, name: str, reply: Reply) -> None:
        wait = self._seconds_cut_off(name)
        if wait > 0:
            self._time.schedule(wait, lambda: self._return(name, reply))
            return
        self._log("network", f"the reply to {reply.message_id} arrives")
        self._replies.setdefault(reply.message_id, []).append(reply)

    def _seconds_cut_off(self, name: str) -> float:
        return max(0.0, self._cut_off.get(name, (0.0, 0.0))[1] - self._time.now)

    def _is_silent(self, name: str, site: SimulatedSite) -> bool:
        began, ends = self._cut_off.get(name, (0.0, 0.0))
        is_cut_off = began + HEARTBEAT < self._time.now < ends
        return is_cut_off or (site.down_since is not None and site.down_since + HEARTBEAT < self._time.now)
