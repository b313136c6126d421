"""What each row is run with: chosen on validation AUC by successive halving, and recorded.

It is chosen once per dataset, and by itself for columns that ask for that.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.halving import FULL_LENGTH, GRIDS, HalvingResult, Trial, check_budget, grid_candidates, halve_candidates
from paper.records import REMEDY, JsonLines, RecordStore, name_damage
from paper.run_queue import RunQueue
from paper.scales import Options, Scale
from paper.table_specs import CellSpec, Row, TableSpec, list_cells

LOG = logging.getLogger("fedauc")

DEFAULT_BUDGET = 120
"""Cycles that a row may spend where none are named."""


@dataclass(frozen=True)
class TuningPlan:
    """A grid, and the cycles that each row may spend on it; 0 for the usual ones.

    >>> Tuning.read("steps:90")
    Tuning(grid='steps', cycles=90)
    """

    grid: str = "steps"
    cycles: int = 0

    def row_budget(self, scale: Scale) -> int:
        """The cycles of a row: a whole run per learning rate for the grids of such, otherwise 120."""
        return self.cycles or FULL_LENGTH.get(self.grid, 0) * scale.cycles or DEFAULT_BUDGET

    @staticmethod
    def parse(text: str) -> TuningPlan:
        """From `grid` or `grid:cycles`."""
        grid, _, cycles = text.partition(":")
        lookup("grid", grid, dict.fromkeys(GRIDS))
        if cycles and not cycles.isdecimal():
            raise ValueError(f"tuning is {text!r}; it must be a grid and cycles, such as steps:120")
        if cycles and not int(cycles):
            raise ValueError(f"tuning is {text!r}; it needs at least a cycle for each candidate")
        return TuningPlan(grid, int(cycles or 0))


Game = Generator[Trial, Sequence[float | None], HalvingResult]
"""A halving between its trials."""


class TuningJob(NamedTuple):
    """A row to tune on a dataset, with its labels as they are and dir = 0.5; or in the case of a column."""

    dataset: str
    entry: Row
    column: str = ""
    case: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def for_cell(cell: CellSpec) -> TuningJob:
        """What gives a cell its settings."""
        entry, column = cell
        if not column.tuned_case:
            return TuningJob(column.dataset, entry)
        return TuningJob(column.dataset, entry, column.name, tuple(sorted(column.tuned_case.items())))

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.column or self.dataset}-{self.entry.name}"


@dataclass(frozen=True)
class TuningChoice:
    """The values chosen, the rungs they came through, and what that cost."""

    settings: Options
    grid: str
    budget: int
    trials: tuple[dict[str, Any], ...] = ()
    runs: int = 0
    cycles: int = 0
    seconds: float = 0.0


class TuningCost(NamedTuple):
    """Runs, their cycles, and the seconds they took."""

    runs: int
    cycles: int
    seconds: float


class ChoiceStore:
    """The choices of one scale, in one file of JSON lines beside the records. The last line of a job counts."""

    def __init__(self, store: RecordStore, scale: Scale) -> None:
        self._store, self._scale = store, scale
        self._lines = JsonLines(store.path / f"{scale.name}-choices.jsonl")
        self._read_size, self._choices = 0, dict[str, TuningChoice]()

    def list_choices(self) -> dict[str, TuningChoice]:
        """Every choice by the name of its job. The file is read again when it has grown."""
        path = self._lines.path
        size = path.stat().st_size if path.is_file() else 0
        if size != self._read_size:
            self._choices = {}
            for position, content in self._lines.read_objects():
                with name_damage(position, REMEDY):
                    job, trials = content.pop("job"), tuple(content.pop("trials"))
                    self._choices[job] = TuningChoice(trials=trials, **content)
            self._read_size = size
        return self._choices

    def find_choice(self, job: TuningJob) -> TuningChoice | None:
        """What was chosen, if anything was."""
        return self.list_choices().get(job.name)

    def find_or_inherit(self, job: TuningJob) -> TuningChoice | None:
        """What was chosen; for a column by itself, or until then for its dataset."""
        return self.find_choice(job) or (self.find_choice(TuningJob(job.dataset, job.entry)) if job.column else None)

    def chosen_settings(self, job: TuningJob) -> Options:
        """The chosen values, or none: the method's defaults."""
        found = self.find_or_inherit(job)
        return found.settings if found else {}

    def add_choice(self, job: TuningJob, choice: TuningChoice) -> None:
        """Record a choice."""
        self._lines.append_object({"job": job.name, **asdict(choice)})

    def is_current(self, job: TuningJob, choice: TuningChoice) -> bool:
        """Whether the runs it was made from are those that the scale would make today."""
        return all(
            record is not None and (record.final_point and record.final_point.validation_auc) == each["validation_auc"]
            for each in choice.trials
            for record in [
                self._store.find_record(candidate_config(self._scale, job, each["settings"], each["cycles"]))
            ]
        )

    def total_cost(self, chosen: Mapping[TuningJob, TuningChoice]) -> TuningCost:
        """Of several choices together: a run that serves two rows is counted once."""
        found = {
            config: self._store.find_record(config)
            for job, choice in chosen.items()
            for each in choice.trials
            for config in [candidate_config(self._scale, job, each["settings"], each["cycles"])]
        }
        seconds = sum(record.seconds for record in found.values() if record)
        return TuningCost(len(found), sum(config.recipe.cycles for config in found), seconds)


def tune_rows(sheets: Iterable[TableSpec], scale: Scale, shop: RunQueue, asked: TuningPlan | None) -> ChoiceStore:
    """Choose for every row and dataset of the sheets, and for columns that are tuned by themselves.

    What was chosen stays, unless another tuning is asked for, and that is said; `none` is not another. Of a sheet with
    columns that are tuned by themselves this is for those alone, as its dataset's choice is that of all tables. Where a
    choice's runs would be others today, or their records are gone, it is made anew over its own grid.
    """
    choices = ChoiceStore(shop.store, scale)
    wanted, meant = dict[TuningJob, TuningPlan](), set[TuningJob]()
    for sheet in sheets:
        jobs = {TuningJob.for_cell(cell): cell for cell in list_cells(sheet)}
        wanted |= {job: TuningPlan.parse(cell.column.grid) for job, cell in jobs.items()}
        meant |= {job for job in jobs if job.column} or jobs.keys()
    if asked:
        check_budget(asked.grid, asked.row_budget(scale), [job.entry for job in meant])
        wanted |= dict.fromkeys(meant, asked)
    games: dict[TuningJob, Game] = {}
    for job, plan in wanted.items():
        found = choices.find_choice(job)
        if found is not None and (plan.grid == "none" or not (asked and job in meant)):
            wanted[job] = plan = TuningPlan(found.grid, found.budget)
        same = found is not None and (found.grid, found.budget) == (plan.grid, plan.row_budget(scale))
        if found is not None and not same and found.grid != "none":
            LOG.info("%s was tuned over %s:%d; from now on over %s", job.name, found.grid, found.budget, plan.grid)
        if found is None or not same or not choices.is_current(job, found):
            games[job] = halve_candidates(grid_candidates(job.entry, plan.grid), plan.row_budget(scale))
    answers: dict[TuningJob, list[float | None] | None] = dict.fromkeys(games)
    while answers:
        trials = dict[TuningJob, list[Config]]()
        for job, answer in answers.items():
            try:
                # The first send of a generator takes None.
                trials[job] = _trial_configs(scale, job, games[job].send(answer))  # type: ignore[arg-type]
            except StopIteration as over:
                choices.add_choice(job, _make_choice(scale, job, wanted[job], over.value, shop.store))
        # All rows at once, so that those of several datasets may share a graph. Whole runs of a dataset are a table's.
        for tested in (True, False):
            shop.run_missing(
                [config for job in trials for config in trials[job] if _keeps_ranks(scale, job, config) == tested],
                tested,
            )
        answers = {job: [_validation_auc(shop.store, config) for config in configs] for job, configs in trials.items()}
    return choices


def _keeps_ranks(scale: Scale, job: TuningJob, config: Config) -> bool:
    return config.recipe.cycles == scale.cycles and not job.column


def _trial_configs(scale: Scale, job: TuningJob, trial: Trial) -> list[Config]:
    return [candidate_config(scale, job, each, trial.cycles) for each in trial.candidates]


def candidate_config(scale: Scale, job: TuningJob, settings: Options, cycles: int) -> Config:
    """A candidate's run: evaluated at its end alone, and too short to be worth a checkpoint, unless it is whole.

    Cycles are of a run of the scale's length: where a column has others, it has the same share of them.
    """
    case = dict(job.case)
    own = max(1, round(cycles * int(case.get("cycles", scale.cycles)) / scale.cycles))
    brief = dict.fromkeys(("cycles", "evaluate-every"), str(own))
    given = {**job.entry.settings, **settings, **case, **({} if cycles == scale.cycles else brief)}
    return scale.build_config(job.dataset, job.entry.method, given)


def _validation_auc(store: RecordStore, config: Config) -> float | None:
    """Never the test AUC: without a validation part there is no tuning."""
    record = store.find_record(config)
    assert record is not None
    if record.final_point is None:
        return None
    if record.final_point.validation_auc is None:
        raise ValueError(f"{config.data.name} has no validation part to tune on: use --tuning none")
    return record.final_point.validation_auc


def _make_choice(
    scale: Scale, job: TuningJob, tuning: TuningPlan, winner: HalvingResult, store: RecordStore
) -> TuningChoice:
    configs = [candidate_config(scale, job, each.settings, each.cycles) for each in winner.trials]
    return TuningChoice(
        settings=winner.settings,
        grid=tuning.grid,
        budget=tuning.row_budget(scale),
        trials=tuple(each._asdict() for each in winner.trials),
        runs=len(winner.trials),
        cycles=sum(config.recipe.cycles for config in configs),
        seconds=round(sum(record.seconds for config in configs if (record := store.find_record(config))), 3),
    )
