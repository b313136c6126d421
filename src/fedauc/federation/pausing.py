"""Pause a run: the operator leaves a request in the run's folder, and the server reads it after every round.

The round under way is finished and saved. The run ends with the reason in stopped.txt, and goes on when it is resumed;
resuming takes the request back.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_loop import RunPaused
from fedauc.files import write_atomically
from fedauc.interfaces import Phase

REQUEST_FILE = "pause-requested.json"

PAUSED = "paused by the operator"
"""How the status of a paused run begins."""


class PausedByOperator(RunPaused):
    """The operator has asked for a pause, and the round under way has been saved."""


def request_pause(path: Path, at_cycle_end: bool = False) -> None:
    """Ask the server that trains in this folder to stop after the round under way, or after the cycle's last round."""
    if not (path / "federation.json").is_file():
        raise ValueError(f"{path} is no federated run: it has no federation.json; give the app's or the run's folder")
    if RunFolder(path).done:
        raise ValueError(f"the run in {path} is done; there is nothing to pause")
    if (stopped := path / "stopped.txt").is_file():
        reason = stopped.read_text(encoding="utf-8").strip()
        # The text of a pause says how the run goes on.
        state = f"is already {reason}" if reason.startswith(PAUSED) else f"has already stopped: {reason}"
        raise ValueError(f"the run in {path} {state}")
    write_atomically(path / REQUEST_FILE, f"{json.dumps({'at_cycle_end': at_cycle_end})}\n".encode())


def withdraw_pause(path: Path) -> None:
    """Take a request back, where there is one."""
    (path / REQUEST_FILE).unlink(missing_ok=True)


def is_pause_due(path: Path, phase: Phase) -> bool:
    """Whether a request asks to stop after the round of that phase; one that cannot be read asks for it at once."""
    try:
        request = json.loads((path / REQUEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return phase.ends_cycle or not (isinstance(request, dict) and request.get("at_cycle_end"))


def describe_pause(done: int, rounds: int) -> str:
    """The status of a paused run.

    >>> describe_pause(3, 20)
    'paused by the operator after 3 of 20 rounds; resume the run to go on'
    """
    return f"{PAUSED} after {done} of {rounds} rounds; resume the run to go on"
