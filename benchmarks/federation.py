"""What a federated round costs: seconds, CPU seconds, memory and bytes, for four sites on this machine.

The sites keep resident workers, or are Flower's own SuperNodes, which start a process per message; the SuperLink has
its database on disk or in memory. All of that is measured in one run.

Run it in the environment of `make test-federation`: `.venv-flower/bin/python benchmarks/federation.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fedauc.experiments.folder import RunFolder
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation, write_demo_sites
from fedauc.federation.server import ATTENDANCE_FILE

HIDDEN_LAYERS = {"1e4": "322", "1e6": "985,985", "1.1e7": "3300,3300"}
"""Layers of perceptrons on 29 features, by their approximate number of parameters."""

SITES = {f"site-{number}": "all" for number in range(4)}

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

ROLES = {"site_worker": "workers", "site_node": "sites", "flower-superlink": "superlink", "supernode": "sites"}
"""What a process is, by a word of its command line; the others belong to the server's app."""


class CpuMeter:
    """CPU seconds of all processes of a federation, from frequent readings of /proc."""

    def __init__(self, federation: LocalFederation) -> None:
        self._federation, self._stopped = federation, threading.Event()
        self._seconds, self._roles = dict[int, float](), dict[int, str]()
        self._thread = threading.Thread(target=self._read_processes, daemon=True)
        self._thread.start()

    def seconds_by_role(self) -> dict[str, float]:
        """CPU seconds so far of the SuperLink, the sites' own processes, their workers, and the server's app."""
        totals = dict.fromkeys(("superlink", "sites", "workers", "server"), 0.0)
        for pid, seconds in list(self._seconds.items()):
            totals[self._roles[pid]] += seconds
        return totals

    def stop_reading(self) -> None:
        """End the thread that reads."""
        self._stopped.set()
        self._thread.join()

    def _read_processes(self) -> None:
        while not self._stopped.wait(0.1):
            for pid in self._federation.process_ids():
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    # A process gets its command line only after it was started.
                    command = Path(f"/proc/{pid}/cmdline").read_text()
                except OSError:
                    continue
                self._roles[pid] = next((role for word, role in ROLES.items() if word in command), "server")
                self._seconds[pid] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def read_site_memory(federation: LocalFederation) -> float:
    """Megabytes of all sites' processes; memory that processes share is divided among them."""
    kilobytes = 0
    for name in SITES:
        for pid in federation.process_ids(name):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1e3


def measure_rounds(
    parameters: str, rounds: int, home: Path, resident: bool = True, in_memory: bool = False
) -> dict[str, Any]:
    """The mean over the rounds after the first of a run with full participation."""
    folder = home / f"app-{parameters}-{resident}-{in_memory}"
    create_app_folder(folder, SITES)
    write_demo_sites(folder / "sites", list(SITES))
    with LocalFederation(folder, resident) as federation:
        meter = CpuMeter(federation)
        federation.start_superlink(in_memory)
        for name in SITES:
            federation.register_site(name)
            federation.start_site(name)
        options = f"model.hidden={HIDDEN_LAYERS[parameters]} local-steps=4 participation=full weighting=clients"
        federation.start_run(f'method="fedavg" model="mlp" cycles={rounds} evaluation="none" options="{options}"')
        run, readings, largest = RunFolder(folder / "run"), list[tuple[float, dict[str, float]]](), 0.0
        while federation.is_running("run"):
            if len(run.read_lines(ATTENDANCE_FILE)) > len(readings):
                readings.append((time.perf_counter(), meter.seconds_by_role()))
            time.sleep(0.2)
            largest = max(largest, read_site_memory(federation))
        meter.stop_reading()
    final = run.read_result()["final"]
    (first_time, first_cpu), (last_time, last_cpu) = readings[0], readings[-1]
    cpu = {role: (last_cpu[role] - first_cpu[role]) / (len(readings) - 1) for role in last_cpu}
    return {
        "parameters": parameters,
        "resident": resident,
        "database": "memory" if in_memory else "disk",
        "load": round(os.getloadavg()[0], 1),
        "seconds": round((last_time - first_time) / (len(readings) - 1), 1),
        "cpu_seconds": round(sum(cpu.values()), 1),
        "cpu_by_role": {role: round(seconds, 2) for role, seconds in cpu.items()},
        "site_memory_megabytes": round(largest / len(SITES)),
        "megabytes": round((final["bytes_up"] + final["bytes_down"]) / rounds / 1e6, 2),
    }


def main() -> None:
    """Print a line of JSON per size and kind of site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--parameters", default=",".join(HIDDEN_LAYERS), help="sizes, with commas between them")
    parser.add_argument("--resident-only", action="store_true", help="leave out Flower's own SuperNodes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for parameters in options.parameters.split(","):
            for resident, in_memory in ((False, False), (True, False), (True, True)):
                if resident or not options.resident_only:
                    measured = measure_rounds(parameters, options.rounds, Path(home), resident, in_memory)
                    print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
