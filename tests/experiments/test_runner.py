"""A run's records, round by round."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import DataCache, Run, assemble_run


def test_a_record_holds_the_mean_loss_since_the_one_before(tmp_path: Path) -> None:
    """Three cycles of two rounds, a record after the second cycle and after the last."""
    recipe = Recipe.of("cycp-minimax", cycles=3, groups=2, local_steps=2, dtype="float64")
    config = Config(recipe=recipe, data=Synthetic(clients=4, rows_per_client=30), evaluate_every=2)
    run = Run.create(config, tmp_path / "run")
    run.train_to_end()
    training, _, start = assemble_run(config, DataCache())[1]
    losses = [finished.loss_value or 0.0 for finished in training.rounds(start)]
    recorded = [record["loss"] for record in run.folder.read_records()]
    assert recorded == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 2], rel=1e-12)


def test_a_runs_seconds_are_those_of_its_rounds_and_of_what_it_does_with_them(tmp_path: Path) -> None:
    """A round that is said to have taken 100 s counts as such, and the rest takes well under one."""
    recipe = Recipe.of("cycp-minimax", cycles=1, groups=2, local_steps=2)
    run = Run.create(Config(recipe=recipe, data=Synthetic(clients=4, rows_per_client=30)), tmp_path / "run")
    for finished in run.assembly.training.rounds(run.loop.state):
        run.loop.advance(finished, 100)
    # Two rounds, the second of which is recorded.
    assert 200 < run.folder.training_seconds() < run.loop.seconds < 201
