"""A small sample of `make test-crash`: killed commands resume to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crash.crash_trials import BLOW_KINDS, Blow, CrashTrials, draw_blow, read_outcome, start_child
from experiments.test_interruption import child_environment


def run_trials(seed: int, kills: int, progress: Path) -> dict[str, int]:
    """In a process of their own, because trials fork it."""
    words = ["--kills", str(kills), "--seed", str(seed), "--progress", str(progress)]
    done = subprocess.run(
        [sys.executable, "-m", "crash.crash_trials", *words], capture_output=True, text=True, env=child_environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hits: dict[str, int] = json.loads(progress.read_text())["hits"]
    return hits


@pytest.mark.slow
def test_a_few_kills_leave_no_trace(tmp_path: Path) -> None:
    hits = run_trials(3, 12, tmp_path / "progress.json")
    assert sum(hits.values()) >= 12
    again = run_trials(3, 14, tmp_path / "progress.json")
    assert sum(again.values()) > sum(hits.values()), "the same command goes on"


@pytest.mark.parametrize("kind", ["torn write", "full disk"])
def test_a_blow_inside_a_checkpoint_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    """Struck in the middle of its writes, the federation's server and sites go on to the same bits."""
    expected, operations = CrashTrials(tmp_path, 0).expected("federation")
    out, log = tmp_path / "struck", tmp_path / "struck.log"
    code, killed = start_child("federation", out, Blow(kind, 0.0, operations // 2, 7), log)
    assert (killed, code) == ((True, -9) if kind == "torn write" else (False, 2)), log.read_text()
    assert read_outcome(out) != expected
    assert start_child("federation", out, None, log) == (0, False), log.read_text()
    assert read_outcome(out) == expected


def test_every_kind_of_blow_is_drawn() -> None:
    import random

    generator = random.Random(0)
    assert {draw_blow(generator, 10).kind for _ in range(200)} == set(BLOW_KINDS)
