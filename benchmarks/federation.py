"""What a federated round costs: seconds, CPU seconds, memory and bytes, for four sites on this machine.

On Flower sites keep resident workers, and the SuperLink of `fedauc federation superlink` has its database on disk or in
memory; or both are Flower's own programs, which start a process per message. On NVFlare a site has a process per job.
Run it in the environment of the message service, and in turn where both are compared:

.venv-flower/bin/python benchmarks/federation.py --sites resident
.venv-nvflare/bin/python benchmarks/federation.py --sites nvflare
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedauc.experiments.folder import RunFolder
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation, LocalProcesses, write_demo_sites
from fedauc.federation.nvflare_federation import SERVER_NAME, LocalFlare
from fedauc.federation.server import ATTENDANCE_FILE

HIDDEN_LAYERS = {"1e4": "322", "1e6": "985,985", "1.1e7": "3300,3300"}
"""Layers of perceptrons on 29 features, by their approximate number of parameters."""

SITES = {f"site-{number}": "all" for number in range(4)}

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

ROLES = {"site_worker": "workers", "site_node": "sites", "superlink": "superlink", "supernode": "sites"}
"""What a process is, by a word of its command line; the others belong to the server's app."""


class CpuMeter:
    """CPU seconds of all processes of a federation, from frequent readings of /proc."""

    def __init__(self, federation: LocalProcesses) -> None:
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


def read_site_memory(federation: LocalProcesses) -> float:
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


KINDS = ("supernode", "resident", "memory", "nvflare")
"""The kinds of sites; `memory` are resident workers of a SuperLink with its database in memory."""


def measure_rounds(parameters: str, rounds: int, home: Path, kind: str) -> dict[str, Any]:
    """The mean over the rounds after the first of a run with full participation."""
    folder = home / f"app-{parameters}-{kind}"
    settings = {"method": "fedavg", "model": "mlp", "cycles": rounds, "evaluation": "none"}
    settings["options"] = f"model.hidden={HIDDEN_LAYERS[parameters]} local-steps=4 participation=full weighting=clients"
    with create_federation(folder, kind) as federation:
        write_demo_sites(folder / "sites", list(SITES))
        if isinstance(federation, LocalFlare):
            start_flare_run(federation, settings)
        else:
            start_flower_run(federation, settings, in_memory=kind == "memory")
        meter, run = CpuMeter(federation), RunFolder(folder / "run")
        readings, largest = list[tuple[float, dict[str, float]]](), 0.0
        while len(readings) < rounds:
            if len(run.read_lines(ATTENDANCE_FILE)) > len(readings):
                readings.append((time.perf_counter(), meter.seconds_by_role()))
            time.sleep(0.2)
            largest = max(largest, read_site_memory(federation))
        while not run.done:
            time.sleep(0.2)
        meter.stop_reading()
    final = run.read_result()["final"]
    (first_time, first_cpu), (last_time, last_cpu) = readings[0], readings[-1]
    cpu = {role: (last_cpu[role] - first_cpu[role]) / (len(readings) - 1) for role in last_cpu}
    return {
        "parameters": parameters,
        "sites": kind,
        "load": round(os.getloadavg()[0], 1),
        "seconds": round((last_time - first_time) / (len(readings) - 1), 1),
        "cpu_seconds": round(sum(cpu.values()), 1),
        "cpu_by_role": {role: round(seconds, 2) for role, seconds in cpu.items()},
        "site_memory_megabytes": round(largest / len(SITES)),
        "megabytes": round((final["bytes_up"] + final["bytes_down"]) / rounds / 1e6, 2),
    }


def create_federation(folder: Path, kind: str) -> LocalFederation | LocalFlare:
    """The files of a federation with that kind of sites; leaving its block stops its processes."""
    if kind == "nvflare":
        return LocalFlare(folder, SITES)
    create_app_folder(folder, SITES)
    return LocalFederation(folder, kind != "supernode")


def start_flower_run(federation: LocalFederation, settings: Mapping[str, Any], in_memory: bool) -> None:
    """Start the SuperLink, the sites, and the run."""
    federation.start_superlink(in_memory)
    for name in SITES:
        federation.register_site(name)
        federation.start_site(name)
    federation.start_run(" ".join(f"{name}={json.dumps(value)}" for name, value in settings.items()))


def start_flare_run(federation: LocalFlare, settings: Mapping[str, Any]) -> None:
    """Start the server and the sites, and submit the job as soon as the server takes one."""
    for name in (SERVER_NAME, *SITES):
        federation.start_participant(name)
    while True:
        try:
            federation.submit_run(settings)
        except ValueError:
            time.sleep(1.0)
        else:
            return


def main() -> None:
    """Print a line of JSON per size and kind of site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sites", choices=KINDS, nargs="+", default=["supernode", "resident", "memory"])
    parser.add_argument("--parameters", default=",".join(HIDDEN_LAYERS), help="sizes, with commas between them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for parameters in options.parameters.split(","):
            for kind in options.sites:
                print(json.dumps(measure_rounds(parameters, options.rounds, Path(home), kind)), flush=True)


if __name__ == "__main__":
    main()
