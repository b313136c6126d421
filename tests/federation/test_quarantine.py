"""A site whose answers are refused too often is asked no more; honest faults do not count; the operator releases it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_helpers import fedauc
from fedauc.experiments.folder import RunFolder
from fedauc.federation.evaluation import SCORE_BINS
from fedauc.federation.quarantine import QUARANTINE_FILE, RELEASES_FILE, list_quarantined, request_release
from fedauc.federation.server import summarize_run
from fedauc.federation.site import SitePolicy
from fedauc.participation.cyclic import Cyclic
from fedauc.training import Round
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from federation.memory_grid import (
    Fault,
    MemoryGrid,
    collect_rounds,
    create_run,
    make_agreement,
    make_grid,
    make_sites,
    resume_run,
)
from federation.misbehaving_sites import Change, MisbehavingSite, Trees, claim_rows, make_misbehaving_grid, send_nan
from federation.test_faults import make_trace
from federation.test_secure_rounds import GROUPS_OF_FOUR, expect_same_rounds, simulate, trace_of
from small_federations import held_out, run_rounds, same_bits, small_federation, small_recipe

POLICY = {"evaluation": "none", "quarantine_after": 2}


def train_cycles(grid: MemoryGrid, folder: Path, policy: dict[str, Any], cycles: int, **settings: Any) -> list[Round]:
    """Every round of CyCp-FedAvg, three per cycle, in which site 4 is due in rounds 1, 4, 7, ..."""
    agreement = make_agreement("cycp-fedavg", policy, cycles=cycles, participation=Cyclic(), **settings)
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, folder), rounds)
    return rounds


def visited_rounds(grid: MemoryGrid, name: str) -> list[int]:
    return [header["phase"]["round"] for header in grid.visit_headers(name)]


def test_a_site_that_misbehaves_is_no_longer_asked(tmp_path: Path) -> None:
    """Refused in rounds 1 and 4, so that it is not asked in 7 and 10. The run is that of the simulator without it."""
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan})
    rounds = train_cycles(grid, tmp_path / "run", POLICY, cycles=4)
    assert visited_rounds(grid, "site-4") == [1, 4]
    trace = make_trace(12, {(round, 4) for round in (1, 4, 7, 10)})
    expected = run_rounds(small_recipe("cycp-fedavg", engine="loop", cycles=4, participation=trace))
    for ours, theirs in zip(rounds, expected, strict=True):
        assert same_bits(ours.state.server, theirs.state.server)
        assert (ours.cohort.clients, ours.cohort.weights) == (theirs.cohort.clients, theirs.cohort.weights)
        assert set(ours.cohort.absent) == set(theirs.cohort.absent)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert [set(line["refused"]) for line in lines if line["refused"]] == [{"site-4"}] * 2
    assert lines[7]["absent"] == {"site-4": "is in quarantine for the rest of the run"}


def test_the_log_and_show_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train_cycles(make_misbehaving_grid(tmp_path / "sites", {4: send_nan}), tmp_path / "run", POLICY, cycles=3)
    reason = "2 of its answers were refused, the last one because 5 of its values are NaN or infinite"
    assert f"site 'site-4' is in quarantine for the rest of the run: {reason}" in caplog.text
    summary = summarize_run(tmp_path / "run")
    assert summary["quarantine"] == {"site-4": f"is in quarantine for the rest of the run: {reason}"}
    shown = fedauc(capsys, "federation", "show", str(tmp_path / "run"))
    assert shown.code == 0
    assert f"site-4 is in quarantine for the rest of the run: {reason}" in shown.out


def test_after_its_cycles_a_site_is_asked_again(tmp_path: Path) -> None:
    """Refused in rounds 1 and 4; a cycle has three rounds, so that it is asked again from round 8 on, in 10."""
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan}, rounds=[1, 4])
    rounds = train_cycles(grid, tmp_path / "run", {**POLICY, "quarantine_cycles": 1}, cycles=5)
    assert visited_rounds(grid, "site-4") == [1, 4, 10, 13]
    assert [finished.phase.round for finished in rounds if 4 in finished.cohort.absent] == [1, 4, 7]
    events = RunFolder(tmp_path / "run").read_lines(QUARANTINE_FILE)
    assert [(line["round"], line["event"]) for line in events] == [(4, "quarantined"), (8, "released")]
    assert "until round 9" in events[0]["text"]  # people count from 1
    assert list_quarantined(RunFolder(tmp_path / "run")) == {}


def test_after_quarantine_refusals_count_from_zero(tmp_path: Path) -> None:
    """Refused in rounds 1 and 4, asked again from round 8 on, and refused once more in round 10: one is not two."""
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan}, rounds=[1, 4, 10])
    train_cycles(grid, tmp_path / "run", {**POLICY, "quarantine_cycles": 1}, cycles=5)
    assert visited_rounds(grid, "site-4") == [1, 4, 10, 13]
    assert list_quarantined(RunFolder(tmp_path / "run")) == {}


HONEST_FAULTS = ["lost", "late", "error", "lost reply"]


@pytest.mark.parametrize("kind", HONEST_FAULTS)
def test_absence_is_no_misbehaviour(kind: str, tmp_path: Path) -> None:
    faults = [Fault(site=4, round=round, kind=kind, times=9) for round in (1, 4, 7)]
    grid = make_grid(tmp_path / "sites", faults)
    rounds = train_cycles(grid, tmp_path / "run", {**POLICY, "quarantine_after": 1}, cycles=4)
    assert visited_rounds(grid, "site-4")[-1] == 10
    assert not (tmp_path / "run" / QUARANTINE_FILE).exists()
    assert rounds[7].cohort.absent == (4,)


def test_a_site_that_declines_does_not_misbehave(tmp_path: Path) -> None:
    """Its data cannot be read, or its owner's policy says no: it says so itself."""
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-fedavg", {**POLICY, "quarantine_after": 1}, cycles=4)
    run = create_run(agreement, grid, tmp_path / "run")

    def fail_to_load() -> Any:
        raise OSError("the disk is gone")

    grid.sites["site-4"]._load_data = fail_to_load
    collect_rounds(run, [])
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert [set(line["refused"]) for line in lines if line["refused"]] == [{"site-4"}] * 4
    assert not (tmp_path / "run" / QUARANTINE_FILE).exists()


def test_an_answer_that_only_stands_out_in_its_cohort_does_not_count(tmp_path: Path) -> None:
    """The cohort's median depends on who came: such a refusal costs the round and no more."""
    grid = make_grid(tmp_path / "sites", [Fault(site=6, round=round, kind="huge", times=9) for round in (2, 5)])
    policy = {**POLICY, "quarantine_after": 1, "history_limit": 1e9}
    train_cycles(grid, tmp_path / "run", policy, cycles=2)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert [list(lines[round]["refused"]) for round in (2, 5)] == [["site-6"]] * 2
    assert not (tmp_path / "run" / QUARANTINE_FILE).exists()


def test_zero_asks_every_site_always(tmp_path: Path) -> None:
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan})
    train_cycles(grid, tmp_path / "run", {**POLICY, "quarantine_after": 0}, cycles=4)
    assert visited_rounds(grid, "site-4") == [1, 4, 7, 10]


class Killed(Exception):
    """Stands for a process that is killed."""


def kill_server_after(last_round: int) -> Callable[[Round], None]:
    """What is called after every round, and kills the server after one."""

    def kill_server(finished: Round) -> None:
        if finished.phase.round == last_round:
            raise Killed

    return kill_server


def train_until(agreement: Any, grid: MemoryGrid, folder: Path, last_round: int) -> None:
    """A new run that is killed after a round."""
    with pytest.raises(Killed):
        collect_rounds(create_run(agreement, grid, folder), [], after_round=kill_server_after(last_round))


def test_quarantine_and_its_counts_survive_a_resume(tmp_path: Path) -> None:
    """Killed after the first refusal, and after the second: the site is asked in rounds 1 and 4, never again."""
    agreement = make_agreement("cycp-fedavg", POLICY, cycles=4)
    for last_round in (2, 5):
        folder = tmp_path / str(last_round)
        grid = make_misbehaving_grid(folder / "sites", {4: send_nan})
        train_until(agreement, grid, folder / "run", last_round)
        resume_run(agreement, grid, folder / "run").train_to_end()
        assert visited_rounds(grid, "site-4") == [1, 4]
        assert list(list_quarantined(RunFolder(folder / "run"))) == ["site-4"]


def test_the_operator_releases_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In quarantine after round 4, released before round 6: it is asked in rounds 7 and 10."""
    agreement = make_agreement("cycp-fedavg", {**POLICY, "quarantine_after": 1}, cycles=4)
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan}, rounds=[4])
    train_until(agreement, grid, tmp_path / "run", 5)
    released = fedauc(capsys, "federation", "release", str(tmp_path / "run"), "site-4")
    assert (released.code, "asked again" in released.out) == (0, True)
    resume_run(agreement, grid, tmp_path / "run").train_to_end()
    assert visited_rounds(grid, "site-4") == [1, 4, 7, 10]
    events = RunFolder(tmp_path / "run").read_lines(QUARANTINE_FILE)
    assert [(line["round"], line["event"]) for line in events] == [(4, "quarantined"), (6, "released")]
    assert "the operator has released it" in events[1]["text"]
    with pytest.raises(ValueError, match=r"site is 'site-9', which is no site of"):
        request_release(tmp_path / "run", "site-9", ["site-0"])


def test_a_list_of_releases_that_was_deleted_begins_anew(tmp_path: Path) -> None:
    """The error about a damaged list advises that."""
    agreement = make_agreement("cycp-fedavg", {**POLICY, "quarantine_after": 1}, cycles=4)
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan}, rounds=[4])
    train_until(agreement, grid, tmp_path / "run", 2)
    for name in ("site-1", "site-2"):
        request_release(tmp_path / "run", name, [name])
    with pytest.raises(Killed):
        collect_rounds(resume_run(agreement, grid, tmp_path / "run"), [], kill_server_after(5))
    (tmp_path / "run" / RELEASES_FILE).unlink()
    request_release(tmp_path / "run", "site-4", ["site-4"])
    resume_run(agreement, grid, tmp_path / "run").train_to_end()
    assert visited_rounds(grid, "site-4") == [1, 4, 7, 10]


def test_an_earlier_release_does_not_protect_a_site_later(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {**POLICY, "quarantine_after": 1}, cycles=4)
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan}, rounds=[4, 7])
    train_until(agreement, grid, tmp_path / "run", 5)
    request_release(tmp_path / "run", "site-4", ["site-4"])
    resume_run(agreement, grid, tmp_path / "run").train_to_end()
    assert visited_rounds(grid, "site-4") == [1, 4, 7]


def test_a_site_in_quarantine_is_neither_evaluated_nor_sent_the_model(tmp_path: Path) -> None:
    grid = make_misbehaving_grid(tmp_path / "sites", {4: send_nan})
    result = create_run(
        make_agreement("cycp-fedavg", {"evaluation": "histograms", "quarantine_after": 1}, cycles=3),
        grid,
        tmp_path / "run",
    ).train_to_end()
    # Of the eight sites with held-out rows seven are asked.
    assert result["final"]["test_sites"] == 7
    kinds = [header["kind"] for name, header in grid.sent_headers if name == "site-4"]
    assert kinds.count("visit") == 1
    assert "evaluate" not in kinds
    assert "deliver" not in kinds
    assert summarize_run(tmp_path / "run")["delivery"]["site-4"] == "is in quarantine for the rest of the run"


# ------------------------------------------------------------------------------------------------------- secure rounds


@pytest.mark.parametrize("minimum", [3, 4])
def test_a_secure_sum_is_over_the_sites_that_are_asked(minimum: int, tmp_path: Path) -> None:
    """Site 5's class counts are wrong in rounds 1 and 3, so that the round of four has three sites from round 5 on.

    Where a sum needs four, these rounds are skipped.
    """
    grid = make_misbehaving_grid(tmp_path / "sites", {5: claim_rows})
    changes: dict[str, Any] = {"participation": GROUPS_OF_FOUR, "weighting": "paper", "cycles": 4}
    transforms = (SecureSum(threshold=0.5, minimum_cohort=3),)
    agreement = make_agreement(
        "cycp-fedavg", {**POLICY, "quorum": minimum, "patience": 9}, transforms=transforms, **changes
    )
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    assert visited_rounds(grid, "site-5") == [1, 3]
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert "it now holds [1000, 1000] positives and negatives; it registered" in lines[1]["refused"]["site-5"]
    assert lines[5]["absent"] == {"site-5": "is in quarantine for the rest of the run"}
    if minimum == 3:
        expect_same_rounds(rounds, simulate(agreement, participation=trace_of(8, [(r, 5) for r in (1, 3, 5, 7)])))
    else:
        assert all("skipped" in lines[round] for round in (1, 3, 5, 7))


def test_too_few_sites_for_a_secure_sum_are_not_asked(tmp_path: Path) -> None:
    """Of the round of three, which a sum needs, one is in quarantine: nobody trains for nothing."""
    grid = make_misbehaving_grid(tmp_path / "sites", {3: claim_rows})
    changes: dict[str, Any] = {"participation": GROUPS_OF_FOUR, "weighting": "paper", "cycles": 3}
    policy = {"evaluation": "none", "quarantine_after": 1, "patience": 9}
    agreement = make_agreement("cycp-fedavg", policy, transforms=(SecureSum(),), **changes)
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    assert "2 of 3 sites could be asked; the secure sum needs 3" in lines[2]["skipped"]
    assert visited_rounds(grid, "site-0") == [0]
    assert rounds[2].cohort.clients == ()


def test_class_counts_that_sites_hide_are_not_compared(tmp_path: Path) -> None:
    """Where sites add noise, the server does not know their class counts, and no answer may say them."""
    grid = make_grid(tmp_path / "sites")
    changes: dict[str, Any] = {"participation": GROUPS_OF_FOUR, "weighting": "paper", "cycles": 1}
    transforms = (ClientDP(noise_multiplier=1.5, clip=0.5), SecureSum())
    agreement = make_agreement("cycp-fedavg", POLICY, transforms=transforms, **changes)
    create_run(agreement, grid, tmp_path / "run").train_to_end()
    visits = [answer.read_header() for _, answer in grid.answers if answer.read_header()["kind"] == "visit"]
    assert len(visits) == 7
    assert not any("class_counts" in header for header in visits)


# ---------------------------------------------------------------------------------------------------------- evaluation


def claim_auc(header: dict[str, Any], trees: Trees) -> None:
    header["auc"] = 1.0


def claim_no_number(header: dict[str, Any], trees: Trees) -> None:
    header["auc"] = float("nan")


def answer_late(header: dict[str, Any], trees: Trees) -> None:
    header["round"] -= 3


def add_held_out_rows(header: dict[str, Any], trees: Trees) -> None:
    header.pop("auc", None)
    counts = trees["histograms"][0].clone()
    counts[1, -1] += 5
    trees["histograms"] = (counts,)


def count_endlessly(header: dict[str, Any], trees: Trees) -> None:
    trees["histograms"] = (torch.full((2, SCORE_BINS), 2**62),)


EVALUATIONS: dict[str, tuple[Change, list[int], str]] = {
    "changed training rows": (claim_rows, [5], "it now holds [1000, 1000] positives and negatives"),
    "more held-out rows": (add_held_out_rows, [5], "held-out positives and"),
    "its own AUC": (claim_auc, [2], "it says that its AUC is 1.0, but its scores have one between"),
    "its own AUC is no number": (claim_no_number, [2], "it says that its AUC is nan"),
    "another round": (answer_late, [5], "it evaluates the model of round 2; this is round 5"),
    "endless rows": (count_endlessly, [2], "counts more than 1e+12 rows of a class"),
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_an_implausible_evaluation_is_refused_and_counts(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cycles end with rounds 2 and 5. The other sites' AUC is that of a run without the site's held-out rows."""
    change, rounds, reason = EVALUATIONS[case]
    policy = SitePolicy("histograms", share_auc=True)
    sites = make_sites(small_federation(), tmp_path / "sites", held_out(), policy)
    sites["site-4"] = MisbehavingSite(sites["site-4"], change, "evaluate", rounds)
    grid = MemoryGrid(sites)
    agreement = make_agreement("cycp-fedavg", {"evaluation": "histograms", "quarantine_after": 1}, cycles=3)
    create_run(agreement, grid, tmp_path / "run").train_to_end()
    records = RunFolder(tmp_path / "run").read_records()
    assert reason in caplog.text
    # In quarantine from then on, and so it is not asked after the third cycle either.
    first = rounds[0] // 3
    assert [record["test_sites"] for record in records] == [8] * first + [7] * (3 - first)
    assert "site-4" in list_quarantined(RunFolder(tmp_path / "run"))
    # The record and the summary say so.
    assert [list(record.get("missing", {})) for record in records] == [
        ["site-4"] * (cycle == first) for cycle in range(3)
    ]
    shown = fedauc(capsys, "federation", "show", str(tmp_path / "run"))
    assert "site-4: no scores in 1 of 3 evaluations; last: " in shown.out
    assert shown.out.count("no scores in") == 1


def test_held_out_counts_survive_a_resume(tmp_path: Path) -> None:
    sites = make_sites(small_federation(), tmp_path / "sites", held_out())
    sites["site-4"] = MisbehavingSite(sites["site-4"], add_held_out_rows, "evaluate", [5])
    agreement, grid = make_agreement("cycp-fedavg", {"evaluation": "histograms"}, cycles=2), MemoryGrid(sites)
    train_until(agreement, grid, tmp_path / "run", 3)
    resume_run(agreement, grid, tmp_path / "run").train_to_end()
    assert [record["test_sites"] for record in RunFolder(tmp_path / "run").read_records()] == [8, 7]
