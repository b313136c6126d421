"""Each peer's own virtual environment, made from its requirement file when that has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

ENVIRONMENTS = {"jax": "jax", "fedjax": "fedjax", "pfl": "pfl", "pfl-2": "pfl", "flower": "flower"}
"""The environment of each peer; contenders that are not here run in the driver's own."""


class NotInstalled(Exception):
    """A peer's environment could not be made; the message says why."""


def python_of(contender: str) -> str:
    """The interpreter a contender runs under, its environment made if need be."""
    name = ENVIRONMENTS.get(contender)
    if name is None:
        return sys.executable
    requirements, folder = HERE / "peers" / f"{name}.txt", HERE / ".venvs" / name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not (stamp.exists() and stamp.read_text() == requirements.read_text()):
        print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        _install_packages(python, requirements)
        stamp.write_text(requirements.read_text())
    return str(python)


def _install_packages(python: Path, requirements: Path) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    # A constraint file meant for fedauc's environment would fight with the peer's pins.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired as error:
        raise NotInstalled("pip took more than 30 minutes") from error
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(reasons[-1] if reasons else f"pip ended with {done.returncode}")
