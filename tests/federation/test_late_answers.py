"""Late answers: dropped, or merged as in a simulation with the attendance that happened, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.checkpoint import Checkpointer
from fedauc.experiments.folder import RunFolder
from fedauc.federation.late_answers import select_present, staleness_weight
from fedauc.federation.serialization import Payload
from fedauc.interfaces import Cohort
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.full import Full
from fedauc.stages import Constant, Geometric
from fedauc.training import Round
from fedauc.transforms.clip import Clip
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.robust_means import Median
from fedauc.transforms.secure_sum import SecureSum
from federation.attendance_trace import RoundTrace, read_trace, replay
from federation.memory_grid import (
    NAMES,
    Fault,
    collect_rounds,
    corrupt_answer,
    create_run,
    make_agreement,
    make_grid,
    resume_run,
)
from federation.test_server import BrittleFolder
from federation.test_server import Killed as KilledBeforeCheckpoint
from small_federations import run_rounds, same_bits, small_recipe

MERGE = {"evaluation": "none", "late_answers": "merge"}

FAULTS = [
    Fault(site=4, round=1, kind="after 15"),
    Fault(site=6, round=2, kind="after 8"),
    Fault(site=0, round=3, kind="after 23"),
    Fault(site=3, round=4, kind="after 4"),
    Fault(site=7, round=5, kind="after 4"),
    Fault(site=5, round=8, kind="after 9"),
]
"""Rounds wait ten seconds. Site 4 misses round 1 and answers in round 2; site 0 misses round 3 and answers in round 6,
in which its group is due again."""


def run_both(
    method: str, folder: Path, faults: list[Fault], policy: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[Round], list[Round], list[RoundTrace]]:
    """A federation's rounds, those of a simulation with its attendance, and the attendance."""
    settings = {"stages": Constant(), **settings}
    grid = make_grid(folder / "sites", faults)
    agreement = make_agreement(method, {**MERGE, **(policy or {})}, **settings)
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, folder / "run"), rounds)
    trace = read_trace(folder / "run")
    exponent = agreement.policy.staleness_exponent
    return rounds, replay(small_recipe(method, engine="loop", **settings), trace, exponent), trace


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("cycp-fedavg", {}),
        ("cycp-minimax", {"prox": 0.5}),
        ("cycp-pairwise", {}),
        ("cycp-pairwise", {"pool": "histogram"}),
        ("rs-pairwise", {"participation": Cyclic()}),
        ("cycp-fedavg", {"transforms": (Clip(norm=0.05), Quantize())}),
        ("cycp-fedavg", {"mean": Median(), "participation": Full()}),
        ("a-fedavg", {}),
    ],
)
def test_merged_late_answers_give_the_simulation_with_the_same_attendance(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Model, duals, pool and ledger, after every round; and the late answers do change the model."""
    # A cycle of scoring rounds, which take no late answers, comes first.
    shift = 3 if "pairwise" in method and "pool" not in settings else 0
    faults = [fault._replace(round=fault.round + shift) for fault in FAULTS]
    rounds, expected, trace = run_both(method, tmp_path, faults, cycles=4, **settings)
    late = [(number, client, answered) for number, line in enumerate(trace) for client, answered in line.late]
    assert late
    for ours, theirs in zip(rounds, expected, strict=True):
        assert ours.cohort == theirs.cohort
        assert same_bits(ours.state.server, theirs.state.server), ours.phase.round
        assert ours.traffic == theirs.traffic
    without = [line._replace(late=()) for line in trace]
    recipe = small_recipe(method, **{"engine": "loop", "cycles": 4, "stages": Constant(), **settings})
    dropped = replay(recipe, without)
    assert not same_bits(rounds[-1].state.server, dropped[-1].state.server)


def test_the_attendance_says_how_late_an_answer_was_and_what_it_counted(tmp_path: Path) -> None:
    faults = [Fault(site=4, round=1, kind="after 15"), Fault(site=6, round=2, kind="after 8")]
    rounds, _, _ = run_both("cycp-fedavg", tmp_path, faults)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[1]["absent"] == {"site-4": "did not answer before the deadline"}
    assert lines[2]["answered"] == ["site-5", "site-6", "site-7"]
    assert lines[2]["late"] == {"site-4": {"round": 1, "staleness": 1, "weight": 1 / 2**0.5}}
    assert rounds[2].cohort.clients == (5, 6, 7, 4)
    assert rounds[2].cohort.weights == (0.25,) * 4
    result = RunFolder(tmp_path / "run").read_result()
    assert result["attendance"]["site-4"] == {"answered": 1, "absent": 1, "refused": 0, "late": 1}


def test_by_default_late_answers_are_dropped_and_nothing_changes(tmp_path: Path) -> None:
    """The federation equals a simulation in which the late sites were absent, as it always has."""
    rounds, expected, trace = run_both("cycp-pairwise", tmp_path, FAULTS, {"late_answers": "drop"}, cycles=4)
    assert not any(line.late for line in trace)
    assert sum(len(finished.cohort.absent) for finished in rounds) >= 2
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_without_late_answers_merging_changes_nothing(tmp_path: Path) -> None:
    rounds, _, _ = run_both("cycp-pairwise", tmp_path, [])
    expected = run_rounds(small_recipe("cycp-pairwise", engine="loop", stages=Constant()))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_site_that_still_computes_is_waited_for_and_gets_no_other_message(tmp_path: Path) -> None:
    """Everybody is due in every round. Site 4 needs 27 seconds for round 1, and is sent nothing until it has answered.

    Rounds 1 and 2 end at their deadlines, after 10 and 20 seconds; its answer ends round 3 after 27.
    """
    grid = make_grid(tmp_path / "sites", [Fault(site=4, round=1, kind="after 27")])
    settings: dict[str, Any] = {"cycles": 6, "participation": Full(), "stages": Constant()}
    agreement = make_agreement("cycp-fedavg", MERGE, **settings)
    rounds: list[Round] = []
    begin = grid.time.now
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert [header["phase"]["round"] for header in grid.visit_headers(NAMES[4])] == [0, 1, 4, 5]
    assert lines[2]["absent"] == {"site-4": "is still busy with the message of an earlier round"}
    assert lines[3]["late"] == {"site-4": {"round": 1, "staleness": 2, "weight": 1 / 3**0.5}}
    assert "site-4" not in lines[3]["absent"]
    assert lines[4]["answered"] == [name for client, name in enumerate(NAMES) if client != 2]
    assert 27 <= grid.time.now - begin < 40  # and the ten seconds that registration may wait
    expected = replay(small_recipe("cycp-fedavg", engine="loop", **settings), read_trace(tmp_path / "run"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_an_answer_beyond_the_largest_staleness_is_dropped_and_the_site_is_free_again(tmp_path: Path) -> None:
    """It is two rounds late and one is allowed; the same round then sends the site its message."""
    faults = [
        Fault(site=4, round=1, kind="after 15"),
        Fault(site=3, round=2, kind="after 9"),
        Fault(site=6, round=3, kind="after 9"),
    ]
    policy = {"max_staleness": 1}
    rounds, expected, trace = run_both("cycp-fedavg", tmp_path, faults, policy, cycles=5, participation=Full())
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert not any(line.late for line in trace[3:])
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    slow = [Fault(site=4, round=1, kind="after 12"), *(Fault(site=3, round=n, kind="after 0.5") for n in range(2, 5))]
    run_both("cycp-fedavg", tmp_path / "quick", slow, {"max_staleness": 1}, cycles=5)
    lines = RunFolder(tmp_path / "quick" / "run").read_lines("attendance.jsonl")
    reasons = [reason for line in lines for reason in line.get("dropped", {}).values()]
    assert reasons == ["it answers round 1, 3 rounds late; max-staleness is 1"]
    assert "site-4" in lines[4]["answered"]


def test_a_lost_message_expires_and_its_site_is_written_to_again(tmp_path: Path) -> None:
    """With one allowed round a message lives for two deadlines: until 20 s, which round 3 reaches."""
    faults = [Fault(site=4, round=1, kind="lost")]
    rounds, expected, _ = run_both(
        "cycp-fedavg", tmp_path, faults, {"max_staleness": 1}, cycles=5, participation=Full()
    )
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[1]["absent"] == {"site-4": "did not answer before the deadline"}
    assert lines[2]["absent"] == {"site-4": "is still busy with the message of an earlier round"}
    assert lines[3]["dropped"] == {"site-4": "the message of an earlier round has expired"}
    assert "site-4" in lines[3]["answered"]
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_site_that_has_restarted_is_written_to_again(tmp_path: Path) -> None:
    """Its message is lost with its old process; one second later it answers the message of round 2."""
    grid = make_grid(tmp_path / "sites", [Fault(site=4, round=1, kind="lost")])
    settings: dict[str, Any] = {"cycles": 4, "participation": Full(), "stages": Constant()}

    def restart_after_round_one(finished: Round) -> None:
        if finished.phase.round == 1:
            grid.online_since[NAMES[4]] = "1"

    rounds: list[Round] = []
    run = create_run(make_agreement("cycp-fedavg", MERGE, **settings), grid, tmp_path / "run")
    collect_rounds(run, rounds, restart_after_round_one)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[2]["dropped"] == {"site-4": "it has restarted, and has lost the message of an earlier round"}
    assert "site-4" in lines[2]["answered"]
    expected = replay(small_recipe("cycp-fedavg", engine="loop", **settings), read_trace(tmp_path / "run"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_an_error_in_place_of_a_late_answer_frees_the_site(tmp_path: Path) -> None:
    """The service reports the dead node after three seconds, one second after the end of round 1."""
    faults = [Fault(site=4, round=1, kind="error")]
    rounds, expected, _ = run_both("cycp-fedavg", tmp_path, faults, {"deadline": 2.0}, cycles=4, participation=Full())
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert "site-4" in lines[1]["absent"]
    assert lines[2]["dropped"] == {"site-4": "code 5 from node 1: the node is unavailable"}
    assert "site-4" in lines[2]["answered"]
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_messages_live_as_long_as_their_answers_may_be_used(tmp_path: Path) -> None:
    """Ten seconds for the round and ten for each of three more."""
    grid, lifetimes = make_grid(tmp_path / "sites"), list[float]()
    push_message = grid.push_message

    def note_lifetime(node_id: int, payload: Payload, seconds: float) -> str:
        if payload.read_header()["kind"] == "visit":
            lifetimes.append(seconds)
        return push_message(node_id, payload, seconds)

    grid.push_message = note_lifetime  # type: ignore[method-assign]
    agreement = make_agreement("cycp-fedavg", {**MERGE, "max_staleness": 3}, cycles=1)
    create_run(agreement, grid, tmp_path / "run").train_to_end()
    assert lifetimes == pytest.approx([40.0] * 7)


@pytest.mark.parametrize("kind", ["nan", "count", "garbage"])
def test_a_late_answer_is_checked_like_any_other(kind: str, tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites", [Fault(site=4, round=1, kind="after 15"), Fault(6, 2, "after 8")])
    deliver = grid._reply_after

    def corrupt_late(seconds: float, reply: Any) -> None:
        deliver(seconds, reply._replace(payload=corrupt_answer(reply.payload, kind)) if seconds == 15 else reply)

    grid._reply_after = corrupt_late  # type: ignore[method-assign]
    rounds: list[Round] = []
    collect_rounds(create_run(make_agreement("cycp-fedavg", MERGE), grid, tmp_path / "run"), rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert list(lines[2]["refused"]) == ["site-4"]
    assert not any("late" in line for line in lines)
    expected = replay(small_recipe("cycp-fedavg", engine="loop"), read_trace(tmp_path / "run"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


class Killed(Exception):
    """Stands for a server that is killed."""


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax"])
def test_what_was_under_way_is_lost_when_the_server_is_killed_and_resumed(method: str, tmp_path: Path) -> None:
    """Killed after round 1, in which site 4 was late: its answer is not merged any more, and the trace says so."""
    grid, out = make_grid(tmp_path / "sites", FAULTS), tmp_path / "run"
    agreement = make_agreement(method, MERGE, cycles=4, stages=Constant())
    run = create_run(agreement, grid, out)

    def kill(finished: Round) -> None:
        lines = RunFolder(out).read_lines("attendance.jsonl")
        if "site-4" in lines[-1]["absent"] or "site-0" in lines[-1]["absent"]:
            raise Killed

    rounds: list[Round] = []
    kills = 0
    while True:
        try:
            collect_rounds(run, rounds, kill)
            break
        except Killed:
            kills += 1
            run = resume_run(agreement, grid, out)
    assert kills == 2
    trace = read_trace(out)
    merged = {client for line in trace for client, _ in line.late}
    assert 4 not in merged
    assert 0 not in merged
    expected = replay(small_recipe(method, engine="loop", cycles=4, stages=Constant()), trace)
    assert len(trace) == len(expected)
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_merged_answer_that_was_not_saved_is_lost_with_its_round(tmp_path: Path) -> None:
    """Killed in round 2, after site 4's late answer was merged and before the checkpoint.

    The round is repeated without it, and the site's error feedback goes on from its last visit that counts.
    """
    grid, out = make_grid(tmp_path / "sites", FAULTS), tmp_path / "run"
    settings: dict[str, Any] = {"cycles": 4, "stages": Constant(), "transforms": (Clip(norm=0.05), Quantize())}
    agreement = make_agreement("cycp-fedavg", MERGE, **settings)
    run = create_run(agreement, grid, out)
    run.loop.checkpointer = Checkpointer(BrittleFolder(out, survives=2).write_checkpoint, every_round=True)
    with pytest.raises(KilledBeforeCheckpoint):
        run.train_to_end()
    assert "site-4" in RunFolder(out).read_lines("attendance.jsonl")[2]["late"]
    rounds: list[Round] = []
    collect_rounds(resume_run(agreement, grid, out), rounds)
    trace = read_trace(out)
    assert trace[2] == RoundTrace((5, 6, 7))
    # Site 0 is late after the resume, so that this answer is merged.
    assert [client for line in trace for client, _ in line.late] == [0]
    expected = replay(small_recipe("cycp-fedavg", engine="loop", **settings), trace)
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    assert rounds[-1].traffic == expected[-1].traffic


def test_a_new_stage_takes_no_answers_of_the_old_one(tmp_path: Path) -> None:
    """Stages of one and two cycles: site 7 misses round 2, the last of the first stage, and answers in the second."""
    faults = [Fault(site=7, round=2, kind="after 15"), Fault(site=0, round=3, kind="after 8")]
    settings: dict[str, Any] = {"prox": 0.5, "stages": Geometric(initial=1), "cycles": 3}
    rounds, expected, trace = run_both("cycp-minimax", tmp_path, faults, **settings)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert lines[3]["dropped"] == {"site-7": "it answers round 2 of stage 0, which has ended"}
    assert not any(line.late for line in trace)
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("scaffold", {"participation": "cyclic"}, "clients of 'scaffold' keep a state"),
        ("codasca", {"participation": "cyclic"}, "clients of 'codasca' keep a state"),
        ("a-scaffold", {}, "clients of 'a-scaffold' keep a state"),
        ("focus", {}, "clients of 'focus' keep a state"),
        ("cycp-average-precision", {}, "keep a state that must stay in step with the server"),
        ("cycp-fedavg", {"transforms": (SecureSum(),), "participation": "full"}, "a secure sum holds the answers of"),
        ("cycp-fedavg", {"epsilon": 8.0, "delta": 0.001}, "the guarantee of a private run counts an answer in its own"),
    ],
)
def test_merging_is_refused_where_it_means_nothing(
    method: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    agreement = make_agreement(method, MERGE, **settings)
    with pytest.raises(ValueError, match=f"late_answers is 'merge', but .*{message}.*: use 'drop'"):
        create_run(agreement, make_grid(tmp_path / "sites"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_weight_of_staleness_is_the_polynomial_of_fedasync() -> None:
    assert [staleness_weight(late, 1.0) for late in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert [staleness_weight(late, 0.0) for late in (0, 9)] == [1.0, 1.0]


def test_weights_of_the_sites_that_came_are_those_of_a_simulation() -> None:
    """1/n to the bit, which (1/7) / (6/7) is not; other weights keep their proportions, and fixed ones stay."""
    for due in range(1, 12):
        cohort = Cohort(0, tuple(range(due)), (1 / due,) * due)
        for came in range(1, due + 1):
            assert select_present(cohort, tuple(range(came))).weights == (1 / came,) * came
            assert select_present(cohort, tuple(range(came)), (99,)).weights == (1 / (came + 1),) * (came + 1)
    uneven = select_present(Cohort(0, (1, 2, 3), (0.5, 0.25, 0.25)), (1, 2), (7,))
    # The late client has the mean weight, a third.
    assert uneven.weights == pytest.approx((0.5 * 12 / 13, 0.25 * 12 / 13, 12 / 39))
    assert uneven.absent == (3,)
    fixed = Cohort(0, (1, 2, 3), (0.25,) * 3, expected_size=4.0)
    assert select_present(fixed, (1, 3)) == Cohort(0, (1, 3), (0.25, 0.25), (2,), 4.0)
