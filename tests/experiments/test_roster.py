"""roster.json: who takes part in a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedauc.data.datasets.synthetic import Synthetic
from fedauc.experiments import roster
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.roster import ROSTER_FILE, RunRoster
from fedauc.experiments.runner import Run

CONFIG = Config(
    recipe=Recipe.of("cycp-minimax", cycles=3, groups=2, per_round=1, local_steps=2),
    data=Synthetic(clients=5, rows_per_client=30),
)


def test_a_new_run_lists_its_clients_and_groups(tmp_path: Path) -> None:
    run = Run.create(CONFIG, tmp_path / "run")
    stored = RunRoster(**json.loads((tmp_path / "run" / ROSTER_FILE).read_text()))
    census, schedule = run.data.split.train.census, run.assembly.training.schedule
    assert stored.listed is not None
    assert stored.listed["positives"] == census.positives.tolist()
    assert stored.rows == int((census.positives + census.negatives).sum())
    assert (stored.rounds, stored.cycle_length, stored.group_count) == (6, 2, 2)
    for number, members in enumerate(schedule.groups):
        assert [stored.listed["group"][client] for client in members] == [number] * len(members)
        assert stored.groups[number]["positives"] == int(census.positives[members].sum())


def test_the_cohorts_of_a_run_follow_from_its_roster_and_its_configuration(tmp_path: Path) -> None:
    run = Run.create(CONFIG, tmp_path / "run")
    stored = RunRoster(**json.loads((tmp_path / "run" / ROSTER_FILE).read_text()))
    again = CONFIG.recipe.participation.bind(stored.for_participation(), CONFIG.recipe.seed)
    assert [again.cohort(round) for round in range(6)] == [
        run.assembly.training.schedule.cohort(round) for round in range(6)
    ]


def test_many_clients_are_not_listed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_CLIENTS_LISTED", 4)
    Run.create(CONFIG, tmp_path / "run")
    stored = RunRoster(**json.loads((tmp_path / "run" / ROSTER_FILE).read_text()))
    assert stored.listed is None
    assert np.sum([group["clients"] for group in stored.groups]) == stored.clients == 5
