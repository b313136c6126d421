"""Secure sums across sites: the simulator's integers, whoever drops out when, and a server that sees no upload."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.secure_rounds import flatten_integers
from fedauc.federation.secure_site import load_record
from fedauc.federation.serialization import Payload, unpack_tensors
from fedauc.federation.site_state import FolderSiteState
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Participation, UploadTransform
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.trace import Trace
from fedauc.stages import Geometric
from fedauc.training import Round
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers import WrappedAlgorithm
from fedauc.wrappers.example_dp import ExampleDP
from federation.memory_grid import (
    NAMES,
    Fault,
    MemoryGrid,
    collect_rounds,
    create_run,
    make_agreement,
    make_grid,
    make_sites,
    resume_run,
)
from small_federations import linear_scorer, same_bits, small_federation

GROUPS_OF_FOUR = Cyclic(given=((0, 1, 3), (4, 5, 6, 7)), assignment="given")
"""Two rounds per cycle, of three sites and of four; a sum needs all three of the first, and three of the second."""

METHODS: dict[str, dict[str, Any]] = {
    "cycp-pairwise": {"pool": "histogram"},
    "cycp-minimax": {"prox": 0.5, "stages": Geometric(initial=1)},
    "cycp-fedavg": {},
    "scaffold": {},
    "codasca": {},
}

CLIP = ClientDP(noise_multiplier=1.5, clip=0.5)

FIXED_SECRET = b"the same secret at every site..."
"""Stands for what a site draws in secret, so that a simulation can repeat it."""


def agree(method: str, policy: dict[str, Any] | None = None, **settings: Any) -> FederationAgreement:
    changes: dict[str, Any] = {"transforms": (SecureSum(),), "participation": GROUPS_OF_FOUR, "weighting": "paper"}
    return make_agreement(method, {"evaluation": "none", **(policy or {})}, **{**changes, **settings})


def run_federation(agreement: FederationAgreement, grid: MemoryGrid, out: Path) -> list[Round]:
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, out), rounds)
    return rounds


def simulate(agreement: FederationAgreement, secret: bytes | None = None, **changes: Any) -> list[Round]:
    recipe = replace(agreement.recipe, engine="loop", **changes)
    training, _, start = assemble_training(recipe, linear_scorer(), small_federation(), secret)
    return list(training.rounds(start))


def trace_of(rounds: int, absences: Sequence[tuple[int, int]]) -> Participation:
    """The schedule, with these absences (round, client)."""
    visits = [(number, client) for number in range(rounds) for client in (0, 1, 3, 4, 5, 6, 7)]
    rows = tuple(visit for visit in visits if visit not in absences)
    return Trace(rows=rows, schedule=GROUPS_OF_FOUR)


def expect_same_rounds(rounds: list[Round], expected: list[Round]) -> None:
    assert len(rounds) == len(expected) > 1
    for ours, theirs in zip(rounds, expected, strict=True):
        assert same_bits(ours.state.server, theirs.state.server)
        assert set(ours.cohort.absent) == set(theirs.cohort.absent)
        assert (ours.cohort.clients, ours.cohort.weights) == (theirs.cohort.clients, theirs.cohort.weights)
        assert ours.traffic == theirs.traffic


# ------------------------------------------------------------------------------------------- the simulator's integers


@pytest.mark.parametrize("method", METHODS)
def test_masked_rounds_have_the_simulators_bits(method: str, tmp_path: Path) -> None:
    agreement, grid = agree(method, cycles=3, **METHODS[method]), make_grid(tmp_path / "sites")
    rounds = run_federation(agreement, grid, tmp_path / "run")
    expect_same_rounds(rounds, simulate(agreement))
    # The masked vectors are nothing like the changes: as numbers of 32 bits they fill the ring.
    masked = [
        unpack_tensors(answer)["masked"][0] for _, answer in grid.answers if answer.read_header()["kind"] == "visit"
    ]
    assert len(masked) == 3 * 7
    assert torch.stack([vector[0] for vector in masked]).double().abs().median() > 2**28


DROPOUTS = {
    "before the upload": [Fault(site=5, round=1, kind="lost", times=9)],
    "upload too late": [Fault(site=5, round=1, kind="late", times=9)],
    "damaged upload": [Fault(site=5, round=1, kind="short masked")],
    "before unmasking": [Fault(site=5, round=1, kind="lost", times=9, exchange="unmask")],
    "one before, and one before unmasking of another round": [
        Fault(site=5, round=1, kind="lost", times=9),
        Fault(site=6, round=3, kind="lost", times=9, exchange="unmask"),
    ],
}


@pytest.mark.parametrize("case", DROPOUTS)
@pytest.mark.parametrize("method", ["scaffold", "cycp-pairwise"])
def test_who_drops_out_before_the_upload_is_absent_and_who_does_after_it_counts(
    method: str, case: str, tmp_path: Path
) -> None:
    faults = DROPOUTS[case]
    agreement = agree(method, cycles=3, **METHODS[method])
    rounds = run_federation(agreement, make_grid(tmp_path / "sites", faults), tmp_path / "run")
    absences = [(fault.round, fault.site) for fault in faults if fault.exchange == "visit"]
    expect_same_rounds(rounds, simulate(agreement, participation=trace_of(6, absences)))


@pytest.mark.parametrize("exchange", ["visit", "unmask"])
def test_below_the_threshold_a_round_is_skipped_and_the_reason_recorded(exchange: str, tmp_path: Path) -> None:
    """Three of four must upload and must reveal; two do."""
    faults = [Fault(site=site, round=1, kind="lost", times=9, exchange=exchange) for site in (5, 6)]
    agreement = agree("cycp-fedavg", cycles=2)
    rounds = run_federation(agreement, make_grid(tmp_path / "sites", faults), tmp_path / "run")
    assert rounds[1].cohort.clients == ()
    assert same_bits(rounds[1].state.server.shared, rounds[0].state.server.shared)
    assert not same_bits(rounds[2].state.server.shared, rounds[1].state.server.shared)
    line = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")[1]
    expected = (
        "2 of 4 sites answered; the secure sum needs 3" if exchange == "visit" else "2 sites have revealed shares"
    )
    assert expected in line["skipped"]
    if exchange == "visit":
        # The simulation of that attendance skips the round as well.
        expect_same_rounds(rounds, simulate(agreement, participation=trace_of(4, [(1, 5), (1, 6)])))


def test_draws_of_random_size_are_summed_or_skipped(tmp_path: Path) -> None:
    """Four of seven are expected; a draw of fewer than three is not asked, and the record says so."""
    schedule = CyclicPoisson(rate=0.6, groups=1, assignment="random")
    agreement = agree("cycp-fedavg", participation=schedule, cycles=12)
    rounds = run_federation(agreement, make_grid(tmp_path / "sites"), tmp_path / "run")
    expect_same_rounds(rounds, simulate(agreement))
    lines = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")
    skipped = [line["round"] for line in lines if "none was asked" in line.get("skipped", "")]
    assert skipped == [finished.phase.round for finished in rounds if not finished.cohort.clients]
    assert 0 < len(skipped) < len(rounds)


def test_unmasking_does_not_wait_for_more_answers_than_it_needs(tmp_path: Path) -> None:
    faults = [Fault(site=5, round=number, kind="lost", times=9, exchange="unmask") for number in (1, 3)]
    grid = make_grid(tmp_path / "sites", faults)
    run = create_run(agree("cycp-fedavg"), grid, tmp_path / "run")
    start = grid.time.now
    run.train_to_end()
    assert grid.time.now - start < 5
    assert grid.faults[0].times < 9


# --------------------------------------------------------------------------------------------------- noise of clients


def make_noised_grid(folder: Path, faults: Sequence[Fault] = ()) -> MemoryGrid:
    return MemoryGrid(make_sites(small_federation(), folder, draw_secret=lambda: FIXED_SECRET), faults)


@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise"])
def test_with_the_sites_secret_a_simulation_repeats_the_noised_run(method: str, tmp_path: Path) -> None:
    agreement = agree(method, cycles=3, transforms=(CLIP, SecureSum()), **METHODS[method])
    faults = [Fault(site=7, round=3, kind="lost", times=9), Fault(site=4, round=5, kind="lost", exchange="unmask")]
    rounds = run_federation(agreement, make_noised_grid(tmp_path / "sites", faults), tmp_path / "run")
    expect_same_rounds(rounds, simulate(agreement, FIXED_SECRET, participation=trace_of(6, [(3, 7)])))
    # Noise that follows from the seed is another one.
    assert not same_bits(rounds[0].state.server.shared, simulate(agreement)[0].state.server.shared)


def test_sites_draw_new_noise_for_every_run(tmp_path: Path) -> None:
    agreement = agree("cycp-fedavg", transforms=(CLIP, SecureSum()), cycles=1)
    first, second = (run_federation(agreement, make_grid(tmp_path / name), tmp_path / f"run-{name}") for name in "ab")
    assert not same_bits(first[0].state.server.shared, second[0].state.server.shared)


def test_the_server_is_told_no_class_counts(tmp_path: Path) -> None:
    agreement, grid = agree("cycp-fedavg", transforms=(CLIP, SecureSum())), make_grid(tmp_path / "sites")
    run_federation(agreement, grid, tmp_path / "run")
    for _, answer in grid.answers:
        assert "class_counts" not in answer.read_header()
    census = json.loads((tmp_path / "run" / "census.json").read_text())
    assert census["positives"] == census["negatives"] == [1, 1, 0, 1, 1, 1, 1, 1]
    header = grid.visit_headers(NAMES[0])[0]
    assert header["class_totals"] == [8, 7]
    assert header["released_totals"] == [7, None, None, None]
    assert header["recipe"]["epsilon"] is None


@pytest.mark.parametrize("transforms", [(CLIP, SecureSum()), (SecureSum(),)], ids=["noise", "no noise"])
def test_a_site_answers_a_round_once(tmp_path: Path, transforms: tuple[UploadTransform, ...]) -> None:
    """The server crashes between the two exchanges of round 1; resumed, it skips that round and goes on.

    The sum of one attempt less that of another, in which a site was absent, would be that site's upload.
    """
    agreement = agree("scaffold", transforms=transforms, cycles=3)
    grid, rounds = make_grid(tmp_path / "sites"), list[Round]()
    run, push_message = create_run(agreement, grid, tmp_path / "run"), grid.push_message
    crash_between_exchanges(grid, members=[4, 5, 6, 7])
    with pytest.raises(KeyboardInterrupt):
        run.train_to_end()
    grid.push_message = push_message  # type: ignore[method-assign]
    collect_rounds(resume_run(agreement, grid, tmp_path / "run"), rounds)
    assert [finished.phase.round for finished in rounds] == [1, 2, 3, 4, 5]
    assert [len(finished.cohort.clients) for finished in rounds] == [0, 3, 4, 3, 4]
    line = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")[1]
    assert set(line["refused"]) == {NAMES[site] for site in (4, 5, 6, 7)}
    assert (
        "this site has answered round 1; the sums of two answers to a round could differ" in line["refused"][NAMES[4]]
    )


def crash_between_exchanges(grid: MemoryGrid, members: list[int]) -> None:
    """The server dies when it is about to ask these members for their first shares."""
    push_message = grid.push_message

    def push_until_crash(node_id: int, payload: Payload, seconds: float) -> str:
        header = payload.read_header()
        if header["kind"] == "unmask" and header["session"]["members"] == members:
            raise KeyboardInterrupt
        return push_message(node_id, payload, seconds)

    grid.push_message = push_until_crash  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------- what a site does not do twice


def test_a_repeated_message_gets_the_same_bytes(tmp_path: Path) -> None:
    """The reply of site 5 is lost after it has masked its upload."""
    agreement = agree("scaffold", cycles=2, transforms=(CLIP, SecureSum()))
    grid = make_grid(tmp_path / "sites", [Fault(site=5, round=1, kind="lost reply")])
    rounds = run_federation(agreement, grid, tmp_path / "run")
    assert rounds[1].cohort.clients == (4, 5, 6, 7)
    answers = [answer for name, answer in grid.answers if name == NAMES[5] and answer.read_header().get("round") == 1]
    assert len(answers) == 2
    assert answers[0].header_text == answers[1].header_text
    assert np.array_equal(answers[0].body, answers[1].body)


def capture_messages(grid: MemoryGrid) -> list[tuple[str, Payload]]:
    """What is sent from now on, by name of the site."""
    sent, push_message = list[tuple[str, Payload]](), grid.push_message

    def record_message(node_id: int, payload: Payload, seconds: float) -> str:
        sent.append((next(name for name, number in grid.node_ids.items() if number == node_id), payload))
        return push_message(node_id, payload, seconds)

    grid.push_message = record_message  # type: ignore[method-assign]
    return sent


def change_header(payload: Payload, **changes: Any) -> Payload:
    return Payload(json.dumps({**payload.read_header(), **changes}), payload.body)


def test_a_site_refuses_what_would_reveal_its_upload(tmp_path: Path) -> None:
    agreement, grid = agree("cycp-fedavg", cycles=2), make_grid(tmp_path / "sites")
    run = create_run(agreement, grid, tmp_path / "run")
    sent = capture_messages(grid)
    run.train_to_end()
    site = grid.sites[NAMES[4]]
    visits = [payload for name, payload in sent if name == NAMES[4] and payload.read_header()["kind"] == "visit"]
    requests = [payload for name, payload in sent if name == NAMES[4] and payload.read_header()["kind"] == "unmask"]
    session = visits[0].read_header()["session"]

    def refusal(message: Payload) -> str:
        header = site.answer_message(message).read_header()
        assert header["kind"] == "refusal"
        return str(header["reason"])

    assert "this site has answered the session" in refusal(visits[0])
    assert "this site has answered the session" in refusal(
        change_header(visits[1], session={**visits[1].read_header()["session"], "threshold": 4})
    )
    fresh = {**session, "session_id": "ab" * 16 + session["session_id"][32:]}
    assert "the session is for another round" in refusal(
        change_header(visits[1], session={**fresh, "session_id": "ab" * 24})
    )
    few = {**fresh, "members": session["members"][:2], "public_keys": session["public_keys"][:2], "threshold": 2}
    assert "this site needs 3" in refusal(change_header(visits[0], session=few))
    stranger = {**fresh, "public_keys": [session["public_keys"][0], "cd" * 32, *session["public_keys"][2:]]}
    # In a round that the site has not answered yet.
    stranger["session_id"] = "ab" * 16 + (99).to_bytes(8, "little").hex()
    phase = {**visits[0].read_header()["phase"], "round": 99}
    assert "client 5 has the key cdcd" in refusal(change_header(visits[0], session=stranger, phase=phase))
    without = {key: value for key, value in visits[0].read_header().items() if key != "session"}
    assert "the server has opened no session" in refusal(Payload(json.dumps(without), visits[0].body))
    recipe = {**visits[0].read_header()["recipe"], "transforms": []}
    assert "the server asks for an upload in the clear" in refusal(change_header(visits[0], recipe=recipe))
    assert "this site has answered for (4, 5, 6, 7)" in refusal(change_header(requests[0], survivors=[4, 5, 6]))


def test_a_site_that_lost_its_key_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    agreement, grid, rounds = agree("cycp-fedavg", cycles=2), make_grid(tmp_path / "sites"), list[Round]()
    run = create_run(agreement, grid, tmp_path / "run")
    (store,) = (tmp_path / "sites" / NAMES[5]).iterdir()
    key_file = store / "secure-sum-record.payload"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    key_file.unlink()
    collect_rounds(run, rounds)
    assert [finished.cohort.clients for finished in rounds[1::2]] == [(4, 6, 7)] * 2
    line = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")[1]
    assert "no key for this run" in line["refused"][NAMES[5]]
    expect_same_rounds(rounds, simulate(agreement, participation=trace_of(4, [(1, 5), (3, 5)])))


def test_a_site_registers_the_same_key_again(tmp_path: Path) -> None:
    """The registration's reply is lost, and the message sent again."""
    grid = make_grid(tmp_path / "sites")
    create_run(agree("cycp-fedavg"), grid, tmp_path / "run")
    census = json.loads((tmp_path / "run" / "census.json").read_text())
    record = load_record(FolderSiteState(tmp_path / "sites" / NAMES[0] / census["run"]))
    assert record is not None
    assert census["public_keys"]["0"] == record.public_key.hex()
    assert len(set(census["public_keys"].values())) == 7


# ------------------------------------------------------------------------------------------- refusals, and the trusted


def test_an_upload_out_of_range_is_refused_at_the_site_without_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "fedauc.site")
    agreement = agree("cycp-fedavg", {"patience": 2}, transforms=(SecureSum(largest=1e-6),))
    with pytest.raises(TrainingStopped, match="0 of 4 sites answered; the secure sum needs 3, for 2 rounds in a row"):
        run_federation(agreement, make_grid(tmp_path / "sites"), tmp_path / "run")
    line = RunFolder(tmp_path / "run").read_lines("attendance.jsonl")[0]
    assert line["refused"][NAMES[0]].endswith(
        "out of the range of the secure sum: raise --transforms.secure-sum.largest, or lower the learning rate"
    )
    assert "an upload holds" in caplog.text


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ({}, {"participation": Cyclic()}, "a round has 2 clients; secure-sum needs 3"),
        ({"evaluation": "histograms"}, {"transforms": (CLIP, SecureSum())}, "evaluation is 'histograms'; scores of"),
        ({"evaluation": "scores"}, {"transforms": (CLIP,)}, "evaluation is 'scores'; scores of held-out rows"),
        (
            {},
            {"transforms": (CLIP, SecureSum()), "weighting": "pooled"},
            "weighting is 'pooled', which needs the class",
        ),
        ({"patience": 1}, {"transforms": (CLIP, SecureSum())}, "patience is 1; sites answer a round once"),
        (
            {"quorum": 2},
            {"transforms": (CLIP,), "participation": CyclicPoisson(rate=0.5)},
            "quorum is 2; where clients are drawn in secret, whether one was drawn would decide whether the others",
        ),
    ],
)
def test_what_would_reveal_too_much_is_refused_before_the_run(
    policy: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        create_run(agree("cycp-fedavg", policy, **settings), make_grid(tmp_path / "sites"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
@pytest.mark.parametrize("transforms", [(CLIP,), (CLIP, SecureSum(noise="server"))], ids=["plain", "secure"])
def test_a_trusted_server_noises_the_sum_and_the_totals_from_its_secret(
    weighting: str, transforms: Any, tmp_path: Path
) -> None:
    agreement = agree("cycp-minimax", transforms=transforms, weighting=weighting)
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    run = create_run(agreement, grid, out)
    key_file = out / "noise.key"
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    rounds: list[Round] = []
    collect_rounds(run, rounds)
    secret = RunFolder(out).read_secret()
    expect_same_rounds(rounds, simulate(agreement, secret))
    header = grid.visit_headers(NAMES[0])[0]
    assert header["class_totals"] == [8, 7]
    released = header["released_totals"]
    if weighting == "paper":
        assert released == [7, None, None, None]
    else:
        position, exact = {"clients": (1, [5, 6]), "pooled": (2, [15, 27])}[weighting]
        assert released[position] != exact
        assert len(released[position]) == 2
    assert header["recipe"]["transforms"][0]["noise_multiplier"] == 1.5
    assert secret.hex() not in json.dumps([sent for _, sent in grid.sent_headers])


def test_a_private_federation_resumes_with_its_secret(tmp_path: Path) -> None:
    agreement, grid, rounds = (
        agree("cycp-fedavg", transforms=(CLIP,), cycles=3),
        make_grid(tmp_path / "sites"),
        list[Round](),
    )
    run = create_run(agreement, grid, tmp_path / "run")

    def interrupt(finished: Round) -> None:
        if finished.phase.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_rounds(run, [], interrupt)
    collect_rounds(resume_run(agreement, grid, tmp_path / "run"), rounds)
    expected = simulate(agreement, RunFolder(tmp_path / "run").read_secret())
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    (tmp_path / "run" / "noise.key").unlink()
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match=r"noise.key is missing"):
        resume_run(agreement, grid, tmp_path / "run")


def test_a_skipped_round_of_a_trusted_server_is_noised_with_the_planned_denominator(tmp_path: Path) -> None:
    """Whoever comes, something is released: zeros with noise, as in a simulation in which nobody comes."""
    faults = [Fault(site=site, round=1, kind="lost", times=9) for site in (4, 5, 6, 7)]
    agreement = agree("cycp-fedavg", transforms=(CLIP,))
    rounds = run_federation(agreement, make_grid(tmp_path / "sites", faults), tmp_path / "run")
    absences = [(1, client) for client in (4, 5, 6, 7)]
    expected = simulate(
        agreement, RunFolder(tmp_path / "run").read_secret(), participation=trace_of(len(rounds), absences)
    )
    assert not same_bits(rounds[1].state.server.shared, rounds[0].state.server.shared)
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_flattening_a_tree_keeps_its_numbers_in_order() -> None:
    tree = (torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor(6, dtype=torch.int32))
    assert flatten_integers(tree).tolist() == list(range(7))


def test_sites_are_sent_the_noise_that_a_budget_of_examples_needs(tmp_path: Path) -> None:
    """The recipe has a budget and no noise; what the server has calibrated is what the sites add."""
    agreement = agree("cycp-fedavg", wrappers=(ExampleDP(),), transforms=(), epsilon=4.0, delta=1e-3)
    grid = make_grid(tmp_path / "sites")
    run_federation(agreement, grid, tmp_path / "run")
    training = assemble_training(agreement.recipe, linear_scorer(), small_federation()).training
    assert isinstance(training.algorithm, WrappedAlgorithm)
    calibrated = training.algorithm.wrapper
    assert isinstance(calibrated, ExampleDP)
    (sent,) = grid.visit_headers(NAMES[0])[0]["recipe"]["wrappers"]
    assert sent["noise_multiplier"] == calibrated.noise_multiplier != ExampleDP().noise_multiplier


def test_a_site_that_adds_noise_to_its_rows_gives_one_answer_to_a_round(tmp_path: Path) -> None:
    """Answers with fresh noise could be averaged: a repeated message gets the same bytes, an earlier round nothing."""
    agreement = agree("cycp-fedavg", wrappers=(ExampleDP(),), transforms=(), cycles=2)
    grid = make_grid(tmp_path / "sites")
    run = create_run(agreement, grid, tmp_path / "run")
    sent = capture_messages(grid)
    run.train_to_end()
    visits = [payload for name, payload in sent if name == NAMES[4] and payload.read_header()["kind"] == "visit"]
    first = make_grid(tmp_path / "again").sites[NAMES[4]]
    once, twice = first.answer_message(visits[0]), first.answer_message(visits[0])
    assert once.header_text == twice.header_text
    assert np.array_equal(once.body, twice.body)
    later = first.answer_message(visits[1])
    assert not np.array_equal(once.body, later.body)
    refused = first.answer_message(visits[0]).read_header()
    assert refused["kind"] == "refusal"
    assert "a second answer to round 1 costs privacy" in refused["reason"]
    # Another site draws other noise, so the equal bytes above are no accident.
    other = make_grid(tmp_path / "other").sites[NAMES[4]]
    assert not np.array_equal(once.body, other.answer_message(visits[0]).body)
