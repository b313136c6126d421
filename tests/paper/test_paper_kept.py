"""The records in the repository: each belongs to a table, a figure or a choice, and choices are made from them."""

from __future__ import annotations

from pathlib import Path

from paper.layout import cells, runs
from paper.records import Store, name
from paper.scales import PAPER
from paper.sheets import SHEETS
from paper.tuning import Choices, Job, Tuning, _config

RESULTS = Path(__file__).parents[2] / "results"
JOBS = {Job.of(cell): cell for make in SHEETS.values() for cell in cells(make(PAPER))}


def test_every_record_belongs_somewhere() -> None:
    """What an older setting has left behind is to be deleted."""
    choices, used = Choices(Store(RESULTS), PAPER), set[str]()
    for make in SHEETS.values():
        for cell in cells(make(PAPER)):
            settings = choices.settings(Job.of(cell))
            used |= {name(config) for case in runs(PAPER, cell, settings, (0, 1, 2)) for config in case}
    for job in JOBS:
        choice = choices.get(job)
        for each in choice.judged if choice else ():
            used.add(name(_config(PAPER, job, each["settings"], each["cycles"])))
    kept = {file.stem for folder in ("runs", "ranks") for file in (RESULTS / folder).iterdir()}
    assert sorted(kept - used) == []


def test_every_choice_is_over_the_grid_that_its_column_has() -> None:
    """A grid that was changed later does not reach what was chosen before: that is to be deleted, and made anew."""
    choices = Choices(Store(RESULTS), PAPER)
    for job, cell in JOBS.items():
        if choice := choices.get(job):
            asked = Tuning.read(cell.column.grid)
            assert (job.name, choice.grid, choice.budget) == (job.name, asked.grid, asked.budget(PAPER))


def test_every_choice_stands_and_belongs_to_a_row() -> None:
    choices = Choices(Store(RESULTS), PAPER)
    found = {job.name: (job, choice) for job in JOBS if (choice := choices.get(job))}
    assert sorted(found) == sorted(file.stem for file in (RESULTS / "choices" / "paper").iterdir())
    assert [key for key, (job, choice) in found.items() if not choices.stands(job, choice)] == []
