"""A real federation on this machine whose processes are killed, stopped and cut off, and which must not mind.

`python -m chaos.chaos_trial --seconds 240 --seed 5` starts a SuperLink, four sites behind a proxy and a run. For so
many seconds it kills (`SIGKILL`) or stops (`SIGSTOP`, later `SIGCONT`) sites, their workers, the ServerApp and the
SuperLink, and cuts connections; what has died is started again, as a service manager would. Then it leaves the
federation alone until the run is done, and compares the model with the simulator's for the attendance that happened,
bit by bit. The seed decides what happens in which order; the instants are those of a real machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from chaos.proxy import CuttingProxy
from fedauc.data.clients import Clients
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.federation.app_folder import create_app_folder
from fedauc.federation.audit_log import verify_log
from fedauc.federation.local_federation import LocalFederation, list_descendants, write_demo_sites
from fedauc.federation.server import summarize_run
from fedauc.models.linear import Linear
from fedauc.participation.cyclic import Cyclic
from federation_simulation.oracle import Attended

SITES = {"site-0": "a", "site-1": "b", "site-2": "c", "site-3": "a"}

METHOD = "scaffold"
"""A method whose sites keep a state, so that a visit that is lost or repeated would show."""

SETTINGS = f'method="{METHOD}" deadline=25.0 evaluation="none" options="participation=cyclic"'

ADDED_SETTINGS = "quorum = 1\npatience = 1000\nmax-attempts = 50\n"
"""Goes into the app's own configuration: a run may only change what is in there."""

SECONDS_TO_END = 600.0
"""Time that a run gets to end when nothing is done to it any more."""

RETRY_SECONDS = 8.0
"""Pause between two starts of a site that the SuperLink does not accept yet."""


class ChaosTrial(LocalFederation):
    """A federation whose sites reach the SuperLink through a proxy. `choices` decides what happens."""

    def __init__(self, folder: Path, cycles: int, choices: random.Random) -> None:
        super().__init__(folder)
        self._settings, self._choices, self.counts = f"{SETTINGS} cycles={cycles}", choices, dict[str, int]()
        self._stopped = list[tuple[float, int]]()
        self._next_start = dict.fromkeys(SITES, 0.0)
        self.proxy = CuttingProxy(self.port)

    def start_supernode(
        self, name: str, node_config: Mapping[str, str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start a site that connects to the proxy."""
        port, self.port = self.port, self.proxy.port
        try:
            super().start_supernode(name, node_config, environment)
        finally:
            self.port = port

    def disturb(self) -> None:
        """Do one bad thing."""
        actions: dict[str, tuple[Callable[[], None], int]] = {
            "kill a worker": (lambda: self._signal_worker(signal.SIGKILL), 5),
            "stop a worker": (lambda: self._signal_worker(signal.SIGSTOP), 4),
            "stop a site": (self._stop_site, 3),
            "kill a site": (self._kill_site, 1),
            "cut connections": (lambda: self._cut(0.0), 5),
            "refuse connections": (lambda: self._cut(self._choices.uniform(1.0, 20.0)), 3),
            "kill the ServerApp": (self._kill_server_app, 2),
            "kill the SuperLink": (self._kill_superlink, 1),
        }
        name = self._choices.choices(list(actions), [weight for _, weight in actions.values()])[0]
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        self.counts[name] = self.counts.get(name, 0) + 1
        actions[name][0]()

    def repair(self) -> None:
        """Do what service managers and an operator do: let stopped processes go on, start what has ended."""
        now = time.monotonic()
        for moment, pid in list(self._stopped):
            if moment <= now:
                self._stopped.remove((moment, pid))
                _send_signal(pid, signal.SIGCONT)
        if not self.is_running("superlink"):
            self.start_superlink()
        for name in SITES:
            if not self.is_running(name) and self._next_start[name] <= now:
                # A SuperLink refuses a node until the heartbeats of its old process have failed.
                self._next_start[name] = now + RETRY_SECONDS
                self.start_site(name)
        if not self.is_running("run") and not self.is_done():
            resumes = " resume=true" if (self.folder / "run").exists() else ""
            self.start_run(self._settings + resumes)

    def is_done(self) -> bool:
        """Whether the run has a result."""
        return (self.folder / "run" / "result.json").is_file()

    def let_all_go_on(self) -> None:
        """End all disturbances."""
        self._stopped = [(0.0, pid) for _, pid in self._stopped]
        self.proxy.cut_connections()
        self.repair()

    def _signal_worker(self, number: signal.Signals) -> None:
        name = self._choices.choice(list(SITES))
        workers = [pid for pid in self.process_ids(name) if "site_worker" in _read_command(pid)]
        for pid in workers:
            self._send(pid, number)

    def _stop_site(self) -> None:
        name = self._choices.choice(list(SITES))
        for pid in self.process_ids(name):
            self._send(pid, signal.SIGSTOP)

    def _kill_site(self) -> None:
        name = self._choices.choice(list(SITES))
        if self.is_running(name):
            self.stop_process(name, signal.SIGKILL)
            self.start_site(name)

    def _cut(self, seconds: float) -> None:
        self.proxy.cut_connections(seconds)

    def _kill_server_app(self) -> None:
        for pid, _ in list_descendants(self._processes["superlink"].pid):
            if "serverapp" in _read_command(pid).lower():
                _send_signal(pid, signal.SIGKILL)
        if self.is_running("run"):
            self.stop_process("run")

    def _kill_superlink(self) -> None:
        self.stop_process("superlink", signal.SIGKILL)
        if self.is_running("run"):
            self.stop_process("run")

    def _send(self, pid: int, number: signal.Signals) -> None:
        _send_signal(pid, number)
        if number == signal.SIGSTOP:
            self._stopped.append((time.monotonic() + self._choices.uniform(0.5, 30.0), pid))


def _read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def simulate_weights(folder: Path, cycles: int) -> np.ndarray:
    """The weights of the same training in one process, with the attendance that the server has written."""
    names = list(SITES)
    parts = {name: [np.load(folder / "sites" / name / "rows" / f"{part}.npy") for part in "xy"] for name in names}
    inputs, labels = (np.concatenate([parts[name][side] for name in names]) for side in (0, 1))
    owner = np.repeat(names, [len(parts[name][1]) for name in names])
    clients = Clients.from_arrays(inputs, labels, owner, np.array([SITES[name] for name in owner]))
    lines = RunFolder(folder / "run").read_lines("attendance.jsonl")
    assert [line["round"] for line in lines] == list(range(len(lines))), "attendance.jsonl misses or repeats rounds"
    answered = tuple(
        () if "skipped" in line else tuple(names.index(name) for name in line["answered"]) for line in lines
    )
    recipe = Recipe.of(METHOD, engine="loop", cycles=cycles, participation="cyclic")
    assert isinstance(recipe.participation, Cyclic), recipe.participation
    recipe = replace(recipe, participation=Attended(recipe.participation, answered))
    training, _, state = assemble_training(recipe, Linear().build(inputs.shape[1:], recipe.seed), clients)
    assert len(answered) == training.plan.total_rounds, f"{len(answered)} of {training.plan.total_rounds} rounds"
    *_, last = training.rounds(state)
    return np.asarray(recipe.algorithm.extract_model(last.state.server.shared).weights)


def check_outcome(folder: Path, cycles: int) -> str:
    """Compare with the simulator, and check the audit logs; returns a line on the attendance."""
    with np.load(folder / "run" / "model.npz", allow_pickle=False) as arrays:
        weights = np.concatenate([arrays[name].reshape(-1) for name in arrays.files])
    expected = simulate_weights(folder, cycles)
    difference = float(np.abs(weights - expected).max())
    assert weights.tobytes() == expected.tobytes(), f"the model differs from the simulator's by {difference:g}"
    for name in SITES:
        problem = verify_log(folder / "sites" / name / "state").problem
        assert not problem, f"the audit log of {name}: {problem}"
    summary = summarize_run(folder / "run")
    assert summary["status"] == "done"
    return str({name: tuple(counts.values()) for name, counts in summary["attendance"].items()})


def main() -> None:
    """Run one trial, and end with exit code 1 if the federation minded."""
    parser = argparse.ArgumentParser(description="Disturb the processes of a real federation.")
    parser.add_argument("--seconds", type=float, default=240.0, help="How long it is disturbed.")
    parser.add_argument("--seed", type=int, default=None, help="Decides what happens; drawn and printed unless given.")
    parser.add_argument("--cycles", type=int, default=None, help="Cycles of the run; by default enough for the time.")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    cycles = options.cycles or max(5, round(options.seconds / 6))
    print(f"seed {seed}, {cycles} cycles", flush=True)
    choices = random.Random(seed)
    # So that the processes end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="fedauc-chaos-", ignore_cleanup_errors=True) as home:
        folder = Path(home) / "trial"
        create_app_folder(folder, SITES)
        write_demo_sites(folder / "sites", list(SITES))
        app = folder / "pyproject.toml"
        app.write_text(app.read_text().replace("quorum = 1\n", ADDED_SETTINGS))
        with ChaosTrial(folder, cycles, choices) as trial, trial.proxy:
            trial.start_superlink()
            for name in SITES:
                trial.register_site(name)
                trial.start_site(name)
            trial.repair()
            while not (folder / "run").exists():
                trial.repair()
                time.sleep(0.5)
            begin = time.monotonic()
            while time.monotonic() - begin < options.seconds and not trial.is_done():
                trial.disturb()
                pause = time.monotonic() + choices.uniform(1.0, 12.0)
                while time.monotonic() < pause:
                    trial.repair()
                    time.sleep(0.2)
            disturbed, end = time.monotonic() - begin, time.monotonic() + SECONDS_TO_END
            trial.let_all_go_on()
            while not trial.is_done() or trial.is_running("run"):
                trial.repair()
                if time.monotonic() > end:
                    log = (folder / "logs" / "run.log").read_text()[-3000:]
                    sys.exit(f"seed {seed}: the run did not end: {log}")
                time.sleep(0.5)
        attendance = check_outcome(folder, cycles)
    print(f"disturbed for {disturbed:.0f} s: {trial.counts}")
    print(f"the model has the simulator's bits; answered, absent and refused: {attendance}")


if __name__ == "__main__":
    main()
