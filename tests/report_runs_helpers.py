"""Small runs for the tests of reports; they are trained once per session."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Progress, RunPaused
from fedauc.experiments.runner import Run
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace

DATA = Synthetic(clients=6, rows_per_client=60, positive_rate=0.3)


def make_config(method: str = "cycp-minimax", cycles: int = 4) -> Config:
    """Six clients in three groups; client 1 misses every second cycle."""
    present = [(round, client) for round in range(6) for client in range(6) if (round >= 3 or client != 1)]
    participation = Trace(rows=tuple(present), schedule=Cyclic(groups=3), repeat=True)
    recipe = Recipe.of(method, cycles=cycles, local_steps=2, participation=participation)
    return Config(recipe=recipe, data=DATA)


def train_comparison(path: Path) -> Path:
    """Two methods on the same rows."""
    configs = {f"{method}/seed-0": make_config(method) for method in ("cycp-fedavg", "cycp-minimax")}
    Comparison.create(path, configs).train_runs(lambda name: lambda progress: None)
    return path


def pause_after(rounds: int, run: Run) -> None:
    """Train until so many rounds are done, as a run does that is interrupted."""

    def observe(progress: Progress) -> None:
        if progress.done >= rounds:
            raise RunPaused

    with suppress(RunPaused):
        run.train_to_end(observe)
    assert run.loop.state.round == rounds
