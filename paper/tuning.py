"""What each row is run with: chosen on validation AUC by successive halving, and recorded.

It is chosen once per dataset, and by itself for columns that ask for that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.config import Config
from paper.halving import GRIDS, WHOLE, Trial, Winner, candidates, check_budget, halve
from paper.layout import Cell, Entry, Sheet, cells
from paper.records import Store, with_new_names
from paper.running import Workshop
from paper.scales import Scale, Texts

LOG = logging.getLogger("fedauc")

USUAL = 120
"""Cycles that a row may spend where none are named."""


@dataclass(frozen=True)
class Tuning:
    """A grid, and the cycles that each row may spend on it; 0 for the usual ones.

    >>> Tuning.read("steps:90")
    Tuning(grid='steps', cycles=90)
    """

    grid: str = "steps"
    cycles: int = 0

    def budget(self, scale: Scale) -> int:
        """The cycles of a row: a whole run per learning rate for the grids of such, otherwise 120."""
        return self.cycles or WHOLE.get(self.grid, 0) * scale.cycles or USUAL

    @staticmethod
    def read(text: str) -> Tuning:
        """From `grid` or `grid:cycles`."""
        grid, _, cycles = text.partition(":")
        lookup("grid", grid, dict.fromkeys(GRIDS))
        if cycles and not cycles.isdecimal():
            raise ValueError(f"tuning is {text!r}; it must be a grid and cycles, such as steps:120")
        if cycles and not int(cycles):
            raise ValueError(f"tuning is {text!r}; it needs at least a cycle for each candidate")
        return Tuning(grid, int(cycles or 0))


Game = Generator[Trial, Sequence[float | None], Winner]
"""A halving between its trials."""


class Job(NamedTuple):
    """A row to tune on a dataset, with its labels as they are and dir = 0.5; or in the case of a column."""

    dataset: str
    entry: Entry
    column: str = ""
    case: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(cell: Cell) -> Job:
        """What gives a cell its settings."""
        entry, column = cell
        if not column.tuned:
            return Job(column.dataset, entry)
        return Job(column.dataset, entry, column.name, tuple(sorted(column.tuned.items())))

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.column or self.dataset}-{self.entry.name}"


@dataclass(frozen=True)
class Choice:
    """The values chosen, the rungs they came through, and what that cost."""

    settings: Texts
    grid: str
    budget: int
    judged: tuple[dict[str, Any], ...] = ()
    runs: int = 0
    cycles: int = 0
    seconds: float = 0.0


class Cost(NamedTuple):
    """Runs, their cycles, and the seconds they took."""

    runs: int
    cycles: int
    seconds: float


class Choices:
    """The choices of one scale, a file each beside the records."""

    def __init__(self, store: Store, scale: Scale) -> None:
        self._store, self._scale = store, scale

    def get(self, job: Job) -> Choice | None:
        """What was chosen, if anything was."""
        path = self._path(job)
        if not path.is_file():
            return None
        try:
            return Choice(**with_new_names(json.loads(path.read_text())))
        except (ValueError, TypeError) as error:
            raise ValueError(f"choice {path} is damaged ({error}); delete it, and it is made again") from error

    def find(self, job: Job) -> Choice | None:
        """What was chosen; for a column by itself, or until then for its dataset."""
        return self.get(job) or (self.get(Job(job.dataset, job.entry)) if job.column else None)

    def settings(self, job: Job) -> Texts:
        """The chosen values, or none: the method's defaults."""
        found = self.find(job)
        return found.settings if found else {}

    def put(self, job: Job, choice: Choice) -> None:
        """Record a choice."""
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(asdict(choice), indent=1) + "\n").encode())

    def stands(self, job: Job, choice: Choice) -> bool:
        """Whether the runs it was made from are those that the scale would make today."""
        return all(
            record is not None and (record.final and record.final.validation_auc) == each["validation_auc"]
            for each in choice.judged
            for record in [self._store.get(_config(self._scale, job, each["settings"], each["cycles"]))]
        )

    def cost(self, chosen: Mapping[Job, Choice]) -> Cost:
        """Of several choices together: a run that serves two rows is counted once."""
        found = {
            config: self._store.get(config)
            for job, choice in chosen.items()
            for each in choice.judged
            for config in [_config(self._scale, job, each["settings"], each["cycles"])]
        }
        seconds = sum(record.seconds for record in found.values() if record)
        return Cost(len(found), sum(config.recipe.cycles for config in found), seconds)

    def _path(self, job: Job) -> Path:
        return self._store.path / "choices" / self._scale.name / f"{job.name}.json"


def tune(sheets: Iterable[Sheet], scale: Scale, shop: Workshop, asked: Tuning | None) -> Choices:
    """Choose for every row and dataset of the sheets, and for columns that are tuned by themselves.

    What was chosen stays, unless another tuning is asked for, and that is said; `none` is not another. Of a sheet with
    columns that are tuned by themselves this is for those alone, as its dataset's choice is that of all tables. Where a
    choice's runs would be others today, or their records are gone, it is made anew over its own grid.
    """
    choices = Choices(shop.store, scale)
    wanted, meant = dict[Job, Tuning](), set[Job]()
    for sheet in sheets:
        jobs = {Job.of(cell): cell for cell in cells(sheet)}
        wanted |= {job: Tuning.read(cell.column.grid) for job, cell in jobs.items()}
        meant |= {job for job in jobs if job.column} or jobs.keys()
    if asked:
        check_budget(asked.grid, asked.budget(scale), [job.entry for job in meant])
        wanted |= dict.fromkeys(meant, asked)
    games: dict[Job, Game] = {}
    for job, plan in wanted.items():
        found = choices.get(job)
        if found is not None and (plan.grid == "none" or not (asked and job in meant)):
            wanted[job] = plan = Tuning(found.grid, found.budget)
        same = found is not None and (found.grid, found.budget) == (plan.grid, plan.budget(scale))
        if found is not None and not same and found.grid != "none":
            LOG.info("%s was tuned over %s:%d; from now on over %s", job.name, found.grid, found.budget, plan.grid)
        if found is None or not same or not choices.stands(job, found):
            games[job] = halve(candidates(job.entry, plan.grid), plan.budget(scale))
    answers: dict[Job, list[float | None] | None] = dict.fromkeys(games)
    while answers:
        trials = dict[Job, list[Config]]()
        for job, answer in answers.items():
            try:
                # The first send of a generator takes None.
                trials[job] = _configs(scale, job, games[job].send(answer))  # type: ignore[arg-type]
            except StopIteration as over:
                choices.put(job, _choice(scale, job, wanted[job], over.value, shop.store))
        # All rows at once, so that those of several datasets may share a graph. Whole runs of a dataset are a table's.
        for tested in (True, False):
            shop.run(
                [config for job in trials for config in trials[job] if _tested(scale, job, config) == tested], tested
            )
        answers = {job: [_validation(shop.store, config) for config in configs] for job, configs in trials.items()}
    return choices


def _tested(scale: Scale, job: Job, config: Config) -> bool:
    return config.recipe.cycles == scale.cycles and not job.column


def _configs(scale: Scale, job: Job, trial: Trial) -> list[Config]:
    return [_config(scale, job, each, trial.cycles) for each in trial.candidates]


def _config(scale: Scale, job: Job, settings: Texts, cycles: int) -> Config:
    """A candidate's run: evaluated at its end alone, and too short to be worth a checkpoint, unless it is whole.

    Cycles are of a run of the scale's length: where a column has others, it has the same share of them.
    """
    case = dict(job.case)
    own = max(1, round(cycles * int(case.get("cycles", scale.cycles)) / scale.cycles))
    brief = dict.fromkeys(("cycles", "evaluate-every"), str(own))
    given = {**job.entry.settings, **settings, **case, **({} if cycles == scale.cycles else brief)}
    return scale.config(job.dataset, job.entry.method, given)


def _validation(store: Store, config: Config) -> float | None:
    """Never the test AUC: without a validation part there is no tuning."""
    record = store.get(config)
    assert record is not None
    if record.final is None:
        return None
    if record.final.validation_auc is None:
        raise ValueError(f"{config.data.name} has no validation part to tune on: use --tuning none")
    return record.final.validation_auc


def _choice(scale: Scale, job: Job, tuning: Tuning, winner: Winner, store: Store) -> Choice:
    configs = [_config(scale, job, each.settings, each.cycles) for each in winner.judged]
    return Choice(
        settings=winner.settings,
        grid=tuning.grid,
        budget=tuning.budget(scale),
        judged=tuple(each._asdict() for each in winner.judged),
        runs=len(winner.judged),
        cycles=sum(config.recipe.cycles for config in configs),
        seconds=round(sum(record.seconds for config in configs if (record := store.get(config))), 3),
    )
