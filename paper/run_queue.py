"""Run what has no record yet, in shared graphs where that can be, within a time limit; then record it."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_group import plan_run_groups, train_run_group
from fedauc.experiments.run_loop import Observer, Progress, RunPaused
from fedauc.experiments.runner import DataCache, Run
from fedauc.locks import LockBusy, hold_lock
from paper.records import RecordStore, run_name


class OutOfTime(RunPaused):
    """The time limit came before the end; what is unfinished goes on from its checkpoint next time."""


@dataclass
class RunQueue:
    """Where runs are made: their records' store, a folder for unfinished ones, a device and the moment to stop.

    From its first run to its end, as a context, the folder is held: no other process may work there.
    """

    store: RecordStore
    work_folder: Path
    device: str
    observer: Callable[[str], Observer]
    deadline: float = float("inf")
    _load: DataCache = field(default_factory=DataCache)
    _held: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._held:
            self._held.close()

    def _lock_folder(self) -> None:
        if self._held is None:
            self.work_folder.mkdir(parents=True, exist_ok=True)
            remedy = "wait until it has ended, or start in another folder"
            with ExitStack() as held:
                busy = f"{self.work_folder} is in use by another process (pid {{pid}}); {remedy}"
                held.enter_context(hold_lock(self.work_folder / ".lock", busy))
                self._held = held.pop_all()

    def run_missing(self, configs: Iterable[Config], tested: bool = True) -> None:
        """Give every configuration a record, and ranks if it is tested. Runs of one shape share a graph."""
        missing, complete = list[Config](), list[Config]()
        for config in configs:
            (complete if self.store.is_complete(config, tested) else missing).append(config)
        self._remove_recorded(complete)
        # Runs on the same data one after another: the loader keeps the last.
        todo = {run_name(config): self._on_device(config) for config in sorted(missing, key=_data_key)}
        if not todo:
            return
        self._check_time()
        self._lock_folder()
        for group in plan_run_groups(todo, self._load):
            self._check_time()
            stopped = train_run_group({each: self._open_run(each, todo[each]) for each in group}, self._watch_deadline)
            for each in group:
                self.store.add_run(RunFolder.open(self.work_folder / each), stopped.get(each, ""), tested)
                _remove_folder(self.work_folder / each)
            # An engine and its lanes refer to each other: the next group may need their memory at once.
            gc.collect()

    def _remove_recorded(self, complete: Iterable[Config]) -> None:
        """Remove the folders of runs that are recorded: a process that is killed may leave them."""
        there = (
            {path.name for path in self.work_folder.iterdir() if path.is_dir()} if self.work_folder.is_dir() else set()
        )
        left = there and there & {run_name(config) for config in complete}
        # Whoever works there clears up too: it is no reason to stop, where everything has run.
        with suppress(LockBusy):
            for each in left:
                self._lock_folder()
                _remove_folder(self.work_folder / each)

    def _on_device(self, config: Config) -> Config:
        # Runs of an experiment share compiled steps, so that even short ones gain on a GPU.
        engine = config.recipe.engine if self.device == "cpu" else "graphed"
        return replace(config, recipe=replace(config.recipe, device=self.device, engine=engine))

    def _open_run(self, place: str, config: Config) -> Run:
        """A run from where it stood; one begun on another device, or half removed, starts anew."""
        path = self.work_folder / place
        if path.is_dir() and not ((path / "config.json").is_file() and RunFolder.open(path).config == config):
            _remove_folder(path)
        run = Run.resume(path, self._load) if path.is_dir() else Run.create(config, path, self._load)
        assert run.loop.checkpointer is not None
        # The result follows at once, and with a state per client a checkpoint of an image model is gigabytes.
        run.loop.checkpointer.at_end = False
        return run

    def _watch_deadline(self, place: str) -> Observer:
        observe = self.observer(place)

        def see(progress: Progress) -> None:
            observe(progress)
            # A run's last round is followed by its result: stopping there would lose it.
            if progress.done < progress.rounds and not progress.stopped:
                self._check_time()

        return see

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def _remove_folder(folder: Path) -> None:
    """Remove a run folder. Without a configuration it is none any more, should the rest stay behind."""
    (folder / "config.json").unlink(missing_ok=True)
    shutil.rmtree(folder)


def _data_key(config: Config) -> str:
    return repr((config.data, config.preparation, config.data_seed))
