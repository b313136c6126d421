"""One seed: a federation under its faults, from the registration of the sites to the end of the run."""

from __future__ import annotations

import datetime
import errno
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from fedauc.experiments import run_loop
from fedauc.experiments.folder import RunFolder
from fedauc.federation.exchange import Clock, Exchange
from fedauc.federation.server import FederatedRun, read_failure, summarize_run, write_failure
from fedauc.guards import TrainingStopped
from fedauc.keys import numpy_generator
from federation_simulation.disk import DiskLayer, ProcessKilled
from federation_simulation.machines import Machine
from federation_simulation.network import SimulatedNetwork
from federation_simulation.scenario import CALM, MOMENT_FAULTS, SERVER, Fault, Scenario
from federation_simulation.sites import SKEW, SimulatedSite
from federation_simulation.virtual_time import VirtualTime

MOST_STARTS = 60
"""More starts of the server than this mean that the run does not end."""

STARTS_IN_CALM = 6
"""Starts of the server that a run may need once nothing goes wrong any more."""

OPERATOR_PAUSE = 15.0
"""Virtual seconds until the operator starts a run again that has stopped."""


class SimulationFailure(AssertionError):
    """The federation has done what it must not do; the text says what."""


class Simulation(logging.Handler):
    """A federation in one process. It receives the library's log, to write it among the events."""

    def __init__(self, scenario: Scenario, layer: DiskLayer, home: Path) -> None:
        super().__init__(logging.INFO)
        self.scenario, self.layer, self.time = scenario, layer, VirtualTime()
        self.events = list[tuple[float, str, str]]()
        self.problems = list[str]()
        layer.reset()
        self.server = Machine(SERVER, layer, home, scenario.seed, self.time, self.log_event)
        sites = [
            SimulatedSite(client, scenario, layer, home, self.time, self.log_event)
            for client in range(len(scenario.names))
        ]
        self.sites = {site.name: site for site in sites}
        self.network = SimulatedNetwork(scenario.seed, self.sites, self.time, self.server.take_step, self.log_event)
        for site in sites:
            site.report_error = self.network.report_error
        self.out = self.server.disk.folder / "run"
        self._is_armed, self._is_calm, self._is_undisturbed = False, False, False

    def log_event(self, machine: str, text: str) -> None:
        """Add an event to the log."""
        self.events.append((self.time.now, machine, text))

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the library's log; an unexpected error at a site is a failure."""
        machine = next((m.name for m in self.sites.values() if m.process == self.layer.process), SERVER)
        self.log_event(machine, f"{record.levelname}: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.log_event(machine, f"{type(error).__name__}: {error}")
            if not (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                self.problems.append(f"{machine} met {type(error).__name__}: {error}")

    def run(self) -> None:
        """Train to the end, as an operator would who starts the server again whenever it has ended."""
        if self.scenario.faults_from_start:
            self._arm()
        starts_in_calm = 0
        for _ in range(MOST_STARTS):
            starts_in_calm += self._is_calm
            if starts_in_calm > STARTS_IN_CALM:
                raise SimulationFailure(f"{STARTS_IN_CALM} starts without faults were not enough")
            if self._serve():
                break
        else:
            raise SimulationFailure(f"{MOST_STARTS} starts were not enough")
        self.time.wait(max(0.0, CALM + 60.0 - self.time.now))
        # Sites that were offline receive the model when the finished run is resumed.
        if self.scenario.delivers_models and not self._serve():
            raise SimulationFailure("the finished run did not end when it was resumed")

    def _serve(self) -> bool:
        """Start the server; says whether the run is done. What the operator is told must be right."""
        self.layer.process = self.server.process
        # A site that was killed before may come back later.
        self._is_undisturbed = self._is_calm and all(site.down_since is None for site in self.sites.values())
        self.log_event(SERVER, "starts")
        try:
            self._create_or_resume()
        except ProcessKilled:
            fault = self.server.last_fault
            assert fault is not None
            self.server.recover()
            self.time.wait(fault.seconds)
            return False
        except (TrainingStopped, ValueError, OSError) as error:
            self.log_event(SERVER, f"ends with {type(error).__name__}: {error}")
            self._check_end(error)
            self.server.start_process()
            self.time.wait(OPERATOR_PAUSE)
            return False
        self.server.start_process()
        if summarize_run(self.out)["status"] != "done":
            raise SimulationFailure(f"the server has ended well, but the run is {summarize_run(self.out)['status']!r}")
        return True

    def _create_or_resume(self) -> None:
        """What the server's app does."""
        scenario = self.scenario
        clock = Clock(lambda: self.time.now, self._sleep)
        exchange = Exchange(self.network, scenario.agreement.sites, scenario.agreement.policy, clock)
        if not self.out.exists():
            try:
                FederatedRun.create(scenario.agreement, exchange, self.out)
            except (ValueError, TrainingStopped) as error:
                write_failure(self.out, error)
                raise
        if not self._is_armed:
            self._arm()
        folder = RunFolder(self.out)
        with folder.lock(1.0):
            FederatedRun.resume(exchange, folder).train_to_end()

    def _sleep(self, seconds: float) -> None:
        self.server.take_step("wait")
        outer = self.layer.process
        self.time.wait(seconds)
        self.layer.process = outer

    def _check_end(self, error: Exception) -> None:
        """Whether the server may end in this way, and has written down why."""
        if isinstance(error, OSError):
            if error.errno != errno.ENOSPC or not self._had_full_disk():
                raise SimulationFailure(f"the server met {type(error).__name__}: {error}") from error
            return
        text = str(error)
        if not self.out.exists():
            # Some sites were away when they should have registered: all of a group, or all with a class.
            known = ("has no client with data", "both are needed", "no site has answered", "to 'continue'")
            if self._is_calm or not any(part in text for part in known):
                raise SimulationFailure(f"the run did not begin: {text}") from error
            if read_failure(self.out) != text:
                raise SimulationFailure(f"the reason is written down as {read_failure(self.out)!r}, but it is {text!r}")
            return
        status = summarize_run(self.out)["status"]
        if not isinstance(error, TrainingStopped) or "rounds in a row" not in text or self._is_undisturbed:
            raise SimulationFailure(f"the run ended with {type(error).__name__}: {text}") from error
        if status != text:
            raise SimulationFailure(f"the run's status is {status!r}, but it was stopped: {text}")

    def _had_full_disk(self) -> bool:
        return any(fault.kind == "fill disk" and fault.machine == SERVER for fault in self.scenario.faults)

    def _arm(self) -> None:
        self._is_armed = True
        self.log_event("", "faults may happen from now on")
        faults = self.scenario.faults
        for machine in (self.server, *self.sites.values()):
            machine.arm(faults)
        self.network.arm(faults)
        for fault in faults:
            if fault.kind in MOMENT_FAULTS:
                self.time.schedule(fault.moment, lambda fault=fault: self._begin_fault(fault))  # type: ignore[misc]
        self.time.schedule(CALM, self._calm_down)

    def _begin_fault(self, fault: Fault) -> None:
        self.log_event(fault.machine, fault.describe())
        site = self.sites[fault.machine]
        if fault.kind == "lose state":
            site.lose_state(fault.seconds)
        elif fault.kind == "partition":
            self.network.cut_off(fault.machine, fault.seconds)
        else:
            site.skew = SKEW
            self.time.schedule(fault.seconds, lambda: setattr(site, "skew", datetime.timedelta(0)))

    def _calm_down(self) -> None:
        self.log_event("", "nothing goes wrong any more")
        self._is_calm = True
        self.network.disarm()
        for machine in (self.server, *self.sites.values()):
            machine.disarm()


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Let secrets come from the seed, and training take no time, so that a seed repeats everything."""
    generator = numpy_generator(seed, "secrets")
    clock, run_loop.time = run_loop.time, SimpleNamespace(perf_counter=lambda: 0.0)  # type: ignore[assignment, attr-defined]
    originals = secrets.token_bytes, secrets.token_hex, secrets.randbits
    secrets.token_bytes = lambda nbytes=None: generator.bytes(nbytes or 32)
    secrets.token_hex = lambda nbytes=None: generator.bytes(nbytes or 32).hex()
    secrets.randbits = lambda k: int.from_bytes(generator.bytes(k // 8), "big")
    try:
        yield
    finally:
        secrets.token_bytes, secrets.token_hex, secrets.randbits = originals
        run_loop.time = clock  # type: ignore[attr-defined]
