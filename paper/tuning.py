"""The settings of each row: chosen on validation AUC by successive halving, once per dataset, and recorded.

Columns that ask for it, such as the points of a figure, have settings of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.halving import FULL_LENGTH, GRIDS, Bracket, HalvingResult, check_budget, grid_candidates, halve_candidates
from paper.records import REMEDY, JsonLines, RecordStore, name_damage
from paper.run_queue import RunQueue
from paper.scales import Options, Scale
from paper.table_specs import CellSpec, Row, TableSpec, list_cells

LOG = logging.getLogger("fedauc")

DEFAULT_BUDGET = 120
"""Cycles that a row may spend if none are named."""


@dataclass(frozen=True)
class TuningPlan:
    """A grid, and the cycles that each row may spend on it; 0 for the usual ones.

    >>> TuningPlan.parse("steps:90")
    TuningPlan(grid='steps', cycles=90)
    """

    grid: str = "steps"
    cycles: int = 0

    def row_budget(self, scale: Scale) -> int:
        """The cycles of a row: a full run per learning rate for grids of full length, otherwise 120."""
        return self.cycles or FULL_LENGTH.get(self.grid, 0) * scale.cycles or DEFAULT_BUDGET

    @staticmethod
    def parse(text: str) -> TuningPlan:
        """Read `grid` or `grid:cycles`."""
        grid, _, cycles = text.partition(":")
        lookup("grid", grid, dict.fromkeys(GRIDS))
        if cycles and not cycles.isdecimal():
            raise ValueError(f"tuning is {text!r}; it must be a grid and cycles, such as steps:120")
        if cycles and not int(cycles):
            raise ValueError(f"tuning is {text!r}; it needs at least a cycle for each candidate")
        return TuningPlan(grid, int(cycles or 0))


class TuningJob(NamedTuple):
    """A row to tune on a dataset with its original labels and dir = 0.5, or in the case of one column."""

    dataset: str
    row: Row
    column: str = ""
    case: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def for_cell(cell: CellSpec) -> TuningJob:
        """The job that decides the settings of a cell."""
        row, column = cell
        if not column.tuned_case:
            return TuningJob(column.dataset, row)
        return TuningJob(column.dataset, row, column.name, tuple(sorted(column.tuned_case.items())))

    @property
    def name(self) -> str:
        """The name of the job in the file of choices."""
        return f"{self.column or self.dataset}-{self.row.name}"


@dataclass(frozen=True)
class TuningChoice:
    """The chosen settings, the trials that led to them, and what those cost."""

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
        """The choice of a job, if there is one."""
        return self.list_choices().get(job.name)

    def find_or_inherit(self, job: TuningJob) -> TuningChoice | None:
        """The choice of a job; a column that has none yet inherits that of its dataset."""
        return self.find_choice(job) or (self.find_choice(TuningJob(job.dataset, job.row)) if job.column else None)

    def chosen_settings(self, job: TuningJob) -> Options:
        """The chosen settings; without a choice they are the method's defaults."""
        choice = self.find_or_inherit(job)
        return choice.settings if choice else {}

    def add_choice(self, job: TuningJob, choice: TuningChoice) -> None:
        """Record a choice."""
        self._lines.append_object({"job": job.name, **asdict(choice)})

    def is_current(self, job: TuningJob, choice: TuningChoice) -> bool:
        """Whether the runs that led to a choice are recorded, and are those that the scale would make today."""
        for config, trial in zip(self._trial_configs(job, choice), choice.trials, strict=True):
            record = self._store.find_record(config)
            if record is None or (record.final_point and record.final_point.validation_auc) != trial["validation_auc"]:
                return False
        return True

    def total_cost(self, chosen: Mapping[TuningJob, TuningChoice]) -> TuningCost:
        """The cost of several choices together. A run that serves two rows is counted once."""
        configs = {config for job, choice in chosen.items() for config in self._trial_configs(job, choice)}
        seconds = sum(record.seconds for config in configs if (record := self._store.find_record(config)))
        return TuningCost(len(configs), sum(config.recipe.cycles for config in configs), seconds)

    def _trial_configs(self, job: TuningJob, choice: TuningChoice) -> list[Config]:
        return [candidate_config(self._scale, job, trial["settings"], trial["cycles"]) for trial in choice.trials]


def tune_rows(tables: Iterable[TableSpec], scale: Scale, queue: RunQueue, requested: TuningPlan | None) -> ChoiceStore:
    """Choose settings for every row on every dataset of the tables, and for columns that are tuned by themselves.

    A choice stays unless another plan is requested, which is logged; a request for `none` keeps it too. In a table with
    columns that are tuned by themselves, a request concerns those alone, because all tables share the choice for the
    dataset. A choice is made again over its own grid if its runs would be different today or have lost their records.
    """
    choices, plans = ChoiceStore(queue.store, scale), _plan_jobs(tables, scale, requested)
    brackets = dict[TuningJob, Bracket]()
    for job, (plan, is_requested) in plans.items():
        choice = choices.find_choice(job)
        if choice is not None and (plan.grid == "none" or not is_requested):
            plan = TuningPlan(choice.grid, choice.budget)
            plans[job] = plan, is_requested
        same = choice is not None and (choice.grid, choice.budget) == (plan.grid, plan.row_budget(scale))
        if choice is not None and not same and choice.grid != "none":
            LOG.info("%s was tuned over %s:%d; from now on over %s", job.name, choice.grid, choice.budget, plan.grid)
        if choice is None or not same or not choices.is_current(job, choice):
            brackets[job] = halve_candidates(grid_candidates(job.row, plan.grid), plan.row_budget(scale))
    aucs: dict[TuningJob, list[float | None] | None] = dict.fromkeys(brackets)
    while aucs:
        configs = dict[TuningJob, list[Config]]()
        for job, answer in aucs.items():
            try:
                # The first send of a generator takes None.
                trial = brackets[job].send(answer)  # type: ignore[arg-type]
                configs[job] = [candidate_config(scale, job, each, trial.cycles) for each in trial.candidates]
            except StopIteration as end:
                choices.add_choice(job, _make_choice(scale, job, plans[job][0], end.value, queue.store))
        # The runs of all jobs are queued together, so that several datasets may share a graph. A candidate of full
        # length is a table's run as well, and stores its ranks.
        pairs = [(job, config) for job in configs for config in configs[job]]
        for tested in (True, False):
            is_tested = (config.recipe.cycles == scale.cycles and not job.column for job, config in pairs)
            queue.run_missing([pair[1] for pair, flag in zip(pairs, is_tested, strict=True) if flag == tested], tested)
        aucs = {job: [_validation_auc(queue.store, config) for config in tried] for job, tried in configs.items()}
    return choices


def _plan_jobs(
    tables: Iterable[TableSpec], scale: Scale, requested: TuningPlan | None
) -> dict[TuningJob, tuple[TuningPlan, bool]]:
    """The plan of every tuning job of the tables, and whether it was requested."""
    plans = dict[TuningJob, tuple[TuningPlan, bool]]()
    concerned = set[TuningJob]()
    for table in tables:
        jobs = {TuningJob.for_cell(cell): cell.column.grid for cell in list_cells(table)}
        plans |= {job: (TuningPlan.parse(grid), False) for job, grid in jobs.items()}
        concerned |= {job for job in jobs if job.column} or jobs.keys()
    if requested:
        check_budget(requested.grid, requested.row_budget(scale), [job.row for job in concerned])
        plans |= dict.fromkeys(concerned, (requested, True))
    return plans


def candidate_config(scale: Scale, job: TuningJob, settings: Options, cycles: int) -> Config:
    """The run of a candidate, evaluated only at its end unless it has full length.

    `cycles` are those of a run of the scale's length: a column with more or fewer cycles has the same share of them.
    """
    case = dict(job.case)
    share = max(1, round(cycles * int(case.get("cycles", scale.cycles)) / scale.cycles))
    shortened = {} if cycles == scale.cycles else {"cycles": str(share), "evaluate-every": str(share)}
    return scale.build_config(job.dataset, job.row.method, {**job.row.settings, **settings, **case, **shortened})


def _validation_auc(store: RecordStore, config: Config) -> float | None:
    """The validation AUC at the end of a run, never its test AUC; None if it stopped."""
    record = store.find_record(config)
    assert record is not None
    if record.final_point is None:
        return None
    if record.final_point.validation_auc is None:
        raise ValueError(f"{config.data.name} has no validation part to tune on: use --tuning none")
    return record.final_point.validation_auc


def _make_choice(
    scale: Scale, job: TuningJob, plan: TuningPlan, result: HalvingResult, store: RecordStore
) -> TuningChoice:
    configs = [candidate_config(scale, job, trial.settings, trial.cycles) for trial in result.trials]
    return TuningChoice(
        settings=result.settings,
        grid=plan.grid,
        budget=plan.row_budget(scale),
        trials=tuple(trial._asdict() for trial in result.trials),
        runs=len(result.trials),
        cycles=sum(config.recipe.cycles for config in configs),
        seconds=round(sum(record.seconds for config in configs if (record := store.find_record(config))), 3),
    )
