"""The federated engine gives the loop engine's results over a message service that loses, delays and corrupts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.engine import count_invalid, measure_norm
from fedauc.federation.exchange import Exchange, Node
from fedauc.guards import TrainingStopped
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace
from fedauc.stages import Geometric
from fedauc.training import Round
from fedauc.trees import tree_leaves
from federation.memory_grid import (
    NAMES,
    Fault,
    MemoryGrid,
    collect_rounds,
    create_run,
    make_agreement,
    make_exchange,
    make_grid,
    resume_run,
)
from small_federations import EMPTY, GROUPS, run_rounds, same_bits, small_federation, small_recipe

METHODS: dict[str, dict[str, Any]] = {
    "cycp-pairwise": {},
    "cycp-minimax": {"prox": 0.5, "stages": Geometric(initial=1)},
    "cycp-fedavg": {},
    "scaffold": {"participation": "cyclic"},
    "a-scaffold": {},
    "codasca": {"participation": "cyclic"},
    "focus": {},
    "cycp-average-precision": {},
}
"""Scores in a pool; a stage's anchor; neither; client states of four kinds; a pool and client states."""


def run_federation(agreement: FederationAgreement, grid: MemoryGrid, out: Path) -> list[Round]:
    """Every round of a federated run."""
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, out), rounds)
    return rounds


@pytest.mark.parametrize("method", METHODS)
def test_without_faults_every_round_has_the_loop_engines_bits(method: str, tmp_path: Path) -> None:
    settings = METHODS[method]
    grid = make_grid(tmp_path / "sites")
    rounds = run_federation(make_agreement(method, {"evaluation": "none"}, **settings), grid, tmp_path / "run")
    expected = run_rounds(small_recipe(method, engine="loop", **settings))
    assert len(rounds) == len(expected) > 3
    for ours, theirs in zip(rounds, expected, strict=True):
        assert same_bits(ours.state.server, theirs.state.server)
        assert ours.cohort == theirs.cohort
        assert ours.traffic == theirs.traffic


def test_sites_train_with_the_prior_of_all_their_rows(tmp_path: Path) -> None:
    """The paper as printed takes the class prior from the class counts of all sites, which no single site knows."""
    settings: dict[str, Any] = {"preset": "as-printed", "cycles": 2}
    agreement = make_agreement("cycp-minimax", {"evaluation": "none"}, **settings)
    rounds = run_federation(agreement, make_grid(tmp_path / "sites"), tmp_path / "run")
    expected = run_rounds(small_recipe("cycp-minimax", engine="loop", **settings))
    assert len(rounds) == len(expected) > 3
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    without_prior = small_recipe("cycp-minimax", engine="loop", objective="minimax", **settings)
    assert not same_bits(rounds[-1].state.server, run_rounds(without_prior)[-1].state.server)


@pytest.mark.parametrize("kind", ["slow", "duplicate", "error", "other id"])
def test_recoverable_faults_change_nothing(kind: str, tmp_path: Path) -> None:
    """A slow or repeated answer, one lost by the service and tried again, a node that comes back under another id."""
    faults = [Fault(site=4, round=1, kind=kind), Fault(site=6, round=5, kind=kind)]
    grid = make_grid(tmp_path / "sites", faults)
    rounds = run_federation(make_agreement("cycp-pairwise", {"evaluation": "none"}), grid, tmp_path / "run")
    expected = run_rounds(small_recipe("cycp-pairwise", engine="loop"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    assert rounds[-1].traffic.absences == 0
    assert all(fault.times == 0 for fault in grid.faults)


UNRECOVERABLE = ["late", "lost", "nan", "shape", "oversized", "dtype", "garbage", "deep", "short", "count", "stale"]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("cycp-pairwise", kind) for kind in UNRECOVERABLE),
        ("cycp-minimax", "late"),
        ("scaffold", "late"),
        ("scaffold", "nan"),
    ],
)
def test_an_unrecoverable_fault_is_an_absence(method: str, kind: str, tmp_path: Path) -> None:
    """The run equals a simulation whose trace says that the site was absent, client states and ledger included."""
    faults = [Fault(site=4, round=4, kind=kind, times=9), Fault(site=0, round=3, kind=kind, times=9)]
    grid = make_grid(tmp_path / "sites", faults)
    agreement = make_agreement(method, {"evaluation": "none"}, cycles=3, participation=Cyclic())
    rounds = run_federation(agreement, grid, tmp_path / "run")
    absences = {(fault.round, fault.site) for fault in faults}
    expected = run_rounds(
        small_recipe(method, engine="loop", cycles=3, participation=make_trace(len(rounds), absences))
    )
    assert same_bits(rounds[-1].state.server.shared, expected[-1].state.server.shared)
    assert [set(finished.cohort.absent) for finished in rounds] == [
        set(finished.cohort.absent) for finished in expected
    ]
    assert rounds[-1].traffic.absences == 2
    assert rounds[-1].traffic == expected[-1].traffic


def test_the_sites_that_answered_have_the_weights_of_a_cohort_of_their_own(tmp_path: Path) -> None:
    """Six of seven: the sum of six sevenths is rounded, so that a seventh over it is not a sixth to the last bit."""
    faults = [Fault(site=5, round=1, kind="lost", times=9)]
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, participation="full", cycles=6)
    rounds = run_federation(agreement, make_grid(tmp_path / "sites", faults), tmp_path / "run")
    assert rounds[1].cohort.weights == (1 / 6,) * 6
    assert rounds[1].cohort.weights[0] != (1 / 7) / sum([1 / 7] * 6)


def make_trace(rounds: int, absences: set[tuple[int, int]]) -> Trace:
    """Every client is available in every round, except for these absences (round, client)."""
    clients = [client for client in range(len(GROUPS)) if client != EMPTY]
    visits = [(number, client) for number in range(rounds) for client in clients]
    rows = tuple(visit for visit in visits if visit not in absences)
    return Trace(rows=rows, schedule=Cyclic())


def test_an_update_far_beyond_the_median_is_refused(tmp_path: Path) -> None:
    """Group 2 has three sites, so that a median means something; 1e6 times the update is beyond 30 medians."""
    faults = [Fault(site=6, round=5, kind="huge", times=9)]
    grid = make_grid(tmp_path / "sites", faults)
    rounds = run_federation(make_agreement("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    assert rounds[5].cohort.clients == (5, 7)
    assert rounds[5].cohort.weights == (0.5, 0.5)
    assert rounds[5].cohort.absent == (6,)


def test_below_the_quorum_a_round_is_skipped_and_the_model_stays(tmp_path: Path) -> None:
    """Two of group 2's three sites must answer; in round 2 only one does."""
    faults = [Fault(site=site, round=2, kind="lost", times=9) for site in (5, 6)]
    grid = make_grid(tmp_path / "sites", faults)
    rounds = run_federation(make_agreement("cycp-fedavg", {"evaluation": "none", "quorum": 2}), grid, tmp_path / "run")
    assert rounds[2].cohort.clients == ()
    assert rounds[2].cohort.absent == (5, 6, 7)
    assert same_bits(rounds[2].state.server, rounds[1].state.server)
    assert not same_bits(rounds[3].state.server, rounds[2].state.server)
    assert rounds[2].traffic.floats_up == rounds[1].traffic.floats_up


def test_rounds_without_a_quorum_in_a_row_stop_the_run_and_it_can_be_resumed(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none", "patience": 2})
    run = create_run(agreement, grid, tmp_path / "run")
    grid.offline = set(NAMES)
    with pytest.raises(
        TrainingStopped, match=r"the quorum is 1, for 2 rounds in a row; site 'site-\d': .*; bring sites online"
    ):
        run.train_to_end()
    assert "2 rounds in a row" in (tmp_path / "run" / "stopped.txt").read_text()
    grid.offline = set()
    rounds: list[Round] = []
    collect_rounds(resume_run(agreement, grid, tmp_path / "run"), rounds)
    assert rounds[0].phase.round == 1
    assert not (tmp_path / "run" / "stopped.txt").exists()


def test_a_round_ends_at_its_deadline_in_simulated_time(tmp_path: Path) -> None:
    """Ten seconds for the lost one; the other rounds take none."""
    grid = make_grid(tmp_path / "sites", [Fault(site=1, round=0, kind="lost", times=9)])
    run_federation(make_agreement("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    assert 10 <= grid.time.now < 22  # registration may wait ten seconds too, but the empty site refuses at once
    assert [name for name, header in grid.sent_headers if header["kind"] == "register"] == list(NAMES)


def test_the_server_waits_for_a_site_that_is_offline_until_it_comes_online(tmp_path: Path) -> None:
    """It comes online four seconds into the deadline of ten, and takes part."""
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    run = create_run(agreement, grid, tmp_path / "run")
    grid.offline = {NAMES[0]}
    start, online_nodes = grid.time.now, grid.online_nodes

    def bring_site_online() -> list[Node]:
        if grid.time.now - start > 4:
            grid.offline = set()
        return online_nodes()

    grid.online_nodes = bring_site_online  # type: ignore[method-assign]
    rounds: list[Round] = []
    collect_rounds(run, rounds)
    assert rounds[0].cohort.clients == (0, 1)
    assert same_bits(rounds[-1].state.server, run_rounds(small_recipe("cycp-fedavg", engine="loop"))[-1].state.server)


def test_a_node_with_a_wrong_key_or_an_unknown_name_is_sent_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid.keys[NAMES[1]] = "another key"
    grid.sites["stranger"] = grid.sites[NAMES[0]]
    grid.node_ids["stranger"], grid.online_since["stranger"], grid.keys["stranger"] = 7, "0", ""
    rounds: list[Round] = []
    collect_rounds(create_run(agreement, grid, tmp_path / "run"), rounds)
    assert {name for name, _ in grid.sent_headers} == set(NAMES) - {NAMES[1]}
    assert rounds[0].cohort.clients == (0,)
    assert caplog.text.count("has another key than") == 1
    assert "not in the site table" in caplog.text


def test_the_anchor_is_sent_once_per_stage_and_again_when_lost(tmp_path: Path) -> None:
    """Two stages of one and two cycles: seven sites each get it once per stage; one site loses its state."""
    settings: dict[str, Any] = {"prox": 0.5, "stages": Geometric(initial=1), "cycles": 3}
    # Slow, so that the reply about the lost state is available for a while.
    grid = make_grid(tmp_path / "sites", [Fault(site=0, round=6, kind="slow", times=9)])
    agreement = make_agreement("cycp-minimax", {"evaluation": "none"}, **settings)
    run = create_run(agreement, grid, tmp_path / "run")

    def lose_site_state(finished: Round) -> None:
        if finished.phase.round == 4:
            for file in (tmp_path / "sites" / NAMES[0]).rglob("*.payload"):
                file.unlink()

    rounds: list[Round] = []
    collect_rounds(run, rounds, after_round=lose_site_state)
    anchors = {name: [header["anchor"] for header in grid.visit_headers(name)] for name in NAMES}
    assert anchors[NAMES[0]] == ["included", "included", "stored", "included"]
    assert anchors[NAMES[5]] == ["included", "included", "stored"]
    expected = run_rounds(small_recipe("cycp-minimax", engine="loop", **settings))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_site_that_lost_its_client_state_starts_afresh_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("scaffold", {"evaluation": "none"}, participation="cyclic")
    run = create_run(agreement, grid, tmp_path / "run")

    def lose_site_state(finished: Round) -> None:
        if finished.phase.round == 2:
            for file in (tmp_path / "sites" / NAMES[0]).rglob("*.payload"):
                file.unlink()

    rounds: list[Round] = []
    collect_rounds(run, rounds, after_round=lose_site_state)
    assert [header["last_accepted_round"] for header in grid.visit_headers(NAMES[0])] == [-1, 0, -1]
    assert f"site {NAMES[0]!r} no longer has its client state" in caplog.text
    assert all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(rounds[-1].state.server.shared))


def test_what_a_site_has_lost_is_sent_in_the_same_round_with_a_single_attempt(tmp_path: Path) -> None:
    """Anchor and client state are sent again, because no message was lost; a run could not go on otherwise."""
    settings: dict[str, Any] = {"prox": 0.5, "transforms": ["clip", "quantize"], "cycles": 3}
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-minimax", {"evaluation": "none", "max_attempts": 1}, **settings)
    run = create_run(agreement, grid, tmp_path / "run")

    def lose_site_state(finished: Round) -> None:
        if finished.phase.round == 2:
            for file in (tmp_path / "sites" / NAMES[0]).rglob("*.payload"):
                file.unlink()

    rounds: list[Round] = []
    collect_rounds(run, rounds, after_round=lose_site_state)
    assert [header["anchor"] for header in grid.visit_headers(NAMES[0])][1:4] == ["stored", "included", "included"]
    assert rounds[3].cohort.clients == (0, 1)


def test_a_site_is_not_sent_the_class_counts_of_others(tmp_path: Path) -> None:
    """Totals per class and how many hold it, not who holds what: the census itself is never sent."""
    grid = make_grid(tmp_path / "sites")
    run_federation(make_agreement("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    header = next(header for _, header in grid.sent_headers if header["kind"] == "visit")
    assert header["recipe"]["participation"] == {"name": "full"}
    assert header["class_totals"] == [8, 7, [5, 6], [15, 27]]
    assert set(header) == {
        *("kind", "run", "client", "recipe", "model", "class_totals", "cycle_length"),
        *("phase", "last_accepted_round", "anchor", "layouts", "message_format", "fedauc"),
    }


def test_of_two_nodes_with_one_name_the_later_one_counts(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    agreement = make_agreement("cycp-fedavg")
    exchange: Exchange = make_exchange(grid, agreement)
    fresh = grid.online_nodes()[0]._replace(node_id=999, online_since="9")
    nodes = grid.online_nodes()
    for listed in ([fresh, *nodes], [*nodes, fresh]):
        grid.online_nodes = lambda listed=listed: listed  # type: ignore[method-assign, misc]
        assert exchange.online_sites()[0].node_id == 999
        assert np.count_nonzero([node.node_id == 999 for node in exchange.online_sites().values()]) == 1
    assert len(small_federation()) == len(exchange.online_sites())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_norms_and_invalid_values_are_those_of_numpy(dtype: torch.dtype) -> None:
    leaf = (torch.randn(7, 13, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert measure_norm(leaf) == pytest.approx(np.linalg.norm(leaf.double().numpy()), rel=1e-6)
    assert count_invalid(leaf) == count_invalid(torch.zeros(0, dtype=dtype)) == 0
    if dtype.is_floating_point:
        leaf[1, 2], leaf[3, 4], leaf[5, 6] = torch.nan, torch.inf, -torch.inf
        assert count_invalid(leaf) == int((~np.isfinite(leaf.double().numpy())).sum()) == 3
    # Squares that overflow float32 are not infinite.
    assert measure_norm(torch.tensor([3e30, 4e30])) == pytest.approx(5e30)
