"""The records in the repository: each belongs to a table, a figure or a choice, and choices are made from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paper.records import RecordStore, read_changes, read_json_lines, run_name
from paper.scales import PAPER, Options
from paper.table_specs import build_tables, cell_configs, list_cells
from paper.tuning import ChoiceStore, TuningJob, TuningPlan, candidate_config, grid_candidates, plan_rungs

RECORDS = Path(__file__).parents[2] / "paper" / "records"
JOBS = {TuningJob.for_cell(cell): cell for table in build_tables(PAPER).values() for cell in list_cells(table)}


def recorded_runs(path: Path) -> Iterator[str]:
    for changes in read_json_lines(path, lambda content: content["config"]):
        yield run_name(read_changes(changes))


def archived_names(path: Path) -> list[str]:
    with np.load(path) as archive:
        return [name for name in archive.files if not name.startswith("labels/")]


def list_unfinished(job: TuningJob) -> list[tuple[Options, int]]:
    """Every candidate in every rung of a job whose tuning has begun at most: its runs go on from there."""
    plan = TuningPlan.parse(JOBS[job].grid, PAPER)
    candidates = grid_candidates(job.row, plan.grid)
    return [(settings, cycles) for _, cycles in plan_rungs(len(candidates), plan.budget) for settings in candidates]


def test_every_record_belongs_somewhere() -> None:
    """What an older setting has left behind is to be deleted."""
    choices, used = ChoiceStore(RecordStore(RECORDS), PAPER), set[str]()
    for table in build_tables(PAPER).values():
        for cell in list_cells(table):
            settings = choices.chosen_settings(TuningJob.for_cell(cell))
            used |= {run_name(config) for case in cell_configs(PAPER, cell, settings, (0, 1, 2)) for config in case}
    for job in JOBS:
        choice = choices.find_choice(job)
        trials = [(each["settings"], each["cycles"]) for each in choice.trials] if choice else list_unfinished(job)
        used |= {run_name(candidate_config(PAPER, job, *trial)) for trial in trials}
    recorded = {run for path in RECORDS.glob("*.jsonl") if "choices" not in path.name for run in recorded_runs(path)}
    ranked = {name.partition("/")[2] for path in RECORDS.glob("*.npz") for name in archived_names(path)}
    assert sorted((recorded | ranked) - used) == []


def test_every_choice_is_over_the_grid_that_its_column_has() -> None:
    """A grid that was changed later does not reach what was chosen before: that is to be deleted, and made anew."""
    choices = ChoiceStore(RecordStore(RECORDS), PAPER)
    for job, cell in JOBS.items():
        if choice := choices.find_choice(job):
            plan = TuningPlan.parse(cell.grid, PAPER)
            assert (job.name, choice.grid, choice.budget) == (job.name, *plan)


def test_every_choice_stands_and_belongs_to_a_row() -> None:
    choices = ChoiceStore(RecordStore(RECORDS), PAPER)
    found = {job.name: (job, choice) for job in JOBS if (choice := choices.find_choice(job))}
    assert sorted(found) == sorted(choices.by_name)
    assert [key for key, (job, choice) in found.items() if not choices.is_current(job, choice)] == []
