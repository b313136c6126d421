"""Successive halving: the same budget for every method, and the best candidate wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedauc.algorithms import find_methods
from paper.records import read_json_lines
from paper.scales import PAPER, Options
from paper.table_specs import CellSpec, Column, Row, cell_configs
from paper.tuning import (
    Trial,
    TuningJob,
    TuningPlan,
    candidate_config,
    grid_candidates,
    plan_next_rung,
    plan_rungs,
)


class Halving(NamedTuple):
    settings: Options
    trials: list[Trial]


def play(options: list[Options], cycles: int, judge: Callable[[Options, int], float | None]) -> Halving:
    """A halving to its end."""
    trials = list[Trial]()
    while True:
        remaining, rung_cycles = plan_next_rung(options, cycles, trials)
        if not rung_cycles:
            return Halving(remaining[0], trials)
        for settings in remaining:
            auc = judge(settings, rung_cycles)
            trials.append({"settings": settings, "cycles": rung_cycles, "validation_auc": auc})


def named(count: int) -> list[Options]:
    return [{"learning-rate": str(place)} for place in range(count)]


def place(settings: Options) -> int:
    return int(settings["learning-rate"])


@pytest.mark.parametrize("count", [2, 3, 9, 12, 27])
def test_every_method_has_the_same_budget(count: int) -> None:
    """The rungs' cycles add up to the budget but for what division drops, less than a cycle per candidate and rung."""
    found = plan_rungs(count, 360)
    spent = sum(candidates * rung_cycles for candidates, rung_cycles in found)
    assert 360 - sum(candidates for candidates, _ in found) < spent <= 360
    assert [rung_cycles for _, rung_cycles in found] == sorted(rung_cycles for _, rung_cycles in found)


def test_rungs_keep_a_third() -> None:
    """9 candidates: 9, then 3, then one is left; each rung has half of 90 cycles."""
    assert plan_rungs(9, 90) == [(9, 5), (3, 15)]
    assert plan_rungs(1, 90) == []


def test_a_budget_too_small_is_refused() -> None:
    """12 candidates take three rungs, so each needs 12 cycles."""
    assert plan_rungs(12, 36)[0] == (12, 1)
    with pytest.raises(ValueError, match="tuning has 35 cycles; 12 candidates need at least 36: use --tuning steps:36"):
        TuningPlan("steps", 35).check_budget([Row("cycp-pairwise", "cycp-pairwise")])


def test_a_grid_too_large_is_refused_with_what_is_enough_for_every_row() -> None:
    """Of these rows FedXL has most candidates: 324 in six rungs (324, 108, 36, 12, 4, 2) take 1944 cycles."""
    entries = [Row(method, method) for method in ("cycp-fedavg", "rs-minimax", "fedxl1", "a-scaffold")]
    with pytest.raises(ValueError, match="324 candidates need at least 1944: use --tuning paper:1944"):
        TuningPlan("paper", 1943).check_budget(entries)
    TuningPlan("paper", 1944).check_budget(entries)
    assert [plan_rungs(len(grid_candidates(entry, "paper")), 1944)[0][1] >= 1 for entry in entries] == [True] * 4
    # Nothing to choose takes nothing.
    TuningPlan("none", 0).check_budget(entries)


def test_the_best_candidate_wins_whatever_its_place() -> None:
    for best in range(12):
        winner = play(named(12), 120, lambda each, _, best=best: 0.9 - 0.01 * abs(place(each) - best))  # type: ignore[misc]
        assert place(winner.settings) == best


def test_later_rungs_decide_among_those_left() -> None:
    """Candidate 0 is ahead after 3 cycles and behind after 10, as a large step often is."""
    slow = {0: (0.9, 0.5), 5: (0.8, 0.95), 7: (0.7, 0.6), 9: (0.6, 0.55)}
    winner = play(named(12), 120, lambda each, cycles: slow.get(place(each), (0.1, 0.1))[cycles > 3])
    assert place(winner.settings) == 5
    assert {place(each["settings"]) for each in winner.trials if each["cycles"] == 10} == {0, 5, 7, 9}


def test_one_that_stopped_never_beats_one_that_did_not() -> None:
    winner = play(named(3), 30, lambda each, _: None if place(each) < 2 else 0.1)
    assert place(winner.settings) == 2
    assert [each["validation_auc"] for each in winner.trials] == [None, None, 0.1]


def test_those_that_stopped_do_not_go_on() -> None:
    """Nine candidates of which one lives: it alone goes to the second rung. Where none lives there is no second."""
    winner = play(named(9), 90, lambda each, _: 0.7 if place(each) == 4 else None)
    assert [(place(each["settings"]), each["cycles"]) for each in winner.trials][9:] == [(4, 15)]
    assert place(winner.settings) == 4
    dead = play(named(9), 90, lambda each, _: None)
    assert (place(dead.settings), len(dead.trials)) == (8, 9)


def test_a_tie_goes_to_the_earlier_candidate() -> None:
    assert place(play(named(4), 40, lambda each, _: 0.5).settings) == 0


@pytest.mark.parametrize(
    ("method", "steps", "paper"),
    [("cycp-fedavg", 3, 3), ("a-scaffold", 9, 9), ("coda-plus", 9, 243), ("rs-minimax", 9, 243), ("fedxl1", 12, 324)],
)
def test_grids_are_the_papers(method: str, steps: int, paper: int) -> None:
    """Three learning rates; times four λ, three ρ or three amplifications; times 27 plans for the stagewise methods."""
    entry = Row(method, method)
    assert grid_candidates(entry, "none") == [{}]
    for grid, size in {"steps": steps, "paper": paper}.items():
        found = grid_candidates(entry, grid)
        assert len({tuple(each.items()) for each in found}) == len(found) == size
        PAPER.build_config("cifar10", method, found[-1])


def test_the_wide_grid_has_a_larger_step() -> None:
    """Four learning rates; times four λ or three ρ."""
    for method, size in {"cycp-fedavg": 4, "cycp-minimax": 12, "cycp-pairwise": 16}.items():
        found = grid_candidates(Row(method, method), "wide")
        wider = grid_candidates(Row(method, method), "wider")
        assert [each["learning-rate"] for each in wider[:1]] == ["100"]
        assert wider[-len(found) :] == found
        assert len(found) == size
        assert {each["learning-rate"] for each in found} == {"1", "0.1", "0.01", "0.001"}


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax", "a-scaffold"])
def test_the_long_grid_leaves_cycles_for_long_rungs(method: str) -> None:
    """Five learning rates by two other values: 240 cycles are rungs of 8, 20 and 40; `fine` has many of 2 or 3."""
    found = grid_candidates(Row(method, method), "long")
    assert plan_rungs(len(found), 240) == [(10, 8), (4, 20), (2, 40)]
    fine = grid_candidates(Row(method, method), "fine")
    assert {tuple(each.items()) for each in found} < {tuple(each.items()) for each in fine}


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax", "cycp-fedavg", "a-scaffold"])
def test_the_full_grid_tries_two_steps_in_whole_runs(method: str) -> None:
    """The method's own step and a smaller; a candidate is evaluated as the table's runs are, whose record it is."""
    found, usual = grid_candidates(Row(method, method), "full"), find_methods()[method].learning_rate
    own, smaller = (float(each["learning-rate"]) for each in found)
    assert own == usual
    assert smaller == pytest.approx(0.3 * usual)
    assert len({tuple(each)[1:] for each in found}) == 1
    assert plan_rungs(len(found), 200) == [(2, 100)]
    job = TuningJob("cifar10", Row(method, method))
    assert candidate_config(PAPER, job, found[1], 100) == PAPER.build_config("cifar10", method, found[1])
    assert candidate_config(PAPER, job, found[1], 99).evaluate_every == 99


def test_a_candidate_changes_what_it_names() -> None:
    found = PAPER.build_config(
        "cifar10", "cycp-pairwise", grid_candidates(Row("x", "cycp-pairwise"), "paper")[-1]
    ).recipe
    assert found.learning_rate == 0.001
    assert getattr(found.algorithm.objective, "scale", None) == 0.001
    assert (found.stages.name, getattr(found.stages, "initial", None)) == ("geometric", 50)


def test_what_a_row_settles_is_not_tuned() -> None:
    fixed = Row("fixed", "cycp-minimax", {"learning-rate": "0.5"})
    assert grid_candidates(fixed, "long") == [{"algorithm.prox": "0.1"}, {"algorithm.prox": "0.01"}]
    column = Column("cifar10", "cifar10")
    ((config,),) = cell_configs(PAPER, CellSpec(fixed, column), {"learning-rate": "0.001"}, (0,))
    assert config.recipe.learning_rate == 0.5


def test_another_surrogate_has_no_lambda() -> None:
    square = Row("square", "cycp-pairwise", {"objective": "square"})
    assert grid_candidates(square, "steps") == [
        {"learning-rate": "0.1"},
        {"learning-rate": "0.01"},
        {"learning-rate": "0.001"},
    ]


RECORDED = read_json_lines(Path(__file__).parents[2] / "paper" / "records" / "paper-choices.jsonl", dict)


@pytest.mark.parametrize("choice", RECORDED, ids=[choice["job"] for choice in RECORDED])
def test_a_recorded_choice_follows_from_its_rungs(choice: dict[str, Any]) -> None:
    """What is in the repository, replayed."""
    judged = {(tuple(each["settings"].items()), each["cycles"]): each["validation_auc"] for each in choice["trials"]}
    least = min((cycles for _, cycles in judged), default=0)
    first: list[Options] = [dict(settings) for settings, cycles in judged if cycles == least]
    winner = play(
        first or [choice["settings"]], choice["budget"], lambda each, cycles: judged[tuple(each.items()), cycles]
    )
    assert winner.settings == choice["settings"]
    assert len(winner.trials) == len(judged) == choice["runs"]
