"""Run seeds, and make the faults of a failing one as few as they can be."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedauc.federation import site
from federation_simulation.disk import DiskLayer
from federation_simulation.oracle import check_outcome
from federation_simulation.scenario import Scenario, draw_scenario
from federation_simulation.simulation import Simulation, repeatable

MOST_EVENTS = 400
"""Lines of the event log that are printed for a failure."""


class TrialResult(NamedTuple):
    """What became of a scenario: empty text if all is well, and the events."""

    problem: str
    simulation: Simulation


class Trials:
    """Simulations under one folder, which is in memory where the system has such a folder."""

    def __init__(self, home: Path) -> None:
        self._home, self._layer = home, DiskLayer(home / "disks")
        self._decoded = dict[str, Any]()

    def run_scenario(self, scenario: Scenario) -> TrialResult:
        """Run a scenario and check its outcome."""
        disks = self._home / "disks"
        shutil.rmtree(disks, ignore_errors=True)
        disks.mkdir()
        logger = logging.getLogger("fedauc")
        with repeatable(scenario.seed), self._remembering_recipes(), self._layer.installed():
            simulation = Simulation(scenario, self._layer, disks)
            logger.addHandler(simulation)
            try:
                simulation.run()
                with self._layer.bypassed():
                    check_outcome(simulation)
            except Exception as error:
                return TrialResult(f"{type(error).__name__}: {error}", simulation)
            finally:
                logger.removeHandler(simulation)
        return TrialResult("", simulation)

    @contextmanager
    def _remembering_recipes(self) -> Iterator[None]:
        """Read every recipe once: sites read theirs from each message, which takes a tenth of the time."""
        read = site._decode_value

        def decode(kind: type, data: Any, where: str) -> Any:
            key = f"{kind.__name__} {data}"
            if key not in self._decoded:
                self._decoded[key] = read(kind, data, where)
            return self._decoded[key]

        site._decode_value = decode
        try:
            yield
        finally:
            site._decode_value = read

    def shrink(self, scenario: Scenario) -> Scenario:
        """Leave out every fault without which the scenario still fails."""
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for position in range(len(scenario.faults)):
                fewer = scenario.faults[:position] + scenario.faults[position + 1 :]
                if self.run_scenario(scenario._replace(faults=fewer)).problem:
                    scenario, is_smaller = scenario._replace(faults=fewer), True
                    break
        return scenario


@contextmanager
def open_trials() -> Iterator[Trials]:
    """Trials in a folder that is removed afterwards. Only their own handler receives the library's log."""
    memory = Path("/dev/shm")
    logger = logging.getLogger("fedauc")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        with tempfile.TemporaryDirectory(prefix="fedauc-", dir=memory if memory.is_dir() else None) as home:
            yield Trials(Path(home))
    finally:
        logger.setLevel(level)
        logger.propagate = propagates


def run_seeds(seeds: range, report: Callable[[str], None], shrinks: bool = True) -> list[int]:
    """Run seeds; report every failure with its scenario, its fewest faults, its events and how to repeat it."""
    failed = []
    with open_trials() as trials:
        for seed in seeds:
            scenario = draw_scenario(seed)
            result = trials.run_scenario(scenario)
            if not result.problem:
                continue
            failed.append(seed)
            if shrinks:
                scenario = trials.shrink(scenario)
                result = trials.run_scenario(scenario)
            report(describe_failure(scenario, result))
    return failed


def describe_failure(scenario: Scenario, result: TrialResult) -> str:
    """A failure in words: the command that repeats it, the faults that it takes, and the events."""
    events = [f"{moment:8.2f} s  {machine:8} {text}" for moment, machine, text in result.simulation.events]
    left_out = max(0, len(events) - MOST_EVENTS)
    return "\n".join(
        [
            f"seed {scenario.seed} fails: {result.problem}",
            f"repeat it with: make test-federation-simulation SEED={scenario.seed}",
            f"the federation: {scenario.describe()}",
            *(f"fault: {fault.describe()}" for fault in scenario.faults),
            *([f"({left_out} events before)"] if left_out else []),
            *events[-MOST_EVENTS:],
        ]
    )
