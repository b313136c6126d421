"""Every example runs as a user runs it, prints what it measured, and draws its figure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs_and_draws_its_figure(script: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg"}
    command = [sys.executable, str(script), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    aucs = [float(text) for text in re.findall(r"AUC (\d\.\d+)", done.stdout)]
    assert len(aucs) >= 2
    # Far above chance: a model that learned nothing scores .5.
    assert min(aucs) > 0.8
    assert (tmp_path / "out" / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")


def test_there_is_an_example_for_every_reader() -> None:
    assert [path.stem for path in SCRIPTS] == ["fraud_table", "images", "two_hospitals"]
