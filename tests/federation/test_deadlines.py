"""How long a round waits: a deadline per group, enough answers before it, and a group that is offline."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import ServerPolicy
from fedauc.federation.serialization import Payload
from fedauc.guards import TrainingStopped
from fedauc.participation.full import Full
from fedauc.stages import Constant
from fedauc.training import Round
from fedauc.transforms.secure_sum import SecureSum
from federation.attendance_trace import read_trace, replay
from federation.memory_grid import NAMES, Fault, collect_rounds, create_run, make_agreement, make_grid, make_policy
from federation.test_faults import make_trace
from small_federations import GROUPS, run_rounds, same_bits, small_recipe

DEADLINES = {"evaluation": "none", "group_deadlines": "g0=3, g2=30"}


def test_a_round_waits_for_a_group_as_long_as_its_deadline_says(tmp_path: Path) -> None:
    """Groups wait 3, 10 (the general deadline) and 30 seconds; a message expires with its group's deadline."""
    faults = [Fault(site, round, "lost") for site, round in ((0, 0), (3, 1), (5, 2))]
    grid = make_grid(tmp_path / "sites", faults)
    run, ends = create_run(make_agreement("cycp-fedavg", DEADLINES), grid, tmp_path / "run"), [grid.time.now]
    lifetimes: list[float] = []
    push_message = grid.push_message

    def note_seconds(node_id: int, payload: Payload, seconds: float) -> str:
        lifetimes.append(seconds)
        return push_message(node_id, payload, seconds)

    grid.push_message = note_seconds  # type: ignore[method-assign]
    collect_rounds(run, [], lambda finished: ends.append(grid.time.now))
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    # The clock advances by a fifth of a second.
    assert lengths == pytest.approx([3, 10, 30, 0, 0, 0], abs=0.21)
    # Two messages to each of the first two groups and three to the last, in each of two cycles; then the model.
    assert lifetimes[:14] == pytest.approx([3, 3, 10, 10, 30, 30, 30] * 2)
    assert [set(line["absent"]) for line in RunFolder(tmp_path / "run").read_lines("attendance.jsonl")[:3]] == [
        {"site-0"},
        {"site-3"},
        {"site-5"},
    ]


def test_a_mixed_cohort_waits_for_every_site_as_long_as_its_group_says(tmp_path: Path) -> None:
    """Site 0 may take 3 seconds and takes 5; site 5 may take 30 and takes 20."""
    faults = [Fault(site=0, round=0, kind="after 5"), Fault(site=5, round=0, kind="after 20")]
    grid, rounds = make_grid(tmp_path / "sites", faults), list[Round]()
    agreement = make_agreement("cycp-fedavg", DEADLINES, participation=Full())
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    assert rounds[0].cohort.absent == (0,)
    assert 5 in rounds[0].cohort.clients
    expected = replay(small_recipe("cycp-fedavg", engine="loop", participation=Full()), read_trace(tmp_path / "run"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


@pytest.mark.parametrize("on_group_offline", ["wait", "skip"])
def test_cycles_go_on_without_a_group_that_is_offline(on_group_offline: str, tmp_path: Path) -> None:
    """Its rounds are skipped, after its deadline or at once; the model equals a simulation without it."""
    grid, rounds = make_grid(tmp_path / "sites"), list[Round]()
    policy = {**DEADLINES, "on_group_offline": on_group_offline, "patience": 2}
    run = create_run(make_agreement("cycp-fedavg", policy), grid, tmp_path / "run")
    grid.offline, begin = {NAMES[3], NAMES[4]}, grid.time.now
    collect_rounds(run, rounds)
    assert [finished.cohort.clients for finished in rounds] == [(0, 1), (), (5, 6, 7)] * 2
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    if on_group_offline == "wait":
        assert 20 <= grid.time.now - begin < 21
        assert lines[1]["skipped"] == "round 1: 0 of 2 sites answered; the quorum is 1"
    else:
        assert grid.time.now == begin
        assert lines[1]["skipped"] == "round 1: none of 2 sites is online"
        assert lines[1]["absent"] == dict.fromkeys(NAMES[3:5], "was offline when the round began")
    gone = {(round, client) for round in (1, 4) for client in (3, 4)}
    expected = run_rounds(small_recipe("cycp-fedavg", engine="loop", participation=make_trace(6, gone)))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_skipped_groups_use_up_patience_when_nobody_is_left(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    policy = {**DEADLINES, "on_group_offline": "skip", "patience": 3}
    run = create_run(make_agreement("cycp-fedavg", policy), grid, tmp_path / "run")
    grid.offline, begin = set(NAMES), grid.time.now
    with pytest.raises(TrainingStopped, match=r"round 2: none of 3 sites is online, for 3 rounds in a row"):
        run.train_to_end()
    assert grid.time.now == begin


def test_a_round_ends_when_enough_sites_have_answered(tmp_path: Path) -> None:
    """Two answers are enough: the third site of the last group takes five seconds, and nobody waits for it."""
    grid = make_grid(tmp_path / "sites", [Fault(site=6, round=2, kind="after 5"), Fault(site=3, round=4, kind="slow")])
    rounds: list[Round] = []
    run = create_run(make_agreement("cycp-fedavg", {"evaluation": "none", "enough": 2}), grid, tmp_path / "run")
    begin = grid.time.now
    collect_rounds(run, rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[2]["absent"] == {"site-6": "had not answered when 2 sites had"}
    # Group 1 has two sites, so that both are waited for.
    assert lines[4]["answered"] == ["site-3", "site-4"]
    assert 2 <= grid.time.now - begin < 3
    trace = make_trace(6, {(2, 6)})
    expected = run_rounds(small_recipe("cycp-fedavg", engine="loop", participation=trace))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_site_that_was_not_waited_for_may_answer_later(tmp_path: Path) -> None:
    """Two answers are enough, and late ones are merged: site 6 answers while round 3 waits for site 0."""
    faults = [Fault(site=6, round=2, kind="after 5"), Fault(site=0, round=3, kind="after 7")]
    policy = {"evaluation": "none", "enough": 2, "late_answers": "merge"}
    grid, rounds = make_grid(tmp_path / "sites", faults), list[Round]()
    agreement = make_agreement("cycp-fedavg", policy, stages=Constant())
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    # The late answer is the second one, so that round 3 does not wait for site 0 any more.
    assert lines[3]["answered"] == ["site-1"]
    assert lines[3]["late"]["site-6"]["round"] == 2
    assert lines[3]["absent"] == {"site-0": "had not answered when 2 sites had"}
    recipe = small_recipe("cycp-fedavg", engine="loop", stages=Constant())
    expected = replay(recipe, read_trace(tmp_path / "run"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"enough": 4}, "enough is 4; the largest group has 3 sites with rows: lower enough"),
        ({"group_deadlines": "g0=3,g9=4"}, "group_deadlines lists 'g9'; the site table has 'g0', 'g1', 'g2': correct"),
    ],
)
def test_settings_that_no_group_has_are_refused(policy: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert max(GROUPS.count(group) for group in GROUPS) == 3
    with pytest.raises(ValueError, match=message):
        create_run(make_agreement("cycp-fedavg", policy), make_grid(tmp_path / "sites"), tmp_path / "run")


@pytest.mark.parametrize(
    "settings",
    [{"transforms": (SecureSum(),), "participation": "full"}, {"epsilon": 8.0, "delta": 0.001}],
)
def test_protected_sums_wait_for_everybody(settings: dict[str, Any], tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none", "enough": 2}, **settings)
    with pytest.raises(ValueError, match="enough is 2, but a private run and a secure sum wait for every site"):
        create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_deadlines": "day"}, "group_deadlines holds 'day'; it must be pairs of a group and seconds"),
        ({"group_deadlines": "day=0"}, "group_deadlines holds 'day=0'"),
        ({"group_deadlines": "day=1,day=2"}, "group_deadlines lists 'day' twice"),
        ({"enough": 1, "quorum": 2}, "enough is 1; it must be at least the quorum of 2: raise enough"),
        ({"max_staleness": 0}, "max_staleness is 0"),
        ({"staleness_exponent": -1.0}, "staleness_exponent is -1"),
        ({"late_answers": "use"}, "late_answers is 'use'; use 'drop' or 'merge'"),
    ],
)
def test_a_bad_policy_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(**change)


def test_a_policy_without_the_new_settings_is_the_one_of_before() -> None:
    policy = ServerPolicy()
    assert (policy.late_answers, policy.enough, policy.on_group_offline) == ("drop", None, "wait")
    assert policy.deadline_of("any") == policy.deadline
