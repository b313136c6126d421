"""What the SuperLink says of a run becomes an exit code, or one line where it cannot be asked."""

from __future__ import annotations

import json

import pytest

from fedauc.federation.run_outcome import RunOutcome, read_outcome
from fedauc.guards import TrainingStopped


def test_a_run_has_completed_or_says_why_not() -> None:
    run = {"status": "finished:failed", "status-details": "ServerApp failed with exception: no site"}
    assert read_outcome(lambda *words: json.dumps({"runs": [run]}), "lab", "7") == RunOutcome(False, "no site")


def test_a_superlink_that_does_not_list_the_run_is_one_line() -> None:
    """`flwr` takes the name of a folder for an app, and then fails."""
    answer = json.dumps({"success": False, "error-message": "Cannot migrate\nthe configuration"})
    message = r"failed \(Cannot migrate the configuration\); is 'lab' also the name of a folder here\?"
    with pytest.raises(ValueError, match=message):
        read_outcome(lambda *words: answer, "lab", "7")


def test_a_superlink_that_does_not_answer_has_stopped_the_run() -> None:
    """The answer is that of Flower 1.41 after the SuperLink was killed."""
    lines = (
        "Using SuperLink: lab (127.0.0.1:9)\n Displaying information for run ID 7...\n",
        "Connection to the SuperLink is unavailable. Please check your network connection and 'address' in the "
        "SuperLink connection configuration.",
    )
    answer = json.dumps({"success": False, "error-message": "\n".join(lines)})
    message = (
        "^the SuperLink 'lab' of run 7 does not answer: "
        'start it again, then resume the run with --run-config "resume=true"$'
    )
    with pytest.raises(TrainingStopped, match=message):
        read_outcome(lambda *words: answer, "lab", "7")
