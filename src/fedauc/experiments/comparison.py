"""Several runs side by side in one folder, each in a run folder of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.codec import encode
from fedauc.experiments.config import FORMAT, Config
from fedauc.experiments.folder import RunFolder, refuse_existing
from fedauc.experiments.runner import Loader, Observer, Run, check
from fedauc.guards import TrainingStopped

NAME = "comparison.json"


class Comparison:
    """A folder of runs: `comparison.json` holds every configuration, so that an interrupted one can be finished."""

    def __init__(self, path: Path, load: Loader | None = None) -> None:
        self.path = path
        self._load = load or Loader()

    @staticmethod
    def create(path: Path, configs: list[Config], seeds: list[int]) -> Comparison:
        """Check every run, then make the folder."""
        refuse_existing(path)
        runs, load = {}, Loader()
        for config in configs:
            for seed in seeds:
                seeded = dataclasses.replace(config, recipe=dataclasses.replace(config.recipe, seed=seed))
                check(seeded, load)
                runs[f"{config.recipe.method}/seed-{seed}"] = {"format": FORMAT, **encode(seeded)}
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_atomically(part / NAME, (json.dumps({"runs": runs}, indent=2) + "\n").encode())
        part.rename(path)
        return Comparison(path, load)

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether a folder holds a comparison."""
        return (path / NAME).is_file()

    def configs(self) -> dict[str, Config]:
        """Every run's configuration, by its place in the folder."""
        try:
            runs: dict[str, Any] = json.loads((self.path / NAME).read_text())["runs"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{self.path / NAME} is damaged ({error}); resume its runs one by one") from error
        return {
            place: Config.from_json(json.dumps(tree), f"{self.path / NAME}: {place}") for place, tree in runs.items()
        }

    def folders(self) -> Iterator[tuple[str, RunFolder]]:
        """The run folders that exist, by method."""
        for place, config in self.configs().items():
            if (self.path / place).is_dir():
                yield config.recipe.method, RunFolder.open(self.path / place)

    def go(self, observer: Callable[[str], Observer]) -> dict[str, str]:
        """Run what has not run yet, go on with what was interrupted; say which runs could not go on, and why."""
        stopped = {}
        for place, config in self.configs().items():
            path = self.path / place
            run = Run.resume(path, self._load) if path.is_dir() else Run.create(config, path, self._load)
            try:
                run.go(observer(place))
            except TrainingStopped as reason:
                stopped[place] = str(reason)
        return stopped
