"""The machines of a simulation: each has a disk, and a process that may be killed at any of its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedauc import files
from fedauc.keys import numpy_generator
from federation_simulation.disk import Disk, DiskLayer, ProcessKilled
from federation_simulation.scenario import STEP_FAULTS, Fault
from federation_simulation.virtual_time import VirtualTime


class Machine:
    """A disk and a process. Faults are armed when the simulation says so, and count operations from then on."""

    def __init__(
        self, name: str, layer: DiskLayer, home: Path, seed: int, time: VirtualTime, log: Callable[[str, str], None]
    ) -> None:
        self.name, self._layer, self._time, self._log = name, layer, time, log
        self.disk = Disk(home / name, self.take_step, numpy_generator(seed, "disk", name))
        layer.disks[name] = self.disk
        self.process, self.is_dead, self.is_armed = 0, False, False
        self.operations = 0
        self.last_fault: Fault | None = None
        self._faults: list[Fault] = []
        self.start_process()

    def arm(self, faults: Sequence[Fault]) -> None:
        """Let the faults of this machine happen at their operations, which are counted from now on."""
        self._faults = [fault for fault in faults if fault.machine == self.name and fault.kind in STEP_FAULTS]
        self.is_armed, self.operations = True, 0

    def disarm(self) -> None:
        """Let nothing more happen to this machine."""
        self._faults = []
        self._set_full(False)

    def start_process(self) -> None:
        """Begin a new process, which remembers nothing of the one before."""
        self._layer.living.discard(self.process)
        self._layer.next_process += 1
        self.process, self.is_dead = self._layer.next_process, False
        self._layer.living.add(self.process)
        files._remove_stale_parts.cache_clear()

    def take_step(self, operation: str) -> None:
        """An operation of the process is about to happen: perhaps it does not."""
        if self.is_dead:
            raise ProcessKilled(self.name)
        if not self.is_armed:
            return
        self.operations += 1
        for fault in self._faults:
            if fault.number == self.operations:
                self._log(self.name, f"{fault.describe()}, before: {operation}")
                if fault.kind == "fill disk":
                    self._set_full(True)
                    self._time.schedule(fault.seconds, lambda: self._set_full(False))
                else:
                    self.kill(fault)
                    raise ProcessKilled(self.name)

    def kill(self, fault: Fault) -> None:
        """End the process at this instant."""
        self.last_fault, self.is_dead = fault, True
        self.disk.crash(fault.kind == "lose power")
        self._layer.living.discard(self.process)

    def recover(self) -> None:
        """Leave on the disk what the crash has left, and begin a new process."""
        assert self.last_fault is not None
        with self._layer.bypassed():
            self.disk.recover(self.last_fault.kind == "lose power")
        self.start_process()

    def lose_disk(self) -> None:
        """Lose all files and begin a new process."""
        with self._layer.bypassed():
            self.disk.wipe()
        self.start_process()

    def _set_full(self, is_full: bool) -> None:
        if self.disk.is_full != is_full:
            self._log(self.name, "the disk is full" if is_full else "the disk has room again")
        self.disk.is_full = is_full
