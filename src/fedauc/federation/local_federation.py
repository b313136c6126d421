"""A whole federation on this machine: SuperLink, SuperNodes and the run, with TLS and keys, for a trial or a test.

Every process leads a group of its own, so that stopping it stops what it started, and nothing else.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from fedauc.data.dataset import Rows
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.experiments.checkpoint import write_atomically

SUPERLINK_NAME = "trial"
"""What the SuperLink is called in Flower's configuration."""

READY = 60.0
"""Seconds in which a SuperLink must come up."""

GRACE = 10.0
"""Seconds between asking a process to stop and stopping it."""


class LocalFederation:
    """The processes of an app's folder. Leaving the block stops every one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.port = find_free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Flower takes a link's name for an app's folder where there is one of that name, as `--out trial` makes.
        self._home = self.folder / "logs"
        self._home.mkdir(exist_ok=True)
        (self.folder / "flower").mkdir(exist_ok=True)
        certificate = self.folder / "certificates" / "ca.pem"
        lines = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{certificate}"\n'
        text = f'[superlink]\ndefault = "{SUPERLINK_NAME}"\n\n[superlink.{SUPERLINK_NAME}]\n{lines}'
        write_atomically(self.folder / "flower" / "config.toml", text.encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in reversed(list(self._processes)):
            self.stop_process(name)

    def start_superlink(self) -> None:
        """Start the SuperLink, on the same port and database each time, and wait until it answers."""
        keys = self.folder / "certificates"
        self.start_process(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--database", str(self.folder / "flower" / "superlink.db"), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", str(keys / "ca.pem"), "--ssl-certfile", str(keys / "server.pem")),
            *("--ssl-keyfile", str(keys / "server.key"), "--disable-runtime-dependency-installation"),
        )
        self._wait_until(self._answers, READY, "the SuperLink did not come up")

    def register_site(self, name: str) -> None:
        """Make a site's key known to the SuperLink, under the site's name, unless it is known already."""
        try:
            self.run_flwr(
                "supernode", "register", str(self.folder / "keys" / f"{name}.pub"), SUPERLINK_NAME, "--name", name
            )
        except ValueError as error:
            if "already in use" not in str(error):
                raise

    def start_supernode(self, name: str, config: Mapping[str, str], key: Path | None = None) -> None:
        """Start a site's SuperNode."""
        words = " ".join(f'{word}="{value}"' for word, value in config.items())
        self.start_process(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", str(find_free_port())),
            *("--root-certificates", str(self.folder / "certificates" / "ca.pem")),
            *("--auth-supernode-private-key", str(key or self.folder / "keys" / name), "--node-config", words),
        )

    def start_run(self, settings: str = "") -> None:
        """Start the run with these `name=value` settings of the app; the process ends when the run does."""
        words = ("--run-config", settings) if settings else ()
        self.start_process("run", "flwr", "run", str(self.folder), SUPERLINK_NAME, "--stream", *words)

    def is_running(self, name: str) -> bool:
        """Whether a process is there and has not ended."""
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def process_ids(self) -> set[int]:
        """Every process of the trial that is there now, and all they started."""
        return {number for process in list(self._processes.values()) for number, _ in list_descendants(process.pid)}

    def exit_code(self, name: str) -> int | None:
        """How a process ended."""
        return self._processes[name].poll()

    def stop_process(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a process and all it started; SIGKILL asks nobody."""
        process = self._processes.pop(name)
        family = list_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        # What a leader leaves behind is still in its group, or was put into a session of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for member, started in family:
            if _facts(member)[1] == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        process.wait()

    def run_flwr(self, *words: str) -> str:
        """Run a command of Flower's and return what it says."""
        command = [str(_beside("flwr")), *words]
        done = subprocess.run(
            command, cwd=self._home, env=self._environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-300:]
            raise ValueError(f"`flwr {' '.join(words[:2])}` ended with {done.returncode}: {said}")
        return done.stdout

    def start_process(self, name: str, program: str, *words: str) -> None:
        """Start a process that writes into its own log, in place of one of that name."""
        if name in self._processes:
            self.stop_process(name)
        log = (self.folder / "logs" / f"{name}.log").open("ab")
        with log:
            self._processes[name] = subprocess.Popen(
                [str(_beside(program)), *words],
                cwd=self._home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until(self, true: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait for something, while the SuperLink lives."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end or not self.is_running("superlink"):
                raise ValueError(f"{otherwise} within {seconds:g} s; see {self.folder / 'logs'}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        trusted = ssl.create_default_context(cafile=str(self.folder / "certificates" / "ca.pem"))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{self.port}/health", timeout=1.0, context=trusted) as found:
                return int(found.status) == 200
        except (OSError, http.client.HTTPException):
            return False

    def _environment(self) -> dict[str, str]:
        binaries = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")]),
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "OMP_NUM_THREADS": "1",
        }


def list_descendants(root: int) -> list[tuple[int, str]]:
    """A process and all that it and they started, each with the time of its start; where there is no /proc, none."""
    known = {int(path.name): _facts(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [root] if root in known else []
    for number in found:
        found += [child for child, (parent, _) in known.items() if parent == number]
    return [(number, known[number][1]) for number in found]


def _facts(number: int) -> tuple[int, str]:
    """A process's parent and the time of its start, which tells it from a later one of the same number."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1, ""
    return int(fields[1]), fields[19]


def find_free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def _beside(program: str) -> Path:
    """A program of the environment we run in."""
    found = Path(sys.executable).parent / program
    if not found.is_file():
        raise ValueError(f"{program} is not installed beside {sys.executable}; run pip install 'fedauc[flower]'")
    return found


def write_demo_sites(folder: Path, names: list[str]) -> None:
    """The demo's card transactions, dealt to sites by the hour: site i gets hours i, i + n, i + 2n, ..."""
    table = CreditCard().load(0)
    for place, name in enumerate(names):
        home = folder / name / "rows"
        home.mkdir(parents=True)
        for prefix, rows in (("", table.train), ("test_", table.test)):
            mine = _of(rows, place, len(names))
            np.save(home / f"{prefix}x.npy", np.asarray(mine.inputs, np.float32))
            np.save(home / f"{prefix}y.npy", mine.labels)


def _of(rows: Rows, place: int, count: int) -> Rows:
    hours = (
        np.array([int(str(client).removeprefix("hour-")) for client in rows.client]) if rows.client is not None else 0
    )
    return rows.take(np.flatnonzero(hours % count == place))
