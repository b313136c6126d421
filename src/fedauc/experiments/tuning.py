"""Tuning: Optuna proposes the settings of one run after the other, and ranks them by the validation metric.

A folder of a tuning holds

    tuning.json    the configuration that all trials start from, and the search space
    study.db       Optuna's study (sqlite): what was tried, and how good it was
    trial-0000/    a run folder per trial
    table.md       the trials, the best first

so that a tuning that was interrupted goes on where it was: a trial that has begun is resumed from its checkpoint. The
proposals for a trial depend on the seed, its number and the trials before it, so they are the same as without a break.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fedauc import keys
from fedauc.experiments.config import Config
from fedauc.experiments.decisions import describe_private_runs, log_once
from fedauc.experiments.folder import RunFolder, check_new_folder, encode_json
from fedauc.experiments.options import build_config
from fedauc.experiments.run_loop import Observer, Progress, RunPaused
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.search_space import Dimension, SearchSpace
from fedauc.files import move_folder, write_atomically
from fedauc.guards import TrainingStopped
from fedauc.locks import hold_lock
from fedauc.metrics import parse_metrics

if TYPE_CHECKING:
    import optuna

NAME, STUDY = "tuning.json", "study.db"

TRIALS_BEFORE_PRUNING = 5
"""Finished trials before one is compared with their median."""


class TrialPruned(RunPaused):
    """A trial is below the median of those before it."""


class TrialSummary(NamedTuple):
    """A trial: its number, its options as texts, its state in a word, and its value where it has one."""

    number: int
    options: Mapping[str, str]
    state: str
    value: float | None


class Tuning:
    """A folder of trials that is there already."""

    def __init__(self, path: Path) -> None:
        self.path = path
        document = self._read_file()
        self.trials: int = document["trials"]
        self.prune: bool = document["prune"]
        base = Config.from_json(json.dumps(document["base"]), str(path / NAME))
        self.space = SearchSpace(base, tuple(Dimension.parse(text) for text in document["search"]))

    @staticmethod
    def open_or_create(path: Path, space: SearchSpace, trials: int, prune: bool = False) -> Tuning:
        """The tuning of a new folder, or of one that the same command has made; its number of trials may have grown."""
        import_optuna()
        if trials < 1:
            raise ValueError(f"trials is {trials}; it must be a whole number of at least 1: raise trials")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("a tuning runs in one process; start it without torchrun")
        document = {
            "trials": trials,
            "prune": prune,
            "search": [dimension.to_text() for dimension in space.dimensions],
            "base": space.base.to_document(),
        }
        if not space.dimensions:
            raise ValueError("search is empty: every option of the default search is fixed; give --search")
        if Tuning.is_tuning(path):
            _check_same_tuning(path, document)
        else:
            check_new_folder(path)
            _check_validation_rows(space.base)
            part = path.with_name(f".{path.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            write_atomically(part / NAME, encode_json(document).encode())
            move_folder(part, path)
        return Tuning(path)

    @staticmethod
    def is_tuning(path: Path) -> bool:
        """Whether a folder holds a tuning."""
        return (path / NAME).is_file()

    @property
    def label(self) -> str:
        """What the metric that decides is called."""
        return parse_metrics(self.space.base.metrics)[0].label

    def run_trials(self, observer: Callable[[str], Observer] = lambda name: lambda progress: None) -> None:
        """Train the remaining trials, beginning with one that was interrupted."""
        optuna = import_optuna()
        for sentence in describe_private_runs([self.space.base.recipe] * self.trials):
            log_once(sentence)
        busy = f"{self.path} is in use by process {{pid}}; wait until it ends, or stop that process"
        with hold_lock(self.path / ".lock", busy):
            study, cache = self._load_study(), DataCache()
            while True:
                waiting = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
                finished = len(study.get_trials(deepcopy=False)) - len(waiting)
                if finished >= self.trials:
                    return
                # A sampler of its own, so that the proposals of a trial are the same after a break.
                seed = keys.random_integer(self.space.base.recipe.seed, "tuning", finished) % 2**32
                study.sampler = optuna.samplers.TPESampler(seed=seed)
                trial = optuna.trial.Trial(study, waiting[0]._trial_id) if waiting else study.ask()
                self._run_trial(study, trial, observer(f"trial {trial.number}"), cache)

    def list_trials(self) -> list[TrialSummary]:
        """The trials, the best first; those without a value come last."""
        states = {"COMPLETE": "done", "PRUNED": "stopped", "RUNNING": "unfinished", "FAIL": "stopped"}
        if not (self.path / STUDY).is_file():
            return []
        summaries = [
            TrialSummary(trial.number, trial.user_attrs.get("options", {}), states[trial.state.name], trial.value)
            for trial in self._load_study().get_trials(deepcopy=False)
        ]
        done = [trial for trial in summaries if trial.state == "done" and trial.value is not None]
        others = [trial for trial in summaries if trial not in done]
        return [*sorted(done, key=lambda trial: -(trial.value or 0.0)), *others]

    def open_run(self, number: int) -> RunFolder:
        """The run folder of a trial."""
        return RunFolder.open(self.path / name_trial(number))

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial, observe: Observer, cache: DataCache) -> None:
        """Train one trial to its end, and tell the study how good it is."""
        optuna = import_optuna()
        options = self.space.propose(trial)
        trial.set_user_attr("options", options)
        path = self.path / name_trial(trial.number)
        reported = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)

        def observe_round(progress: Progress) -> None:
            # Test metrics are shown for the best trial alone, so that they choose nothing.
            progress = progress._replace(column=self._column, label=f"validation {self.label}")
            observe(progress)
            record = progress.record
            if record is None or record["round"] in reported or progress.done == progress.rounds:
                return
            if record[self._column] is None:
                # Noise can hide the value of a private evaluation.
                return
            reported.add(record["round"])
            trial.report(record[self._column], record["round"])
            if self.prune and trial.should_prune():
                observe(progress._replace(stopped=True))
                raise TrialPruned

        try:
            config = build_config(None, self.space.base, options)
            run = Run.resume(path, cache) if path.is_dir() else Run.create(config, path, cache)
            final = run.train_to_end(observe_round)["final"]
        except (TrialPruned, TrainingStopped):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        if final[self._column] is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, final[self._column])

    @property
    def _column(self) -> str:
        return f"validation_{parse_metrics(self.space.base.metrics)[0].columns[0]}"

    def _load_study(self) -> optuna.Study:
        module = import_optuna()
        study: optuna.Study = module.create_study(
            storage=f"sqlite:///{self.path / STUDY}",
            study_name="fedauc",
            direction="maximize",
            load_if_exists=True,
            pruner=module.pruners.MedianPruner(n_startup_trials=TRIALS_BEFORE_PRUNING),
        )
        return study

    def _read_file(self) -> dict[str, Any]:
        path = self.path / NAME
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            content["base"], content["search"], content["trials"], content["prune"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); start the tuning again in another folder") from error
        return content


def import_optuna() -> ModuleType:
    """Optuna, which comes with the extra `tune`; it prints no lines of its own."""
    try:
        import optuna
    except ImportError:
        raise ValueError("tuning needs optuna: run pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def name_trial(number: int) -> str:
    """The folder of a trial.

    >>> name_trial(7)
    'trial-0007'
    """
    return f"trial-{number:04d}"


def _check_same_tuning(path: Path, document: dict[str, Any]) -> None:
    """Refuse another search in the same folder; more trials are written down."""
    began = json.loads((path / NAME).read_text())
    changed = [key for key in document if key != "trials" and began.get(key) != document[key]]
    if changed:
        what = "the search" if changed[0] == "search" else "the configuration" if changed[0] == "base" else changed[0]
        raise ValueError(f"{path} holds a tuning that began with another value of {what}; choose another path")
    if document["trials"] != began["trials"]:
        write_atomically(path / NAME, encode_json(document).encode())


def _check_validation_rows(config: Config) -> None:
    """Refuse data without validation rows: the test rows must not choose the settings that they judge."""
    if DataCache().prepare_data(config).split.validation is None:
        has_option = hasattr(config.data, "validation_fraction")
        remedy = "give --data.validation-fraction 0.2" if has_option else "use data with a validation part"
        raise ValueError(
            f"data {config.data.name!r} has no validation rows, by which a tuning ranks its trials: {remedy}"
        )
