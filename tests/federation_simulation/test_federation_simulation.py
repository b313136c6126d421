"""A sample of `make test-federation-simulation`: federations under faults end with the simulator's bits."""

from __future__ import annotations

import pytest

from federation_simulation.scenario import MESSAGE_FAULTS, MOMENT_FAULTS, STEP_FAULTS, draw_scenario
from federation_simulation.trials import describe_failure, open_trials, run_seeds

SEEDS = range(40)

FOUND = (286, 293, 2142, 2414, 5004, 5116, 9157, 11181)
"""Seeds that have found faults of the library: a message repeated much later, a folder whose name was lost, a removed
checkpoint that returned with the power, honest scores that were refused because the first ones were nearly equal, a
line of a report that was cut off, a site that could not be sent the plan again, one that was put in quarantine because
its registration had been lost, and a checkpoint whose name was lost after a run had gone on from it."""


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(SEEDS.start, SEEDS.stop, 10)], ids=str)
def test_federations_end_with_the_simulators_bits_whatever_happens_to_them(seeds: range) -> None:
    failures: list[str] = []
    run_seeds(seeds, failures.append, shrinks=False)
    assert not failures, failures[0]


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_stays_corrected(seed: int) -> None:
    failures: list[str] = []
    run_seeds(range(seed, seed + 1), failures.append, shrinks=False)
    assert not failures, failures[0]


def test_a_seed_repeats_every_event() -> None:
    """Seed 4 has kills and lost messages."""
    with open_trials() as trials:
        first, second = (trials.run_scenario(draw_scenario(4)).simulation.events for _ in range(2))
    assert len(first) > 50
    # A folder's path names the trial's own temporary folder.
    assert first == second


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(300) for fault in draw_scenario(seed).faults}
    assert drawn == {*STEP_FAULTS, *MOMENT_FAULTS, *MESSAGE_FAULTS}


def test_a_failure_is_shrunk_to_the_faults_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not sync folders loses its run when the power fails; one fault is enough for that."""
    monkeypatch.setattr("fedauc.files.sync_folder", lambda folder: None)
    failures: list[str] = []
    assert run_seeds(range(1), failures.append) == [0]
    assert failures[0].startswith("seed 0 fails: ")
    assert "make test-federation-simulation SEED=0" in failures[0]
    assert failures[0].count("fault: ") == 1
    assert "lose power" in failures[0]
    assert len(draw_scenario(0).faults) > 1


def test_a_failure_is_described_with_its_events() -> None:
    scenario = draw_scenario(4)
    with open_trials() as trials:
        result = trials.run_scenario(scenario)
    text = describe_failure(scenario, result._replace(problem="something is wrong"))
    assert "seed 4 fails: something is wrong" in text
    assert "server   starts" in text
