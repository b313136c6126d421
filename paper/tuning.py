"""The settings of each row: chosen on validation AUC by successive halving, once per dataset, and recorded.

Successive halving (Jamieson and Talwalkar 2016) trains many candidates for a few cycles, and the best third for more. A
budget of cycles is spent evenly over the rungs, so that methods with few candidates and with many cost the same. Each
rung trains its candidates anew, with a whole schedule of learning rates in so many cycles. Columns that ask for it,
such as the points of a figure, have settings of their own.

>>> [(rung.candidates, rung.cycles) for rung in plan_rungs(12, 120)]
[(12, 3), (4, 10), (2, 20)]
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from fedauc.algorithms import find_methods
from fedauc.algorithms.minimax import ProximalStep
from fedauc.algorithms.pairwise import Pairwise
from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.records import REMEDY, JsonLines, RecordStore, name_damage
from paper.run_queue import RunQueue
from paper.scales import Options, Scale
from paper.table_specs import CellSpec, Row, TableSpec, list_cells

LOG = logging.getLogger("fedauc")

REDUCTION = 3
"""One candidate in so many reaches the next rung."""


class Rung(NamedTuple):
    """How many candidates a rung has, and for how many cycles each of them is trained."""

    candidates: int
    cycles: int


class Trial(NamedTuple):
    """Candidates that are to be trained for so many cycles."""

    candidates: tuple[Options, ...]
    cycles: int


class TrialResult(NamedTuple):
    """A candidate after a rung with its validation AUC, or None if its run stopped."""

    settings: Options
    cycles: int
    validation_auc: float | None


class HalvingResult(NamedTuple):
    """The settings that won, and the results of every rung."""

    settings: Options
    trials: tuple[TrialResult, ...]


def plan_rungs(candidates: int, cycles: int) -> list[Rung]:
    """The rungs down to one candidate, each with an even share of the cycles; a single candidate needs none."""
    if cycles < (needed := minimum_budget(candidates)):
        raise ValueError(f"tuning has {cycles} cycles; {candidates} candidates need at least {needed}: raise it")
    sizes = _rung_sizes(candidates)
    return [Rung(size, cycles // len(sizes) // size) for size in sizes]


def minimum_budget(candidates: int) -> int:
    """The fewest cycles that give every candidate one in the first rung.

    >>> minimum_budget(324), minimum_budget(1)
    (1944, 0)
    """
    return candidates * len(_rung_sizes(candidates))


def _rung_sizes(candidates: int) -> list[int]:
    return [candidates, *_rung_sizes(math.ceil(candidates / REDUCTION))] if candidates > 1 else []


Bracket = Generator[Trial, Sequence[float | None], HalvingResult]
"""A successive halving: it yields trials, is sent their validation AUCs, and returns the result."""


def halve_candidates(candidates: Sequence[Options], cycles: int) -> Bracket:
    """Choose among candidates. The earlier one wins a tie, and candidates whose runs stopped are out.

    If all of them stopped, the last wins: grids end with the smallest learning rate.
    """
    remaining, results = list(candidates), list[TrialResult]()
    for rung in plan_rungs(len(remaining), cycles):
        aucs = yield Trial(tuple(remaining), rung.cycles)
        results += [TrialResult(settings, rung.cycles, auc) for settings, auc in zip(remaining, aucs, strict=True)]
        finished = [(auc, position) for position, auc in enumerate(aucs) if auc is not None]
        if not finished:
            return HalvingResult(remaining[-1], tuple(results))
        best = sorted(finished, key=lambda pair: -pair[0])[: math.ceil(len(remaining) / REDUCTION)]
        remaining = [remaining[position] for position in sorted(position for _, position in best)]
    return HalvingResult(remaining[0], tuple(results))


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

GRIDS = ("none", *LEARNING_RATES, *FULL_LENGTH)

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


def check_budget(grid: str, cycles: int, rows: Iterable[Row]) -> None:
    """Refuse cycles that are too few for one of the rows, and name the number that is enough for all of them."""
    most = max(len(grid_candidates(row, grid)) for row in rows)
    if cycles < (needed := minimum_budget(most)):
        remedy = f"use --tuning {grid}:{needed}"
        raise ValueError(f"tuning has {cycles} cycles; {most} candidates need at least {needed}: {remedy}")


# ---------------------------------------------------------------------------------------------------- plans and choices

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

    def add_result(self, job: TuningJob, plan: TuningPlan, result: HalvingResult) -> None:
        """Record the result of a halving as a choice, with its cost."""
        trials = tuple(trial._asdict() for trial in result.trials)
        choice = TuningChoice(result.settings, plan.grid, plan.row_budget(self._scale), trials, len(trials))
        configs = self._trial_configs(job, choice)
        seconds = sum(record.seconds for config in configs if (record := self._store.find_record(config)))
        cycles = sum(config.recipe.cycles for config in configs)
        self.add_choice(job, replace(choice, cycles=cycles, seconds=round(seconds, 3)))

    def is_current(self, job: TuningJob, choice: TuningChoice) -> bool:
        """Whether the runs that led to a choice are recorded, and are those that the scale would make today."""
        for config, trial in zip(self._trial_configs(job, choice), choice.trials, strict=True):
            record = self._store.find_record(config)
            if record is None or (record.final_point and record.final_point.validation_auc) != trial["validation_auc"]:
                return False
        return True

    def total_cost(self, chosen: Mapping[TuningJob, TuningChoice]) -> tuple[int, int, float]:
        """Runs, cycles and seconds of several choices together. A run that serves two rows is counted once."""
        configs = {config for job, choice in chosen.items() for config in self._trial_configs(job, choice)}
        seconds = sum(record.seconds for config in configs if (record := self._store.find_record(config)))
        return len(configs), sum(config.recipe.cycles for config in configs), seconds

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
                choices.add_result(job, plans[job][0], end.value)
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
