"""Two processes give the single process's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import fedauc
from engines.distributed_worker import outcome

HERE = Path(__file__).parent

PRIVATE = {"pool": "histogram", "epsilon": 20.0, "delta": 1e-3, "participation": "cyclic-poisson", "rate": 0.5}
"""Noise is added once, by no rank more or less; some cohorts are empty."""


def torchrun(ranks: int, *command: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("method", "engine", "ranks", "settings"),
    [
        ("cycp-pairwise", "batched", 2, {}),
        ("a-scaffold", "batched", 2, {}),
        ("cycp-minimax", "loop", 2, {}),
        ("cycp-minimax", "loop", 2, {"transforms": ["clip", "quantize"], "server_optimizer": "momentum"}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("rs-pairwise", "loop", 3, {}),
                (
                    "cycp-pairwise",
                    "batched",
                    2,
                    {"mean": "median", "groups": 2, "per_round": 3, "transforms": ["top-k"]},
                ),
                ("scaffold", "batched", 2, {"wrappers": ["personal-head", "momentum"]}),
                ("cycp-pairwise", "batched", 2, PRIVATE),
                ("cycp-minimax", "loop", 2, {"wrappers": ["fedprox", "adam"]}),
            )
        ),
    ],
)
def test_two_gloo_processes_give_the_single_processs_result(
    method: str, engine: str, ranks: int, settings: dict[str, object], tmp_path: Path
) -> None:
    """To 1e-9 in float64; groups of one client leave a rank without work, which must not hang or add anything."""
    path, text = tmp_path / "found.json", json.dumps(settings)
    torchrun(ranks, str(HERE / "distributed_worker.py"), method, engine, str(path), text)
    alone, everywhere = outcome(method, engine, text), json.loads(path.read_text())
    assert len(everywhere) == ranks
    for result in everywhere:
        np.testing.assert_allclose(result["weights"], alone["weights"], rtol=1e-9, atol=1e-9)
        assert result["traffic"] == alone["traffic"]
        assert result["remembering"] == alone["remembering"]
        ours, theirs = ([np.nan if v is None else v for v in values] for values in (result["values"], alone["values"]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_command_line_runs_under_torchrun(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rank 0 alone writes the folder; its records are the single process's, and it can be resumed by one process."""
    arguments = ["run", "--data", "synthetic", "--data.clients", "6", "--cycles", "3", "--local-steps", "2"]
    arguments += ["--method", "a-scaffold", "--dtype", "float64"]
    assert fedauc(capsys, *arguments, "--out", str(tmp_path / "one")).code == 0
    torchrun(2, "-m", "fedauc", *arguments, "--out", str(tmp_path / "two"))
    one, two = ((tmp_path / name / "records.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert len(one) == len(two) == 3
    for left, right in zip(one, two, strict=True):
        assert json.loads(left) == pytest.approx(json.loads(right), rel=1e-9)
    (tmp_path / "two" / "result.json").unlink()
    sorted((tmp_path / "two" / "checkpoints").iterdir())[-1].unlink()
    assert fedauc(capsys, "resume", str(tmp_path / "two")).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


STOPPERS = """
from dataclasses import dataclass
from typing import ClassVar
import torch.distributed as dist
from fedauc.experiments.callbacks import Callback

@dataclass(frozen=True)
class StopOnRank(Callback):
    \"\"\"Asks one rank to stop in the middle of the second cycle.\"\"\"
    name: ClassVar[str] = "stop-on-rank"
    rank: int = 0
    def on_round_end(self, run, state):
        if dist.get_rank() == self.rank and run.rounds_done == 4:
            run.stop_run(f"rank {self.rank} has had enough")
"""


def test_all_ranks_stop_when_rank_0_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on alone would wait for the others for ever."""
    (tmp_path / "stoppers.py").write_text(STOPPERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FEDAUC_PLUGINS", "stoppers")
    arguments = ["run", "--data", "synthetic", "--data.clients", "6", "--cycles", "3", "--local-steps", "2"]
    arguments += ["--groups", "3", "--method", "a-scaffold", "--callbacks", "stop-on-rank"]
    results = {}
    for rank in (0, 1):
        out = tmp_path / str(rank)
        torchrun(2, "-m", "fedauc", *arguments, "--callbacks.stop-on-rank.rank", str(rank), "--out", str(out))
        results[rank] = json.loads((out / "result.json").read_text())
    assert results[0]["stopped_early"] == "rank 0 has had enough"
    assert results[0]["final"]["rounds"] == 4
    # Rank 1 alone decides nothing: three cycles of three rounds.
    assert "stopped_early" not in results[1]
    assert results[1]["final"]["rounds"] == 9
