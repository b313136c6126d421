"""How a run of a Flower app ended: `flwr run` itself ends with exit code 0 whether the run has failed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from fedauc.guards import TrainingStopped

COMPLETED = "finished:completed"

FAILURE_PREFIX = "ServerApp failed with exception: "
"""What Flower writes before the text of an error."""

UNAVAILABLE = "Connection to the SuperLink is unavailable"
"""How Flower says that no SuperLink answers."""


class RunOutcome(NamedTuple):
    """Whether the server's app has run to its end, and if not, why."""

    completed: bool
    reason: str


def find_run_id(output: str) -> str:
    """The id in what `flwr run` prints; empty if it started no run.

    >>> find_run_id("Using SuperLink: trial\\nSuccessfully started run 11065229443608135573\\n")
    '11065229443608135573'
    """
    started = re.search(r"started run (\d+)", output)
    return started[1] if started else ""


def read_outcome(run_flwr: Callable[..., str], superlink: str, run_id: str) -> RunOutcome:
    """Ask the SuperLink how a run ended; one that does not answer is a `TrainingStopped`."""
    answer = json.loads(run_flwr("list", superlink, "--run-id", run_id, "--format", "json"))
    if not answer.get("runs"):
        reason = answer.get("error-message") or answer.get("error_message") or "it lists no such run"
        if UNAVAILABLE in str(reason):
            remedy = 'start it again, then resume the run with --run-config "resume=true"'
            raise TrainingStopped(f"the SuperLink {superlink!r} of run {run_id} does not answer: {remedy}")
        problem = f"`flwr list {superlink} --run-id {run_id}` failed ({' '.join(str(reason).split())[:200]})"
        hint = f"is {superlink!r} also the name of a folder here?"
        raise ValueError(f"{problem}; {hint} `fedauc federation show` says how the run went")
    listed = answer["runs"][0]
    reason = str(listed["status-details"]).removeprefix(FAILURE_PREFIX) or f"its status is {listed['status']!r}"
    return RunOutcome(listed["status"] == COMPLETED, reason)
