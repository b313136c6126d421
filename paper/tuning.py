"""The settings of each row: chosen on validation AUC by successive halving, once per dataset, and recorded.

Successive halving (Jamieson and Talwalkar 2016) trains many candidates for a few cycles, and the best third for more. A
budget of cycles is spent evenly over the rungs, so that methods with few candidates and with many cost the same. Each
rung trains its candidates anew, with a whole schedule of learning rates in so many cycles. Columns that ask for it,
such as the points of a figure, have settings of their own.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fedauc.algorithms import find_methods
from fedauc.algorithms.minimax import ProximalStep
from fedauc.algorithms.pairwise import Pairwise
from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.records import CHOICES_SUFFIX, RecordStore, append_json_line, read_json_lines
from paper.run_queue import RunQueue
from paper.scales import Options, Scale
from paper.table_specs import CellSpec, Row, TableSpec, list_cells

LOG = logging.getLogger("fedauc")

REDUCTION = 3
"""One candidate in so many reaches the next rung."""

Trial = dict[str, Any]
"""A candidate's `settings` and `cycles` in a rung, and its `validation_auc` afterwards, which is None if it stopped."""


def plan_rungs(candidates: int, budget: int) -> list[tuple[int, int]]:
    """The candidates of each rung, and the cycles of each candidate: every rung has an even share of the budget.

    >>> plan_rungs(12, 120), plan_rungs(1, 120)
    ([(12, 3), (4, 10), (2, 20)], [])
    """
    sizes = []
    while candidates > 1:
        sizes.append(candidates)
        candidates = math.ceil(candidates / REDUCTION)
    return [(size, max(1, budget // len(sizes) // size)) for size in sizes]


def plan_next_rung(
    candidates: Sequence[Options], budget: int, trials: Sequence[Trial]
) -> tuple[Sequence[Options], int]:
    """The candidates and the cycles of the next rung, after the trials of all earlier ones; 0 cycles for a winner.

    The earlier one wins a tie, and candidates whose runs stopped are out. If all of them stopped, the last wins: grids
    end with the smallest learning rate.
    """
    remaining, later_trials = candidates, trials
    for _, cycles in plan_rungs(len(candidates), budget):
        if not later_trials:
            return remaining, cycles
        rung, later_trials = later_trials[: len(remaining)], later_trials[len(remaining) :]
        finished = [position for position, trial in enumerate(rung) if trial["validation_auc"] is not None]
        if not finished:
            return remaining[-1:], 0
        best = sorted(finished, key=lambda position: -rung[position]["validation_auc"])
        remaining = [remaining[position] for position in sorted(best[: math.ceil(len(remaining) / REDUCTION)])]
    return remaining, 0


# --------------------------------------------------------------------------------------------------------------- grids

FINE = ("1", "0.3", "0.1", "0.03", "0.01", "0.003", "0.001")

LEARNING_RATES = {
    "steps": ("0.1", "0.01", "0.001"),
    "wide": ("1", "0.1", "0.01", "0.001"),
    "wider": ("100", "10", "1", "0.1", "0.01", "0.001"),
    "fine": FINE,
    "long": FINE[1:-1],
    "paper": ("0.1", "0.01", "0.001"),
}
"""The learning rates of each grid. `long` has fewer other values too, for longer rungs; `paper` has stages too."""

FULL_LENGTH = {"full": 2, "lower": 3}
"""Grids of runs of full length, and how many learning rates they have: the method's default and smaller ones."""

FIXED = {"objective.scale": "1", "algorithm.prox": "0.01", "algorithm.amplify": "1.5"}
"""The other values in runs of full length, where only the learning rate is tuned."""

STAGES = {"stages.initial": ("1", "10", "50"), "stages.decay": ("0.1", "0.2", "0.5"), "stages.scale": ("2", "5", "10")}


def grid_learning_rates(grid: str, default: float) -> tuple[str, ...]:
    """The learning rates of a grid, largest first; `default` is the method's own.

    >>> grid_learning_rates("full", 0.1), grid_learning_rates("full", 0.05), grid_learning_rates("lower", 0.01)
    (('0.1', '0.03'), ('0.03', '0.01'), ('0.01', '0.003', '0.001'))
    """
    if grid not in FULL_LENGTH:
        return LEARNING_RATES[grid]
    starts = range(len(FINE) - FULL_LENGTH[grid] + 1)
    nearest = min(starts, key=lambda start: abs(math.log(float(FINE[start]) / default)))
    return FINE[nearest : nearest + FULL_LENGTH[grid]]


def grid_candidates(row: Row, grid: str) -> list[Options]:
    """The candidates of a row: learning rates for all, λ for the sigmoid loss, ρ for the minimax methods.

    The paper does not define ρ; the proximal weight is nearest. Nor does it name the amplification, which its
    baselines' own papers tune. Options that the row sets itself are not tuned.
    """
    if grid == "none":
        return [{}]
    method = find_methods()[row.method]
    minimax, pairwise = issubclass(method.algorithm, ProximalStep), issubclass(method.algorithm, Pairwise)
    axes: dict[str, Sequence[str]] = {}
    if pairwise and "objective" not in row.settings:
        axes["objective.scale"] = ("1", "0.1", "0.01", "0.001")
    if minimax:
        axes["algorithm.prox"] = ("0.1", "0.01", "0.001")
    if row.method in ("a-fedavg", "a-scaffold"):
        axes["algorithm.amplify"] = ("1.5", "2", "3")
    if grid == "long":
        axes = {name: values[:2] for name, values in axes.items()}
    if grid in FULL_LENGTH:
        axes = {name: (FIXED[name],) for name in axes}
    axes = {"learning-rate": grid_learning_rates(grid, method.learning_rate), **axes}
    axes = {name: values for name, values in axes.items() if name not in row.settings}
    staged = grid == "paper" and (minimax or pairwise)
    axes |= STAGES if staged else {}
    common = {"stages": "geometric"} if staged else {}
    return [{**common, **dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())]


class TuningPlan(NamedTuple):
    """A grid, and the cycles that each row may spend on it."""

    grid: str
    budget: int

    @staticmethod
    def parse(text: str, scale: Scale) -> TuningPlan:
        """Read `grid` or `grid:cycles`; by default 120 cycles, or a full run per rate of `full` and `lower`.

        `grid:3x` has the cycles of three runs of full length.
        """
        grid, _, cycles = text.partition(":")
        if cycles.endswith("x") and cycles[:-1].isdecimal():
            cycles = str(int(cycles[:-1]) * scale.cycles)
        lookup("grid", grid, dict.fromkeys(("none", *LEARNING_RATES, *FULL_LENGTH)))
        if cycles and not cycles.isdecimal():
            raise ValueError(f"tuning is {text!r}; it must be a grid and cycles, such as steps:120 or steps:3x")
        if cycles and not int(cycles):
            raise ValueError(f"tuning is {text!r}; it needs at least a cycle for each candidate")
        return TuningPlan(grid, int(cycles or FULL_LENGTH.get(grid, 0) * scale.cycles or 120))

    def check_budget(self, rows: Iterable[Row]) -> None:
        """Refuse a budget with less than one cycle for each candidate of a row, and name one that is enough for all."""
        most = max(len(grid_candidates(row, self.grid)) for row in rows)
        if self.budget < (needed := most * len(plan_rungs(most, 0))):
            remedy = f"use --tuning {self.grid}:{needed}"
            raise ValueError(f"tuning has {self.budget} cycles; {most} candidates need at least {needed}: {remedy}")


# ------------------------------------------------------------------------------------------------------------- choices


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
    trials: Sequence[Trial] = ()
    runs: int = 0
    cycles: int = 0
    seconds: float = 0.0


class ChoiceStore:
    """The choices of one scale, in one file of JSON lines beside the records. The last line of a job counts."""

    def __init__(self, store: RecordStore, scale: Scale) -> None:
        self.store, self.scale = store, scale
        self._path = store.path / f"{scale.name}{CHOICES_SUFFIX}.jsonl"
        self.by_name = self._read_choices()

    def find_choice(self, job: TuningJob) -> TuningChoice | None:
        """The choice of a job, if there is one."""
        return self.by_name.get(job.name)

    def find_or_inherit(self, job: TuningJob) -> TuningChoice | None:
        """The choice of a job; a column that has none yet inherits that of its dataset."""
        return self.find_choice(job) or (self.find_choice(TuningJob(job.dataset, job.row)) if job.column else None)

    def chosen_settings(self, job: TuningJob) -> Options:
        """The chosen settings; without a choice they are the method's defaults."""
        choice = self.find_or_inherit(job)
        return choice.settings if choice else {}

    def add_choice(self, job: TuningJob, choice: TuningChoice) -> None:
        """Record a choice."""
        append_json_line(self._path, {"job": job.name, **asdict(choice)})
        self.by_name[job.name] = choice

    def merge(self, source: ChoiceStore) -> int:
        """Add the choices that another folder has in addition to this one's, or newer; return their number."""
        lines = read_json_lines(self._path, dict)
        new_lines = [line for line in read_json_lines(source._path, dict) if line not in lines]
        for line in new_lines:
            append_json_line(self._path, line)
        self.by_name = self._read_choices()
        return len(new_lines)

    def _read_choices(self) -> dict[str, TuningChoice]:
        def decode(content: dict[str, Any]) -> tuple[str, TuningChoice]:
            return content.pop("job"), TuningChoice(**content)

        return dict(read_json_lines(self._path, decode))

    def add_result(self, job: TuningJob, plan: TuningPlan, settings: Options, trials: Sequence[Trial]) -> None:
        """Record the settings that won, with the trials and their cost."""
        choice = TuningChoice(settings, *plan, trials, len(trials))
        _, cycles, seconds = self.total_cost({job: choice})
        self.add_choice(job, replace(choice, cycles=cycles, seconds=round(seconds, 3)))

    def is_current(self, job: TuningJob, choice: TuningChoice) -> bool:
        """Whether the runs that led to a choice are recorded, and are those that the scale would make today."""
        for config, trial in zip(self._trial_configs(job, choice), choice.trials, strict=True):
            record = self.store.find_record(config)
            if record is None or (record.final_point and record.final_point.validation_auc) != trial["validation_auc"]:
                return False
        return True

    def total_cost(self, chosen: Mapping[TuningJob, TuningChoice]) -> tuple[int, int, float]:
        """Runs, cycles and seconds of several choices together. A run that serves two rows is counted once."""
        configs = {config for job, choice in chosen.items() for config in self._trial_configs(job, choice)}
        seconds = sum(record.seconds for config in configs if (record := self.store.find_record(config)))
        return len(configs), sum(config.recipe.cycles for config in configs), seconds

    def _trial_configs(self, job: TuningJob, choice: TuningChoice) -> list[Config]:
        return [candidate_config(self.scale, job, trial["settings"], trial["cycles"]) for trial in choice.trials]


def tune_rows(tables: Iterable[TableSpec], choices: ChoiceStore, queue: RunQueue, requested: TuningPlan | None) -> None:
    """Choose settings for every row on every dataset of the tables, and for columns that are tuned by themselves.

    A choice stays unless another plan is requested, which is logged; a request for `none` keeps it too. In a table with
    columns that are tuned by themselves, a request concerns those alone, because all tables share the choice for the
    dataset. A choice is made again over its own grid if its runs would be different today or have lost their records.
    """
    scale, plans = choices.scale, _plan_jobs(tables, choices, requested)
    trials = {job: list[Trial]() for job in plans}
    while trials:
        rungs = list[tuple[TuningJob, Trial, Config]]()
        for job in list(trials):
            candidates = grid_candidates(job.row, plans[job].grid)
            remaining, cycles = plan_next_rung(candidates, plans[job].budget, trials[job])
            if not cycles:
                choices.add_result(job, plans[job], remaining[0], trials.pop(job))
                continue
            for settings in remaining:
                trial = {"settings": settings, "cycles": cycles}
                rungs.append((job, trial, candidate_config(scale, job, settings, cycles)))
        # The runs of all jobs are queued together, so that several datasets may share a graph. A candidate of full
        # length is a table's run as well, and stores its ranks.
        full = [config for job, _, config in rungs if config.recipe.cycles == scale.cycles and not job.column]
        queue.run_missing(full, tested=True)
        queue.run_missing([config for _, _, config in rungs if config not in full], tested=False)
        for job, trial, config in rungs:
            trials[job].append(trial | {"validation_auc": _read_validation_auc(queue.store, config)})


def _plan_jobs(
    tables: Iterable[TableSpec], choices: ChoiceStore, requested: TuningPlan | None
) -> dict[TuningJob, TuningPlan]:
    """The plans of the jobs whose choice is still to be made, or to be made again."""
    grids, concerned = dict[TuningJob, str](), set[TuningJob]()
    for table in tables:
        jobs = {TuningJob.for_cell(cell): cell.grid for cell in list_cells(table)}
        grids |= jobs
        concerned |= {job for job in jobs if job.column} or jobs.keys()
    if requested:
        requested.check_budget(job.row for job in concerned)
    plans = {}
    for job, grid in grids.items():
        choice, is_requested = choices.find_choice(job), requested is not None and job in concerned
        plan = requested if requested and is_requested else TuningPlan.parse(grid, choices.scale)
        if choice is None:
            plans[job] = plan
            continue
        made = TuningPlan(choice.grid, choice.budget)
        if not is_requested or plan.grid == "none":
            plan = made
        if plan != made and choice.grid != "none":
            LOG.info("%s was tuned over %s:%d; from now on over %s", job.name, *made, plan.grid)
        if plan != made or not choices.is_current(job, choice):
            plans[job] = plan
    return plans


def candidate_config(scale: Scale, job: TuningJob, settings: Options, cycles: int) -> Config:
    """The run of a candidate, evaluated only at its end unless it has full length.

    `cycles` are those of a run of the scale's length: a column with more or fewer cycles has the same share of them.
    """
    case = dict(job.case)
    share = max(1, round(cycles * int(case.get("cycles", scale.cycles)) / scale.cycles))
    shortened = {} if cycles == scale.cycles else {"cycles": str(share), "evaluate-every": str(share)}
    return scale.build_config(job.dataset, job.row.method, {**job.row.settings, **settings, **case, **shortened})


def _read_validation_auc(store: RecordStore, config: Config) -> float | None:
    """The validation AUC at the end of a run, never its test AUC; None if it stopped."""
    record = store.find_record(config)
    assert record is not None
    if record.final_point and record.final_point.validation_auc is None:
        raise ValueError(f"{config.data.name} has no validation part to tune on: use --tuning none")
    return record.final_point and record.final_point.validation_auc
