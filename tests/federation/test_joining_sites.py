"""Sites join and leave between cycles: the run equals a simulation that goes on with the other clients, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedauc.data.clients import Clients
from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import FederationAgreement, SiteEntry
from fedauc.federation.exchange import Exchange
from fedauc.federation.in_process import InProcessGrid
from fedauc.federation.pausing import request_pause
from fedauc.federation.server import FederatedRun, summarize_run
from fedauc.federation.site_data import split_rows
from fedauc.guards import TrainingStopped
from fedauc.training import Round, State
from fedauc.transforms.secure_sum import SecureSum
from federation.hospital_tables import make_hospital_agreement, make_hospital_sites, make_hospitals
from federation.memory_grid import (
    NAMES,
    MemoryGrid,
    build_linear,
    collect_rounds,
    create_run,
    make_agreement,
    make_exchange,
    make_grid,
)
from small_federations import GROUPS, assemble_small, same_bits, small_federation, small_recipe

LATER = "site-4"
"""Joins after the first cycle or two; its group has another site."""


def without(agreement: FederationAgreement, *names: str) -> FederationAgreement:
    return replace(agreement, sites=tuple(site for site in agreement.sites if site.name not in names))


def resume_with(agreement: FederationAgreement, grid: MemoryGrid, out: Path) -> FederatedRun:
    """Resume with the agreement's sites as the site table."""
    return FederatedRun.resume(make_exchange(grid, agreement), RunFolder(out), build_linear)


def train_until_paused(run: FederatedRun, rounds: list[Round], round: int) -> None:
    """Train, and pause after a round."""

    def pause_after(finished: Round) -> None:
        if finished.phase.round == round:
            request_pause(run.folder.path)

    with pytest.raises(TrainingStopped, match=f"paused by the operator after {round + 1} of"):
        collect_rounds(run, rounds, pause_after)


def make_clients(order: list[int], emptied: tuple[int, ...] = ()) -> Clients:
    """The small federation's clients in another order; emptied ones have no rows."""
    source = small_federation()
    rows, owners = [], []
    for number, client in enumerate(order):
        part = source.rows[source.offsets[client] : source.offsets[client + 1]]
        if client not in emptied:
            rows.append(part)
            owners.append(np.full(len(part), number))
    chosen = np.concatenate(rows)
    groups = np.array([GROUPS[client] for client in order])
    names = np.arange(len(order))
    return Clients.from_assignment(source.inputs[chosen], source.labels[chosen], np.concatenate(owners), names, groups)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("cycp-pairwise", {}),
        ("cycp-minimax", {"prox": 0.5, "preset": "as-printed"}),
        ("scaffold", {"participation": "cyclic"}),
        ("rs-pairwise", {"participation": "cyclic"}),
    ],
)
def test_a_site_joins_and_another_leaves_between_cycles(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Site 4 joins as client 7 after the second cycle, when site 6 leaves; site 6 returns after the third."""
    settings = {"cycles": 4, **settings}
    everyone = make_agreement(method, {"evaluation": "none"}, **settings)
    grid, out, rounds = make_grid(tmp_path / "sites"), tmp_path / "run", list[Round]()
    grid.offline = {LATER}
    train_until_paused(create_run(without(everyone, LATER), grid, out), rounds, 5)
    grid.offline = set()
    train_until_paused(resume_with(without(everyone, "site-6"), grid, out), rounds, 8)
    collect_rounds(resume_with(everyone, grid, out), rounds)

    first = [0, 1, 2, 3, 5, 6, 7]
    recipe, expected, state = small_recipe(method, engine="loop", **settings), list[Round](), None
    memory: Any = None
    for clients, stop in (
        (make_clients(first), 6),
        (make_clients([*first, 4], emptied=(6,)), 9),
        (make_clients([*first, 4]), len(rounds)),
    ):
        training, _, start = assemble_small(recipe, clients=clients)
        if memory is not None:
            training.engine.restore_client_states(memory[0])
            training.ledger.restore_from(memory[1])
        for finished in training.rounds(start if state is None else state):
            expected.append(finished)
            if len(expected) == stop:
                break
        state = expected[-1].state
        assert isinstance(state, State)
        memory = training.engine.client_states(), training.ledger
    assert len(rounds) == len(expected)
    for ours, theirs in zip(rounds, expected, strict=True):
        assert ours.cohort == theirs.cohort
        assert same_bits(ours.state.server, theirs.state.server), ours.phase.round
        assert ours.traffic == theirs.traffic
    assert any(7 in finished.cohort.clients for finished in rounds[6:9])
    assert not any(5 in finished.cohort.clients for finished in rounds[6:9])
    assert any(5 in finished.cohort.clients for finished in rounds[9:])

    changes = json.loads((out / "membership.json").read_text())
    assert [(change["round"], change["left"]) for change in changes] == [(6, ["site-6"]), (9, [])]
    assert [site["name"] for site in changes[-1]["sites"]] == [*(NAMES[client] for client in first), LATER]
    lines = RunFolder(out).read_lines("attendance.jsonl")
    visited = {name: [line["round"] for line in lines if name in line["answered"]] for name in (LATER, "site-6")}
    assert min(visited[LATER]) >= 6
    assert not any(6 <= round < 9 for round in visited["site-6"])
    assert set(summarize_run(out)["attendance"]) == set(NAMES)


def test_a_site_that_has_left_is_sent_nothing_any_more(tmp_path: Path) -> None:
    """No visit, no evaluation and no model, although its node stays online."""
    agreement = make_agreement("cycp-fedavg")
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(agreement, grid, out), [], 2)
    sent = len(grid.sent_headers)
    resume_with(without(agreement, "site-6"), grid, out).train_to_end()
    assert {name for name, _ in grid.sent_headers[sent:]} == set(NAMES) - {"site-6"}
    kinds = {header["kind"] for _, header in grid.sent_headers[sent:]}
    assert kinds == {"visit", "evaluate", "deliver"}
    assert set(json.loads((out / "delivery.json").read_text())["sites"]) == set(NAMES) - {"site-6"}


def test_a_new_site_that_does_not_answer_may_join_later(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, cycles=3)
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    grid.offline = {LATER}
    train_until_paused(create_run(without(agreement, LATER), grid, out), [], 2)
    run = resume_with(agreement, grid, out)
    assert LATER not in [site.name for site in run.agreement.sites]
    train_until_paused(run, [], 5)
    grid.offline = set()
    rounds: list[Round] = []
    collect_rounds(resume_with(agreement, grid, out), rounds)
    assert [finished.cohort.clients for finished in rounds] == [(0, 1), (3, 7), (4, 5, 6)]


def test_a_change_in_the_middle_of_a_cycle_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(agreement, grid, out), [], 3)
    text = r"has changed since the run began \(\['site-6'\]\), but the run is in the middle of cycle 2: restore it"
    with pytest.raises(ValueError, match=text):
        resume_with(without(agreement, "site-6"), grid, out)
    rounds: list[Round] = []
    collect_rounds(resume_with(agreement, grid, out), rounds)
    assert [finished.phase.round for finished in rounds] == [4, 5]
    assert not (out / "membership.json").exists()


def test_a_run_rewound_before_a_change_forgets_it(tmp_path: Path) -> None:
    """The checkpoint after the cycle is damaged: the one before it is in the middle of the cycle."""
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(agreement, grid, out), [], 2)
    resume_with(without(agreement, "site-6"), grid, out)
    (out / "checkpoints" / "round-00000003.pt").unlink()
    with pytest.raises(ValueError, match="in the middle of cycle 1"):
        resume_with(without(agreement, "site-6"), grid, out)
    # The change that it forgets must not come back when it is paused and resumed again.
    rounds: list[Round] = []
    train_until_paused(resume_with(agreement, grid, out), rounds, 3)
    collect_rounds(resume_with(agreement, grid, out), rounds)
    assert rounds[0].cohort.clients == (5, 6, 7)
    assert rounds[3].cohort.clients == (5, 6, 7)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("site-3", "site-4"), "group 'g1' has no client with data; it must have at least 1"),
        (("site-0", "site-3", "site-4", "site-5", "site-6"), "the sites would hold 0 positives and 9 negatives"),
    ],
)
def test_sites_that_the_run_needs_cannot_leave(changed: tuple[str, ...], message: str, tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(agreement, grid, out), [], 2)
    with pytest.raises(ValueError, match=message):
        resume_with(without(agreement, *changed), grid, out)
    assert not (out / "membership.json").exists()


def test_a_site_of_a_new_group_cannot_join(tmp_path: Path) -> None:
    """It would make a cycle longer, and the run's rounds other ones."""
    everyone = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    train_until_paused(create_run(without(everyone, LATER), grid, out), [], 2)
    moved = tuple(SiteEntry(LATER, "g9") if site.name == LATER else site for site in everyone.sites)
    with pytest.raises(ValueError, match="would have 8 rounds instead of 6; keep the groups that it began with"):
        resume_with(replace(everyone, sites=moved), grid, out)
    assert not (out / "membership.json").exists()


def test_private_runs_and_secure_sums_keep_their_sites(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"transforms": (SecureSum(),), "participation": "full", "cycles": 2}
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, **settings)
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    create_run(agreement, grid, out)
    with pytest.raises(ValueError, match="but a private run and secure sums keep the sites that they began with"):
        resume_with(without(agreement, "site-6"), grid, out)


def test_a_site_that_joins_prepares_its_rows_as_the_others_did(tmp_path: Path) -> None:
    """Its table is checked against the schema first; a wrong one is named, and the run stays as it was."""
    tables, out, everyone = make_hospitals(), tmp_path / "run", make_hospital_agreement(evaluation="none")
    grid = InProcessGrid(make_hospital_sites(tables, tmp_path / "sites"))
    fewer = without(everyone, "west")
    run = FederatedRun.create(fewer, Exchange(grid, fewer.sites, fewer.policy), out)
    train_until_paused(run, [], 1)
    west = tmp_path / "sites" / "west" / "rows.csv"
    tables["west"].rename(columns={"age": "years"}).to_csv(west, index=False)
    with pytest.raises(TrainingStopped, match=r"site 'west': .*'age'.*; correct it there"):
        FederatedRun.resume(Exchange(grid, everyone.sites, everyone.policy), RunFolder(out))
    assert not (out / "membership.json").exists()
    tables["west"].to_csv(west, index=False)
    resumed = FederatedRun.resume(Exchange(grid, everyone.sites, everyone.policy), RunFolder(out))
    assert resumed.train_to_end()["attendance"]["west"]["answered"] == 1
    changes = json.loads((out / "membership.json").read_text())
    labels = tables["west"]["died"].to_numpy() == "yes"
    train, _ = split_rows(labels.astype(np.int8), 0.3)
    assert changes[0]["positives"][2] == int(labels[train].sum())
