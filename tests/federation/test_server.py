"""The server's folder: whole after every round, the same after a crash, with the AUC of rows that never moved."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedauc.experiments.checkpoint import Checkpoint
from fedauc.experiments.folder import RunFolder
from fedauc.federation import journal
from fedauc.federation.agreement import FederationAgreement, SiteEntry
from fedauc.federation.registration import register_sites
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import SitePolicy
from fedauc.guards import TrainingStopped
from fedauc.metrics import auc
from fedauc.network import ModuleNetwork
from fedauc.training import Round
from federation.memory_grid import NAMES, Fault, Time, agreed, exchange_of, grid_of, sites_of, terms
from federation.memory_grid import MemoryGrid as Grid
from federation.test_faults import build, trace
from small_federations import EMPTY, NEGATIVES, POSITIVES, held_out, linear_scorer, same_bits, small_federation


class Killed(Exception):
    """Stands for a process that ends without a word."""


class Brittle(RunFolder):
    """A folder whose server is killed just before it writes a checkpoint, after so many."""

    def __init__(self, path: Path, survives: int) -> None:
        super().__init__(path)
        self._left = survives

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        super().write_checkpoint(checkpoint)


@pytest.mark.parametrize("method", ["cycp-pairwise", "scaffold"])
def test_killed_anywhere_and_resumed_it_ends_the_same(method: str, tmp_path: Path) -> None:
    """Killed after the site's work of every second round, before the checkpoint: visits are repeated, not doubled."""
    agreement = agreed(method, {"evaluation": "histograms"}, participation="cyclic")
    test = held_out()
    whole = grid_of(tmp_path / "one", test=test)
    expected: list[Round] = []
    FederatedRun.create(agreement, exchange_of(whole, agreement), tmp_path / "whole", build).go(expected.append)

    grid, out = grid_of(tmp_path / "two", test=test), tmp_path / "run"
    FederatedRun.create(agreement, exchange_of(grid, agreement), out, build)
    found: list[Round] = []
    for sitting in range(20):
        service = FederatedRun.resume(exchange_of(grid, agreement), out, build)
        service.folder = Brittle(out, survives=sitting % 2)
        try:
            service.go(found.append)
            break
        except Killed:
            continue
    assert [each.phase.round for each in found] == [each.phase.round for each in expected]
    assert same_bits(found[-1].state.server, expected[-1].state.server)
    assert found[-1].traffic == expected[-1].traffic
    for name in ("records.jsonl", "attendance.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    visits = [facts for name, facts in grid.pushed if facts["kind"] == "visit"]
    assert len(visits) > len([facts for name, facts in whole.pushed if facts["kind"] == "visit"])


def test_a_torn_checkpoint_is_refused_and_the_one_before_it_serves(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg", {"evaluation": "none"})
    grid, out = grid_of(tmp_path / "sites"), tmp_path / "run"
    FederatedRun.create(agreement, exchange_of(grid, agreement), out, build).go()
    (out / "result.json").unlink()
    last = sorted((out / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        FederatedRun.resume(exchange_of(grid, agreement), out, build)
    last.unlink()
    assert FederatedRun.resume(exchange_of(grid, agreement), out, build).state.round == 5


def test_a_run_goes_on_with_the_sites_it_began_with(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg", {"evaluation": "none"})
    exchange = exchange_of(grid_of(tmp_path / "sites"), agreement)
    FederatedRun.create(agreement, exchange, tmp_path / "run", build)
    fewer = replace(exchange, sites=exchange.sites[1:])
    with pytest.raises(ValueError, match=r"has changed since the run began \(\['site-0'\]\); restore it"):
        FederatedRun.resume(fewer, tmp_path / "run", build)
    rekeyed = replace(exchange, sites=tuple(replace(site, key="") for site in exchange.sites))
    assert FederatedRun.resume(rekeyed, tmp_path / "run", build).state.round == 0


def test_the_folder_says_who_came_and_why_others_did_not(tmp_path: Path) -> None:
    faults = [Fault(site=4, round=1, kind="nan", times=9), Fault(site=0, round=3, kind="lost", times=9)]
    agreement = agreed("cycp-fedavg", {"evaluation": "none"})
    grid, out = grid_of(tmp_path / "sites", faults), tmp_path / "run"
    result = FederatedRun.create(agreement, exchange_of(grid, agreement), out, build).go()
    lines = journal.read(out / "attendance.jsonl")
    assert lines[1] == {
        "round": 1,
        "answered": ["site-3"],
        "absent": {},
        "refused": {"site-4": "5 of its values are NaN or infinite"},  # all of the linear model's 4 weights and bias
    }
    assert lines[3]["absent"] == {"site-0": "did not answer before the deadline"}
    assert result["attendance"]["site-4"] == {"answered": 1, "absent": 0, "refused": 1}
    assert result["attendance"]["site-0"] == {"answered": 1, "absent": 1, "refused": 0}
    assert result["final"]["absences"] == 2
    stored = np.load(out / "model.npz", allow_pickle=False)
    assert stored["weight"].shape == (1, 4)
    assert FederationAgreement.read_json(out / "federation.json") == agreement


def test_a_round_that_the_schedule_leaves_empty_is_a_line_too(tmp_path: Path) -> None:
    """In round 1 both sites of group 1 are away by a trace; in round 2, below the quorum, one did come."""
    away = {(1, 3), (1, 4)}
    faults = [Fault(site=site, round=2, kind="lost", times=9) for site in (5, 6)]
    changes = {"evaluation": "none", "quorum": 2}
    agreement = agreed("cycp-fedavg", changes, cycles=1, participation=trace(3, away))
    out = tmp_path / "run"
    FederatedRun.create(agreement, exchange_of(grid_of(tmp_path / "sites", faults), agreement), out, build).go()
    lines = journal.read(out / "attendance.jsonl")
    assert lines[1]["answered"] == []
    assert lines[1]["absent"] == dict.fromkeys(["site-3", "site-4"], "is unavailable according to the schedule")
    assert lines[2]["answered"] == ["site-7"]
    assert lines[2]["absent"] == dict.fromkeys(["site-5", "site-6"], "did not answer before the deadline")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg")
    with pytest.raises(ValueError, match="exists already; choose another out"):
        FederatedRun.create(agreement, exchange_of(grid_of(tmp_path), agreement), tmp_path, build)
    with pytest.raises(ValueError, match=r"has no federation\.json"):
        FederatedRun.resume(exchange_of(grid_of(tmp_path), agreement), tmp_path, build)


# ------------------------------------------------------------------------------------------------------- gathering


def test_the_census_is_what_the_sites_say(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg")
    found = register_sites(exchange_of(grid_of(tmp_path), agreement))
    assert found.census.positives.tolist() == list(POSITIVES)
    assert found.census.negatives.tolist() == list(NEGATIVES)
    assert found.shape == (4,)
    assert sum(POSITIVES[EMPTY : EMPTY + 1]) == 0


def test_without_any_site_the_run_does_not_begin(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg")
    grid = grid_of(tmp_path)
    grid.offline = set(NAMES)
    with pytest.raises(TrainingStopped, match="no site has answered within 10 s"):
        register_sites(exchange_of(grid, agreement))


def test_sites_with_other_features_are_named(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg")
    grid = grid_of(tmp_path)
    wide = sites_of(small_federation(), tmp_path)["site-3"]
    load = wide._load_data
    wide._load_data = lambda: load()._replace(inputs=torch.zeros(4, 9))
    grid.sites["site-3"] = wide
    with pytest.raises(ValueError, match=r"site 'site-3' has rows float \(9,\), site 'site-0' has float \(4,\)"):
        register_sites(exchange_of(grid, agreement))


# ------------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("ask", ["histograms", "scores"])
def test_the_auc_of_rows_that_stay_is_the_auc_of_all_rows(ask: str, tmp_path: Path) -> None:
    """25 of the 200 held-out rows at each of 8 sites; exact from scores, within its own bounds from histograms."""
    test = held_out()
    time = Time()
    grid = Grid(sites_of(small_federation(), tmp_path / "sites", test, SitePolicy("scores")), time)
    agreement = agreed("cycp-pairwise", {"evaluation": ask})
    rounds: list[Round] = []
    service = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build)
    final = service.go(rounds.append)["final"]
    network = ModuleNetwork(linear_scorer())
    model = agreement.recipe.algorithm.extract_model(rounds[-1].state.server.shared)
    exact = auc(test.labels, network.predict(model, test.inputs))
    assert final["test_sites"] == 8
    assert final["test_positives"] + final["test_negatives"] == 200
    if ask == "scores":
        assert final["auc"] == exact == final["auc_low"] == final["auc_high"]
    else:
        assert final["auc_low"] <= exact <= final["auc_high"]
        # Bins of 2/4096 on a scale of about 1: of 10,000 pairs some dozens share one.
        assert 0 < final["auc_high"] - final["auc_low"] < 0.01
    assert "site_auc" not in final


def test_a_sites_own_auc_comes_only_where_its_owner_allows_it(tmp_path: Path) -> None:
    test = held_out()
    sites = sites_of(small_federation(), tmp_path / "sites", test)
    sites["site-1"] = sites_of(small_federation(), tmp_path / "sites", test, SitePolicy("histograms", share_auc=True))[
        "site-1"
    ]
    sites["site-3"] = sites_of(small_federation(), tmp_path / "sites", test, SitePolicy("nothing"))["site-3"]
    agreement = agreed("cycp-fedavg", {"evaluation": "histograms"}, cycles=1)
    exchange = exchange_of(Grid(sites, Time()), agreement)
    final = FederatedRun.create(agreement, exchange, tmp_path / "run", build).go()["final"]
    assert set(final["site_auc"]) == {"site-1"}
    assert final["test_sites"] == 7


def test_scores_are_not_given_to_a_server_that_only_may_have_histograms(tmp_path: Path) -> None:
    agreement = agreed("cycp-fedavg", {"evaluation": "scores"}, cycles=1)
    grid = grid_of(tmp_path / "sites", test=held_out())
    final = FederatedRun.create(agreement, exchange_of(grid, agreement), tmp_path / "run", build).go()["final"]
    assert final["auc"] is None
    assert final["test_sites"] == 0


# ----------------------------------------------------------------------------------------------------- what is agreed


def test_an_agreement_survives_its_file(tmp_path: Path) -> None:
    agreement = agreed("cycp-minimax", {"quorum": 2, "norm_limit": 7.5}, prox=0.25)
    path = tmp_path / "federation.json"
    path.write_text(agreement.to_json())
    assert FederationAgreement.read_json(path) == agreement
    newer = json.loads(path.read_text())
    path.write_text(json.dumps({**newer, "format": 2}))
    with pytest.raises(ValueError, match="has format 2; this version reads up to 1: upgrade fedauc"):
        FederationAgreement.read_json(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deadline": 0}, "deadline is 0"),
        ({"poll_interval": float("nan")}, "poll_interval is nan"),
        ({"quorum": 0}, "quorum is 0; it must be a whole number of at least 1: raise quorum"),
        ({"norm_limit": 1.0}, "norm_limit is 1.0; it must be a finite number above 1: raise norm_limit"),
        ({"evaluation": "all"}, "evaluation is 'all'"),
    ],
)
def test_bad_terms_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms(**change)


def test_a_bad_table_is_refused() -> None:
    recipe = agreed("cycp-fedavg").recipe
    with pytest.raises(ValueError, match="site 'a' is listed 2 times"):
        FederationAgreement(recipe=recipe, sites=(SiteEntry("a"), SiteEntry("a")))
    with pytest.raises(ValueError, match="site 'b' has no group, but others have one"):
        FederationAgreement(recipe=recipe, sites=(SiteEntry("a", "x"), SiteEntry("b")))
    with pytest.raises(ValueError, match="sites is empty"):
        FederationAgreement(recipe=recipe, sites=())


def test_the_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    """A half-made folder of an earlier crash is in nobody's way."""
    agreement = agreed("cycp-fedavg", {"evaluation": "none"}, cycles=1)
    (tmp_path / ".run.part").mkdir()
    FederatedRun.create(agreement, exchange_of(grid_of(tmp_path / "sites"), agreement), tmp_path / "run", build).go()
    assert not (tmp_path / ".run.part").exists()
    shutil.rmtree(tmp_path / "run")
