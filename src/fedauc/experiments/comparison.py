"""Several runs in one folder, each in a run folder of its own. Runs of one shape go together, in one graph."""

from __future__ import annotations

import gc
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.config import FORMAT, Config, to_plain
from fedauc.experiments.folder import RunFolder, refuse_existing
from fedauc.experiments.run_group import plan_run_groups, train_run_group
from fedauc.experiments.run_loop import Observer
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.sweep import setting_of

NAME = "comparison.json"

Groups = list[list[str]]


class Comparison:
    """A folder of runs: `comparison.json` holds every configuration, so that an interrupted one can be finished."""

    def __init__(self, path: Path, load: DataCache | None = None, groups: Groups | None = None) -> None:
        self.path = path
        self._load = load or DataCache()
        self._groups = groups

    @staticmethod
    def create(path: Path, runs: Mapping[str, Config], sweep: bool = False) -> Comparison:
        """Check every run, then make the folder. Runs are named by their place in it, such as `method/seed-0`."""
        refuse_existing(path)
        load = DataCache()
        groups = plan_run_groups(runs, load)
        encoded = {place: {"format": FORMAT, **to_plain(config)} for place, config in runs.items()}
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        content = json.dumps({"sweep": sweep, "runs": encoded}, indent=2) + "\n"
        write_atomically(part / NAME, content.encode())
        part.rename(path)
        return Comparison(path, load, groups)

    @staticmethod
    def is_comparison(path: Path) -> bool:
        """Whether a folder holds a comparison."""
        return (path / NAME).is_file()

    @property
    def sweep(self) -> bool:
        """Whether its settings are to be ranked, rather than its methods tested against each other."""
        return bool(self._read().get("sweep"))

    def read_configs(self) -> dict[str, Config]:
        """Every run's configuration, by its place in the folder."""
        where, runs = self.path / NAME, self._read()["runs"]
        return {place: Config.from_json(json.dumps(tree), f"{where}: {place}") for place, tree in runs.items()}

    def seeds_per_setting(self) -> dict[str, int]:
        """What runs differ in besides the seed, and with how many seeds each runs."""
        return dict(Counter(map(setting_of, self._read()["runs"])))

    def run_folders(self) -> Iterator[tuple[str, RunFolder]]:
        """The run folders that exist, by setting."""
        for place in self._read()["runs"]:
            if (self.path / place).is_dir():
                yield setting_of(place), RunFolder.open(self.path / place)

    def train_runs(self, observer: Callable[[str], Observer]) -> dict[str, str]:
        """Run what has not run yet, go on with what was interrupted; say which runs could not go on, and why."""
        configs, stopped = self.read_configs(), dict[str, str]()
        for group in self._groups or plan_run_groups(configs, self._load):
            stopped |= train_run_group({place: self._run(place, configs[place]) for place in group}, observer)
            # An engine and its lanes refer to each other: the next group may need their memory at once.
            gc.collect()
        return stopped

    def _run(self, place: str, config: Config) -> Run:
        path = self.path / place
        return Run.resume(path, self._load) if path.is_dir() else Run.create(config, path, self._load)

    def _read(self) -> dict[str, Any]:
        path = self.path / NAME
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            found["runs"].keys()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}); resume its runs one by one") from error
        return found
