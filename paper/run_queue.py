"""Run the configurations that have no record yet, in shared graphs where possible, and record them."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.run_group import plan_run_groups, train_run_group
from fedauc.experiments.run_loop import Observer, Progress, RunPaused
from fedauc.experiments.runner import DataCache, Run
from fedauc.locks import LockBusy, hold_lock
from paper.records import RecordStore, run_name


class OutOfTime(RunPaused):
    """The time limit was reached. Unfinished runs continue from their checkpoints next time."""


@dataclass
class RunQueue(AbstractContextManager["RunQueue"]):
    """Runs configurations on a device until a deadline: finished runs go to the store, unfinished ones to a folder.

    The queue is a context. From its first run to its end it locks the folder, so that no other process works there.
    """

    store: RecordStore
    work_folder: Path
    device: str
    observer: Callable[[str], Observer]
    deadline: float = float("inf")
    _data_cache: DataCache = field(default_factory=DataCache)
    _lock: ExitStack = field(default_factory=ExitStack)
    _is_locked: bool = False

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def run_missing(self, configs: Iterable[Config], tested: bool = True) -> None:
        """Give every configuration a record, and ranks if it is tested. Runs of the same shape share a graph."""
        missing = list[Config]()
        for config in configs:
            if self.store.is_complete(config, tested):
                self._remove_leftover(self.work_folder / run_name(config))
            else:
                missing.append(config)
        # Runs on the same data follow each other, because the cache holds one dataset.
        missing.sort(key=lambda config: repr((config.data, config.preparation, config.data_seed)))
        queued = dict[str, Config]()
        for config in missing:
            # The runs of a table share compiled steps, so that even short ones gain on a GPU.
            engine = config.recipe.engine if self.device == "cpu" else "graphed"
            recipe = replace(config.recipe, device=self.device, engine=engine)
            queued[run_name(config)] = replace(config, recipe=recipe)
        if not queued:
            return
        self._check_time()
        self._lock_folder()
        for group in plan_run_groups(queued, self._data_cache):
            self._check_time()
            stopped = train_run_group({name: self._open_run(name, queued[name]) for name in group}, self._observe_run)
            for name in group:
                self.store.add_run(RunFolder.open(self.work_folder / name), stopped.get(name, ""), tested)
                _remove_folder(self.work_folder / name)
            # An engine and its lanes refer to each other, and the next group may need their memory at once.
            gc.collect()

    def _lock_folder(self) -> None:
        if not self._is_locked:
            self.work_folder.mkdir(parents=True, exist_ok=True)
            remedy = "wait until it has ended, or start in another folder"
            busy = f"{self.work_folder} is in use by another process (pid {{pid}}); {remedy}"
            self._lock.enter_context(hold_lock(self.work_folder / ".lock", busy))
            self._is_locked = True

    def _remove_leftover(self, folder: Path) -> None:
        """Remove the folder of a recorded run, which a killed process may leave behind."""
        # If another process works there, it removes it; this is no reason to stop when everything has run.
        with suppress(LockBusy):
            if folder.is_dir():
                self._lock_folder()
                _remove_folder(folder)

    def _open_run(self, name: str, config: Config) -> Run:
        """Resume a run, or start it again if its folder is of another device or was removed in part."""
        path = self.work_folder / name
        if path.is_dir() and not ((path / "config.json").is_file() and RunFolder.open(path).config == config):
            _remove_folder(path)
        run = Run.resume(path, self._data_cache) if path.is_dir() else Run.create(config, path, self._data_cache)
        assert run.loop.checkpointer is not None
        # The result follows at once, and with a state per client a checkpoint of an image model is gigabytes.
        run.loop.checkpointer.at_end = False
        return run

    def _observe_run(self, name: str) -> Observer:
        show_progress = self.observer(name)

        def observe(progress: Progress) -> None:
            show_progress(progress)
            # A run's last round is followed by its result, which would be lost by stopping there.
            if progress.done < progress.rounds and not progress.stopped:
                self._check_time()

        return observe

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def _remove_folder(folder: Path) -> None:
    """Remove a run folder. Its configuration goes first: without one, the rest is not taken for a run."""
    (folder / "config.json").unlink(missing_ok=True)
    shutil.rmtree(folder)
