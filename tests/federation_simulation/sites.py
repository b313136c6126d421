"""A simulated site: the library's own site under its owner's control, on a machine that may be killed."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedauc.data.clients import Examples
from fedauc.federation.delivery import MODEL_FOLDER
from fedauc.federation.owner_policy import OpeningHours, OwnerPolicy
from fedauc.federation.serialization import Payload
from fedauc.federation.site import Site, answer_failure
from fedauc.federation.site_control import ControlledSite
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_report import SiteReport
from fedauc.federation.site_state import FolderSiteState
from fedauc.keys import numpy_generator
from federation_simulation.disk import DiskLayer, ProcessKilled
from federation_simulation.machines import Machine
from federation_simulation.scenario import FEATURES, Scenario
from federation_simulation.virtual_time import VirtualTime

START = datetime.datetime(2026, 3, 2, 21, 30, tzinfo=datetime.UTC)
"""The virtual moment 0; sites with opening hours are open until the next morning."""

HOURS = OpeningHours(("19:00-07:00",))

SKEW = datetime.timedelta(hours=12)
"""How far a skewed clock is off: far enough for the site to be closed."""


def draw_rows(seed: int, client: int, counts: tuple[int, int]) -> SiteData:
    """The rows of a site, positives and negatives mixed, with held-out rows."""
    generator = numpy_generator(seed, "rows", client)
    labels = np.repeat(np.array([1, 0], np.int8), counts)
    generator.shuffle(labels)
    test = np.array([1, 0, 1, 0], np.int8)
    inputs, test_inputs = (
        generator.normal(size=(len(part), FEATURES)) + 0.3 * client + part[:, None] for part in (labels, test)
    )
    examples = Examples(torch.from_numpy(test_inputs), torch.from_numpy(test.astype(np.float64)))
    return SiteData(torch.from_numpy(inputs), labels, examples)


class SimulatedSite(Machine):
    """A site by its number. `incarnations` counts processes, which have node ids of their own."""

    def __init__(
        self,
        client: int,
        scenario: Scenario,
        layer: DiskLayer,
        home: Path,
        time: VirtualTime,
        log: Callable[[str, str], None],
    ) -> None:
        name = scenario.names[client]
        super().__init__(name, layer, home, scenario.seed, time, log)
        self.key, self.state_folder = f"key-{client}", self.disk.folder / "state"
        self.data = draw_rows(scenario.seed, client, scenario.counts[client])
        self.down_since: float | None = None
        self.skew = datetime.timedelta(0)
        self.losses = 0
        # By round, the visit from which the last answer went on.
        self.last_accepted = dict[int, int]()
        self.sent_digests = list[str]()
        self.report_error: Callable[[str, str], None] = lambda message_id, text: None
        self._scenario, self._client, self._incarnation = scenario, client, 0
        self._begin()

    @property
    def node_id(self) -> int:
        """The id of the site's process in the message service."""
        return 1000 * (self._client + 1) + self._incarnation

    def receive(self, payload: Payload, message_id: str) -> Payload | None:
        """The answer to a message, unless the process is down or ends on the way."""
        if self.down_since is not None:
            return None
        outer, self._layer.process = self._layer.process, self.process
        try:
            self.take_step("receive a message")
            try:
                answer, is_opened = self._open_site().answer_message(payload), True
            except OSError as error:
                # As the adapters of the message services do where a site cannot be opened.
                answer, is_opened = answer_failure(error), False
            digest = hashlib.sha256(answer.header_text.encode() + answer.body.tobytes()).hexdigest()
            header, asked = answer.read_header(), payload.read_header()
            if header["kind"] == "visit":
                self.last_accepted[asked["phase"]["round"]] = asked["last_accepted_round"]
            detail = header.get("reason", header.get("what", ""))
            self._log(self.name, f"answers {message_id}: {header['kind']} {detail}".rstrip())
            # What cannot be logged is withheld, and the answer that says so is not in the log either.
            if is_opened and "cannot write its audit log" not in str(header.get("reason")):
                self.sent_digests.append(digest)
            self.take_step("send an answer")
        except ProcessKilled:
            self._end(message_id)
            return None
        finally:
            self._layer.process = outer
        return answer

    def lose_state(self, seconds: float) -> None:
        """Lose the disk, and come back after so many seconds."""
        self._log(self.name, "loses its disk")
        self.lose_disk()
        self.losses += 1
        self.sent_digests.clear()
        if self.down_since is None:
            self.down_since = self._time.now
            self._time.schedule(seconds, self._begin)

    def _end(self, message_id: str) -> None:
        fault = self.last_fault
        assert fault is not None
        self.recover()
        if fault.kind == "kill worker":
            # The site's own process goes on, and says what has happened.
            self.report_error(message_id, "the site's worker was ended by signal 9")
            return
        self.down_since = self._time.now
        self._time.schedule(fault.seconds, self._begin)

    def _begin(self) -> None:
        self.down_since, self.online_since = None, f"{self._time.now:09.3f}"
        self._incarnation += 1
        self._log(self.name, "comes online")

    def _open_site(self) -> ControlledSite:
        """A fresh object for every message, as in a process of its own."""
        folder = self.state_folder
        policy = OwnerPolicy(hours=HOURS if self._scenario.has_hours else OpeningHours())
        model_folder = folder / MODEL_FOLDER if self._scenario.delivers_models else None
        site = Site(
            lambda: self.data,
            lambda run: FolderSiteState(folder / run),
            policy.to_site_policy(),
            report=SiteReport(folder),
            model_folder=model_folder,
        )
        return ControlledSite(site, folder, policy, self._read_clock)

    def _read_clock(self) -> datetime.datetime:
        return START + datetime.timedelta(seconds=self._time.now) + self.skew
