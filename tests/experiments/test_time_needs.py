"""A run whose rounds take long says so before the first one, and goes on saying so."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.experiments import progress_lines, time_needs
from fedauc.experiments.run_loop import Progress

WORDS = ("run", "--data", "synthetic", "--data.clients", "4", "--cycles", "1", "--local-steps", "4", "--engine", "loop")


def test_the_time_of_long_rounds_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quiet = fedauc(capsys, *WORDS, "--out", str(tmp_path / "short"))
    assert quiet.code == 0
    assert "ms a step" not in quiet.err
    monkeypatch.setattr(time_needs, "LONG_ROUND", 4)
    announced = fedauc(capsys, *WORDS, "--out", str(tmp_path / "long"))
    assert announced.code == 0
    text = " ".join(announced.err.split())
    assert re.search(r"clients with 4 local steps each: at [0-9.e-]+ ms a step, as measured now, it takes about", text)


def test_a_long_round_is_mentioned_while_it_lasts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_lines, "SECONDS_BETWEEN_LINES", 0.1)
    with progress_lines.ProgressLines() as lines:
        observe = lines.add_bar("slow")
        observe(Progress(0, 20, None))
        time.sleep(0.9)
    reminders = [line for line in capsys.readouterr().err.splitlines() if "so far" in line]
    # After 0.1, 0.2, 0.4 and 0.8 s.
    assert 1 <= len(reminders) <= 4
    assert reminders[0].startswith("slow: in round 1 of 20, for ")
