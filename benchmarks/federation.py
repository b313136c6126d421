"""What a federated round costs: seconds, CPU seconds and bytes, for four SuperNodes on this machine.

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

from fedauc.experiments.folder import RunFolder
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.local_federation import LocalFederation, write_demo_sites

HIDDEN = {"1e4": "322", "1e6": "985,985", "1.1e7": "3300,3300"}
"""Layers of a perceptron on 29 features with about so many parameters."""

SITES = {f"site-{number}": "all" for number in range(4)}

TICK = os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU seconds of every process of a trial and all they start, by looking at them often."""

    def __init__(self, trial: LocalFederation) -> None:
        self._trial, self._spent, self._over = trial, dict[int, float](), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """What has been spent so far."""
        return sum(self._spent.values())

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for number in self._trial.process_ids():
                try:
                    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                self._spent[number] = (int(fields[11]) + int(fields[12])) / TICK


def measure(parameters: str, rounds: int, home: Path) -> dict[str, float | str]:
    """The mean over the rounds after the first of a full-participation run."""
    folder = home / f"app-{parameters}"
    create_app_folder(folder, SITES)
    write_demo_sites(folder / "sites", list(SITES))
    with LocalFederation(folder) as trial:
        meter = Meter(trial)
        trial.start_superlink()
        for name in SITES:
            trial.register_site(name)
            trial.start_site(name)
        options = f"model.hidden={HIDDEN[parameters]} local-steps=4 participation=full"
        trial.start_run(f'method="fedavg" model="mlp" cycles={rounds} evaluation="none" options="{options}"')
        marks: list[tuple[float, float]] = []
        while trial.is_running("run"):
            if len(RunFolder(folder / "run").read_lines("attendance.jsonl")) > len(marks):
                marks.append((time.perf_counter(), meter.seconds()))
            time.sleep(0.05)
        meter.stop()
    final = json.loads((folder / "run" / "result.json").read_text())["final"]
    count = len(marks) - 1
    return {
        "parameters": parameters,
        "seconds": round((marks[-1][0] - marks[0][0]) / count, 1),
        "cpu_seconds": round((marks[-1][1] - marks[0][1]) / count, 1),
        "megabytes": round((final["bytes_up"] + final["bytes_down"]) / rounds / 1e6, 2),
    }


def main() -> None:
    """Print a line of JSON per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as home:
        for parameters in HIDDEN:
            print(json.dumps(measure(parameters, rounds, Path(home))), flush=True)


if __name__ == "__main__":
    main()
