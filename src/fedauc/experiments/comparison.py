"""A comparison or a sweep: several runs, each in its run folder, in one folder. Runs of one shape share a graph."""

from __future__ import annotations

import gc
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedauc.experiments.config import Config, resolve_data_paths
from fedauc.experiments.decisions import describe_private_runs, log_once
from fedauc.experiments.folder import RunFolder, check_new_folder, encode_json
from fedauc.experiments.run_group import plan_run_groups, train_run_group
from fedauc.experiments.run_loop import Observer
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.sweep import setting_of
from fedauc.files import move_folder, write_atomically

NAME = "comparison.json"


class Comparison:
    """A folder of runs: `comparison.json` holds all configurations, so that an interrupted comparison can be resumed.

    A run's name is the path of its folder in this one, such as `cycp-fedavg/seed-0`. `groups` are the names of runs
    that share a graph, where they are known already.
    """

    def __init__(self, path: Path, cache: DataCache | None = None, groups: list[list[str]] | None = None) -> None:
        self.path = path
        self._cache = cache or DataCache()
        self._groups = groups

    @staticmethod
    def create(path: Path, runs: Mapping[str, Config], sweep: bool = False) -> Comparison:
        """Check every run, then make the folder."""
        check_new_folder(path)
        runs = {name: resolve_data_paths(config) for name, config in runs.items()}
        cache = DataCache()
        for sentence in describe_private_runs([config.recipe for config in runs.values()]):
            log_once(sentence)
        groups = plan_run_groups(runs, cache)
        configs = {name: config.to_document() for name, config in runs.items()}
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_atomically(part / NAME, encode_json({"sweep": sweep, "runs": configs}).encode())
        move_folder(part, path)
        return Comparison(path, cache, groups)

    @staticmethod
    def is_comparison(path: Path) -> bool:
        """Whether a folder holds a comparison."""
        return (path / NAME).is_file()

    @property
    def sweep(self) -> bool:
        """Whether the settings are to be ranked, rather than the methods tested against each other."""
        return bool(self._read_file().get("sweep"))

    def read_configs(self) -> dict[str, Config]:
        """Every run's configuration, by name."""
        runs = self._read_file()["runs"]
        return {
            name: Config.from_json(json.dumps(config), f"{self.path / NAME}: {name}") for name, config in runs.items()
        }

    def list_names(self) -> list[str]:
        """The names of all runs, started or not."""
        return list(self._read_file()["runs"])

    def seeds_per_setting(self) -> dict[str, int]:
        """How many seeds each setting runs with."""
        return dict(Counter(map(setting_of, self._read_file()["runs"])))

    def run_folders(self) -> Iterator[tuple[str, RunFolder]]:
        """The run folders that exist, by setting."""
        for name in self._read_file()["runs"]:
            if (self.path / name).is_dir():
                yield setting_of(name), RunFolder.open(self.path / name)

    def train_runs(self, observer: Callable[[str], Observer]) -> dict[str, str]:
        """Train all runs, new or interrupted, to their ends; return why training was stopped, by the run's name."""
        configs, stopped = self.read_configs(), dict[str, str]()
        for group in self._groups or plan_run_groups(configs, self._cache):
            stopped |= train_run_group({name: self._open_run(name, configs[name]) for name in group}, observer)
            # An engine and its lanes refer to each other: the next group may need their memory at once.
            gc.collect()
        return stopped

    def _open_run(self, name: str, config: Config) -> Run:
        path = self.path / name
        return Run.resume(path, self._cache) if path.is_dir() else Run.create(config, path, self._cache)

    def _read_file(self) -> dict[str, Any]:
        path = self.path / NAME
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            content["runs"].keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); resume its runs one by one") from error
        return content
