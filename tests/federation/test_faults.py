"""The federated engine against an in-memory grid that loses, delays and spoils: the loop engine's results, always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.exchange import Exchange
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import ModelBuilder
from fedauc.guards import TrainingStopped
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace
from fedauc.stages import Geometric
from fedauc.training import Round
from fedauc.trees import tree_leaves
from federation.memory_grid import NAMES, Fault, MemoryGrid, agreed, exchange_of, grid_of
from small_federations import EMPTY, GROUPS, linear_scorer, run_rounds, same_bits, small_federation, small_recipe

METHODS: dict[str, dict[str, Any]] = {
    "cycp-pairwise": {},
    "cycp-minimax": {"prox": 0.5, "stages": Geometric(initial=1)},
    "cycp-fedavg": {},
    "scaffold": {"participation": "cyclic"},
    "a-scaffold": {},
    "codasca": {"participation": "cyclic"},
}
"""Scores in a pool; a stage reference; neither; client memory of three kinds."""


def build(shape: tuple[int, ...], seed: int) -> nn.Module:
    assert shape == (4,)
    return linear_scorer()


def served(agreement: FederationAgreement, grid: MemoryGrid, out: Path, model: ModelBuilder = build) -> list[Round]:
    """Every round of a federated run."""
    found: list[Round] = []
    FederatedRun.create(agreement, exchange_of(grid, agreement), out, model).go(found.append)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_without_faults_every_round_has_the_loop_engines_bits(method: str, tmp_path: Path) -> None:
    settings = METHODS[method]
    grid = grid_of(tmp_path / "sites")
    rounds = served(agreed(method, {"evaluation": "none"}, **settings), grid, tmp_path / "run")
    expected = run_rounds(small_recipe(method, engine="loop", **settings))
    assert len(rounds) == len(expected) > 3
    for ours, theirs in zip(rounds, expected, strict=True):
        assert same_bits(ours.state.server, theirs.state.server)
        assert ours.cohort == theirs.cohort
        assert ours.traffic == theirs.traffic


@pytest.mark.parametrize("kind", ["slow", "duplicate", "error", "other id"])
def test_what_can_be_mended_changes_nothing(kind: str, tmp_path: Path) -> None:
    """A slow or repeated answer, one lost by the service and tried again, a node that comes back under another id."""
    faults = [Fault(site=4, round=1, kind=kind), Fault(site=6, round=5, kind=kind)]
    grid = grid_of(tmp_path / "sites", faults)
    rounds = served(agreed("cycp-pairwise", {"evaluation": "none"}), grid, tmp_path / "run")
    expected = run_rounds(small_recipe("cycp-pairwise", engine="loop"))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)
    assert rounds[-1].traffic.absences == 0
    assert all(fault.times == 0 for fault in grid.faults)


HOPELESS = ["late", "lost", "nan", "shape", "oversized", "dtype", "garbage", "deep", "short", "count", "stale"]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("cycp-pairwise", kind) for kind in HOPELESS),
        ("cycp-minimax", "late"),
        ("scaffold", "late"),
        ("scaffold", "nan"),
    ],
)
def test_what_cannot_be_mended_is_an_absence(method: str, kind: str, tmp_path: Path) -> None:
    """The run equals a simulation whose trace says that the site was away, memory and ledger included."""
    faults = [Fault(site=4, round=4, kind=kind, times=9), Fault(site=0, round=3, kind=kind, times=9)]
    grid = grid_of(tmp_path / "sites", faults)
    agreement = agreed(method, {"evaluation": "none"}, cycles=3, participation=Cyclic())
    rounds = served(agreement, grid, tmp_path / "run")
    away = {(fault.round, fault.site) for fault in faults}
    expected = run_rounds(small_recipe(method, engine="loop", cycles=3, participation=trace(len(rounds), away)))
    assert same_bits(rounds[-1].state.server.shared, expected[-1].state.server.shared)
    assert [set(each.cohort.absent) for each in rounds] == [set(each.cohort.absent) for each in expected]
    assert rounds[-1].traffic.absences == 2
    assert rounds[-1].traffic.floats_up == expected[-1].traffic.floats_up


def trace(rounds: int, away: set[tuple[int, int]]) -> Trace:
    """Everybody is there when due, save for those that are not."""
    clients = [client for client in range(len(GROUPS)) if client != EMPTY]
    rows = tuple((number, c) for number in range(rounds) for c in clients if (number, c) not in away)
    return Trace(rows=rows, schedule=Cyclic())


def test_a_change_far_beyond_the_median_is_refused(tmp_path: Path) -> None:
    """Group 2 has three sites, so that a median says something; 1e6 times the change is beyond 30 medians."""
    faults = [Fault(site=6, round=5, kind="huge", times=9)]
    grid = grid_of(tmp_path / "sites", faults)
    rounds = served(agreed("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    assert rounds[5].cohort.clients == (5, 7)
    assert rounds[5].cohort.weights == (0.5, 0.5)
    assert rounds[5].cohort.absent == (6,)


def test_below_the_quorum_a_round_is_skipped_and_the_model_stays(tmp_path: Path) -> None:
    """Two of group 2's three sites must answer; in round 2 only one does."""
    faults = [Fault(site=site, round=2, kind="lost", times=9) for site in (5, 6)]
    grid = grid_of(tmp_path / "sites", faults)
    rounds = served(agreed("cycp-fedavg", {"evaluation": "none", "quorum": 2}), grid, tmp_path / "run")
    assert rounds[2].cohort.clients == ()
    assert rounds[2].cohort.absent == (5, 6, 7)
    assert same_bits(rounds[2].state.server, rounds[1].state.server)
    assert not same_bits(rounds[3].state.server, rounds[2].state.server)
    assert rounds[2].traffic.floats_up == rounds[1].traffic.floats_up


def test_rounds_without_a_quorum_in_a_row_stop_the_run_and_it_can_go_on(tmp_path: Path) -> None:
    grid = grid_of(tmp_path / "sites")
    agreement = agreed("cycp-fedavg", {"evaluation": "none", "patience": 2})
    service = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build)
    grid.offline = set(NAMES)
    with pytest.raises(TrainingStopped, match="the quorum is 1, for 2 rounds in a row; bring sites online"):
        service.go()
    assert "2 rounds in a row" in (tmp_path / "run" / "stopped.txt").read_text()
    grid.offline = set()
    rounds: list[Round] = []
    FederatedRun.resume(exchange_of(grid, agreement), tmp_path / "run", build).go(rounds.append)
    assert rounds[0].phase.round == 1
    assert not (tmp_path / "run" / "stopped.txt").exists()


def test_a_round_ends_at_its_deadline_in_made_up_time(tmp_path: Path) -> None:
    """Ten seconds for the lost one; the other rounds take none."""
    grid = grid_of(tmp_path / "sites", [Fault(site=1, round=0, kind="lost", times=9)])
    served(agreed("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    assert 10 <= grid.time.now < 22  # gathering waits its own ten seconds, for the empty site's refusal none
    assert [name for name, facts in grid.pushed if facts["kind"] == "register"] == list(NAMES)


def test_a_site_that_is_offline_is_waited_for_until_it_comes(tmp_path: Path) -> None:
    """It comes online four seconds into the deadline of ten, and takes part."""
    grid = grid_of(tmp_path / "sites")
    agreement = agreed("cycp-fedavg", {"evaluation": "none"})
    service = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build)
    grid.offline = {NAMES[0]}
    began, nodes = grid.time.now, grid.online_nodes

    def come() -> list:  # type: ignore[type-arg]
        if grid.time.now - began > 4:
            grid.offline = set()
        return nodes()

    grid.online_nodes = come  # type: ignore[method-assign]
    rounds: list[Round] = []
    service.go(rounds.append)
    assert rounds[0].cohort.clients == (0, 1)
    assert same_bits(rounds[-1].state.server, run_rounds(small_recipe("cycp-fedavg", engine="loop"))[-1].state.server)


def test_a_node_under_a_wrong_key_or_an_unknown_name_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(tmp_path / "sites")
    agreement = agreed("cycp-fedavg", {"evaluation": "none"})
    grid.keys[NAMES[1]] = "another key"
    grid.sites["stranger"] = grid.sites[NAMES[0]]
    grid.numbers["stranger"], grid.since["stranger"], grid.keys["stranger"] = 7, "0", ""
    rounds: list[Round] = []
    FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build).go(rounds.append)
    assert {name for name, _ in grid.pushed} == set(NAMES) - {NAMES[1]}
    assert rounds[0].cohort.clients == (0,)
    assert caplog.text.count("has another key than") == 1
    assert "not in the site table" in caplog.text


def test_the_stage_reference_is_sent_once_per_stage_and_again_when_lost(tmp_path: Path) -> None:
    """Two stages of one and two cycles: seven sites each get it once per stage; one site loses its drawer."""
    settings: dict[str, Any] = {"prox": 0.5, "stages": Geometric(initial=1), "cycles": 3}
    # Slow, so that the reply that says so is there for a while.
    grid = grid_of(tmp_path / "sites", [Fault(site=0, round=6, kind="slow", times=9)])
    agreement = agreed("cycp-minimax", {"evaluation": "none"}, **settings)
    service = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build)

    def lose(finished: Round) -> None:
        if finished.phase.round == 4:
            for file in (tmp_path / "sites" / NAMES[0]).rglob("*.payload"):
                file.unlink()

    rounds: list[Round] = []
    service.go(lambda finished: (rounds.append(finished), lose(finished)))  # type: ignore[func-returns-value, arg-type]
    words = [facts["anchor"] for name, facts in grid.pushed if name == NAMES[0] and facts["kind"] == "visit"]
    assert words == ["included", "included", "stored", "included"]
    others = [facts["anchor"] for name, facts in grid.pushed if name == NAMES[5] and facts["kind"] == "visit"]
    assert others == ["included", "included", "stored"]
    expected = run_rounds(small_recipe("cycp-minimax", engine="loop", **settings))
    assert same_bits(rounds[-1].state.server, expected[-1].state.server)


def test_a_site_that_lost_its_memory_starts_afresh_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(tmp_path / "sites")
    agreement = agreed("scaffold", {"evaluation": "none"}, participation="cyclic")
    service = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build)

    def lose(finished: Round) -> None:
        if finished.phase.round == 2:
            for file in (tmp_path / "sites" / NAMES[0]).rglob("*.payload"):
                file.unlink()

    rounds: list[Round] = []
    service.go(lambda finished: (rounds.append(finished), lose(finished)))  # type: ignore[func-returns-value, arg-type]
    accepted = [
        facts["last_accepted_round"] for name, facts in grid.pushed if name == NAMES[0] and facts["kind"] == "visit"
    ]
    assert accepted == [-1, 0, -1]
    assert f"site {NAMES[0]!r} no longer has its client state" in caplog.text
    assert all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(rounds[-1].state.server.shared))


def test_what_a_site_is_sent_does_not_tell_the_others_counts(tmp_path: Path) -> None:
    """Totals per class and how many hold it, not who holds what: the census itself never travels."""
    grid = grid_of(tmp_path / "sites")
    served(agreed("cycp-fedavg", {"evaluation": "none"}), grid, tmp_path / "run")
    facts = next(facts for _, facts in grid.pushed if facts["kind"] == "visit")
    assert facts["recipe"]["participation"] == {"name": "full"}
    assert facts["class_totals"] == [8, 7, [5, 6], [15, 27]]
    assert set(facts) == {
        *("kind", "run", "client", "recipe", "model", "class_totals", "cycle_length"),
        *("phase", "last_accepted_round", "anchor", "layouts"),
    }


def test_two_nodes_of_one_name_the_later_one_counts(tmp_path: Path) -> None:
    grid = grid_of(tmp_path / "sites")
    agreement = agreed("cycp-fedavg")
    exchange: Exchange = exchange_of(grid, agreement)
    fresh = grid.online_nodes()[0]._replace(node_id=999, online_since="9")
    nodes = grid.online_nodes()
    for listed in ([fresh, *nodes], [*nodes, fresh]):
        grid.online_nodes = lambda listed=listed: listed  # type: ignore[method-assign, misc]
        assert exchange.online_sites()[0].node_id == 999
        assert np.count_nonzero([node.node_id == 999 for node in exchange.online_sites().values()]) == 1
    assert len(small_federation()) == len(exchange.online_sites())
