"""A whole federation on this machine, for a trial or a test: SuperLink, SuperNodes and the run, with TLS and keys.

Every process leads a process group of its own, so that stopping it stops what it has started, and nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np

from fedauc.data.datasets.creditcard import CreditCard
from fedauc.federation.run_outcome import RunOutcome, find_run_id, read_outcome
from fedauc.files import write_atomically
from fedauc.plugins import VARIABLE

SUPERLINK_NAME = "trial"
"""The SuperLink's name in Flower's configuration."""

IN_MEMORY = ":flwr-in-memory:"
"""What Flower calls a database that is not on disk."""

STARTUP_SECONDS = 60.0
"""Time in which a SuperLink must come up."""

STOP_SECONDS = 10.0
"""Time between asking a process to stop and killing it."""


class LocalProcesses:
    """Processes with log files in a folder. Leaving the `with` block stops all of them.

    `environment` is added to that of every process, such as `PYTHONPATH` for another version.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self.folder = folder.absolute()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Commands run in the logs folder: where a folder has the SuperLink's name, as after `--out trial`, Flower would
        # take the name for an app.
        self.working_folder = self.folder / "logs"
        self.working_folder.mkdir(exist_ok=True)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        if os.environ.get(VARIABLE):
            # The processes run in another folder, and must find the plug-ins that this one finds in its own.
            paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.environment |= environment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop_process(name)

    def is_running(self, name: str) -> bool:
        """Whether a process was started and has not ended."""
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def exit_code(self, name: str) -> int | None:
        """The exit code of a process, or None while it runs."""
        return self._processes[name].poll()

    def process_ids(self, name: str = "") -> set[int]:
        """The ids of all processes of the federation or of one name, including those that they have started."""
        processes = [process for key, process in list(self._processes.items()) if name in ("", key)]
        return {pid for process in processes for pid, _ in list_descendants(process.pid)}

    def start_process(
        self, name: str, program: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start a program of this Python environment, which logs to its own file; stop an earlier one of that name."""
        if name in self._processes:
            self.stop_process(name)
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(find_program(program)), *arguments],
                cwd=self.working_folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop_process(self, name: str, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a process and everything it has started; what does not stop in time is killed."""
        process = self._processes.pop(name)
        descendants = list_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        # What the leader leaves behind is still in its group, or has moved to a session of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid, start_time in descendants:
            if _read_process(pid)[1] == start_time:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


class LocalFederation(LocalProcesses):
    """SuperLink, sites and the run of an app's folder. Leaving the `with` block stops all of them.

    Without resident workers, SuperLink and SuperNodes are Flower's own programs.
    """

    def __init__(
        self, folder: Path, resident_workers: bool = True, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(folder, environment)
        self.resident_workers, self.port = resident_workers, find_free_port()
        (self.folder / "flower").mkdir(exist_ok=True)
        certificate = self.folder / "certificates" / "ca.pem"
        address = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{certificate}"\n'
        text = f'[superlink]\ndefault = "{SUPERLINK_NAME}"\n\n[superlink.{SUPERLINK_NAME}]\n{address}'
        write_atomically(self.folder / "flower" / "config.toml", text.encode())
        self.environment |= {
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        if not resident_workers:
            # How often a SuperNode looks for a message to start a process for.
            self.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"

    def start_superlink(self, in_memory: bool = False) -> None:
        """Start the SuperLink, with the same port and database each time, and wait until it answers.

        Without a database on disk it needs less time for large models, and forgets its sites when it ends.
        """
        database = IN_MEMORY if in_memory else str(self.folder / "flower" / "superlink.db")
        certificates = self.folder / "certificates"
        self.start_process(
            "superlink",
            *(("fedauc", "federation", "superlink") if self.resident_workers else ("flower-superlink",)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", database, "--enable-supernode-auth"),
            *("--ssl-ca-certfile", str(certificates / "ca.pem"), "--ssl-certfile", str(certificates / "server.pem")),
            *("--ssl-keyfile", str(certificates / "server.key"), "--disable-runtime-dependency-installation"),
        )
        deadline = time.monotonic() + STARTUP_SECONDS
        while not self._superlink_answers():
            if time.monotonic() > deadline or not self.is_running("superlink"):
                problem = f"the SuperLink did not come up within {STARTUP_SECONDS:g} s"
                raise ValueError(f"{problem}; see {self.folder / 'logs' / 'superlink.log'}")
            time.sleep(0.1)

    def register_site(self, name: str) -> None:
        """Register a site's key with the SuperLink under the site's name, unless it is registered already."""
        public_key = self.folder / "keys" / f"{name}.pub"
        try:
            self.run_flwr("supernode", "register", str(public_key), SUPERLINK_NAME, "--name", name)
        except ValueError as error:
            if "already in use" not in str(error):
                raise

    def start_site(self, name: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the SuperNode of a site whose rows `write_demo_sites` has written."""
        home = self.folder / "sites" / name
        self.start_supernode(name, {"data": str(home / "rows"), "state": str(home / "state")}, environment)

    def start_supernode(
        self, name: str, node_config: Mapping[str, str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Start a node with the key of that name: a site with a resident worker, or Flower's own SuperNode."""
        settings = " ".join(f'{key}="{value}"' for key, value in node_config.items())
        key, link = str(self.folder / "keys" / name), ("--superlink", f"127.0.0.1:{self.port}")
        trusted = ("--root-certificates", str(self.folder / "certificates" / "ca.pem"))
        if self.resident_workers:
            site = ("python", "-m", "fedauc.federation.site_node")
            program = (*site, *link, *trusted, "--key", key, "--node-config", settings)
        else:
            own_port, private_key = ("--port", str(find_free_port())), ("--auth-supernode-private-key", key)
            program = ("flower-supernode", *link, *own_port, *trusted, *private_key, "--node-config", settings)
        self.start_process(name, *program, environment=environment)

    def start_run(self, run_config: str = "") -> None:
        """Start the run with these `name=value` settings of the app; the process ends when the run does."""
        options = ("--run-config", run_config) if run_config else ()
        self.start_process("run", "flwr", "run", str(self.folder), SUPERLINK_NAME, "--stream", *options)

    def read_run_outcome(self) -> RunOutcome:
        """How the run that was started last has ended."""
        run_id = find_run_id((self.folder / "logs" / "run.log").read_text().rpartition("Using SuperLink")[2])
        if not run_id:
            return RunOutcome(False, f"`flwr run` started no run; see {self.folder / 'logs' / 'run.log'}")
        return read_outcome(self.run_flwr, SUPERLINK_NAME, run_id)

    def run_flwr(self, *arguments: str) -> str:
        """Run a `flwr` command and return its output."""
        return run_flwr(*arguments, folder=self.working_folder, environment=self.environment)

    def _superlink_answers(self) -> bool:
        trusted = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.pem"))
        url = f"https://127.0.0.1:{self.port}/health"
        try:
            with urllib.request.urlopen(url, timeout=1.0, context=trusted) as response:
                return int(response.status) == 200
        except (OSError, http.client.HTTPException):
            return False


def run_flwr(*arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a `flwr` command of this Python environment and return its output."""
    command = [str(find_program("flwr")), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ValueError(f"`flwr {' '.join(arguments[:2])}` ended with exit code {done.returncode}: {output}")
    return done.stdout


def write_demo_sites(folder: Path, names: list[str]) -> None:
    """Partition the demo's card transactions among sites by the hour: site i of n gets hours i, i + n, i + 2n, ..."""
    dataset = CreditCard().load(0)
    for site, name in enumerate(names):
        rows_folder = folder / name / "rows"
        rows_folder.mkdir(parents=True)
        for prefix, rows in (("", dataset.train), ("test_", dataset.test)):
            assert rows.client is not None
            hours = np.array([int(str(client).removeprefix("hour-")) for client in rows.client])
            site_rows = rows.take(np.flatnonzero(hours % len(names) == site))
            np.save(rows_folder / f"{prefix}x.npy", np.asarray(site_rows.inputs, np.float32))
            np.save(rows_folder / f"{prefix}y.npy", site_rows.labels)


def list_descendants(root: int) -> list[tuple[int, str]]:
    """The id and start time of a process and all its descendants; empty on systems without /proc."""
    processes = {int(path.name): _read_process(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    pids = [root] if root in processes else []
    for pid in pids:
        pids += [child for child, (parent, _) in processes.items() if parent == pid]
    return [(pid, processes[pid][1]) for pid in pids]


def find_free_port() -> int:
    """A port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _read_process(pid: int) -> tuple[int, str]:
    """A process's parent and start time, which distinguishes it from a later process with the same id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, ""
    return int(fields[1]), fields[19]


def find_program(program: str) -> Path:
    """A program of the Python environment that we run in."""
    path = Path(sys.executable).parent / program
    if not path.is_file():
        raise ValueError(
            f"{program} is not installed beside {sys.executable}; install fedauc[flower] or fedauc[nvflare] there"
        )
    return path
