"""The server's folder: complete after every round, the same after a crash, with the AUC of rows that never moved."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import FederationAgreement, SiteEntry
from fedauc.federation.registration import register_sites
from fedauc.federation.server import FederatedRun, write_failure
from fedauc.federation.site import SitePolicy
from fedauc.federation.site_data import SiteData
from fedauc.guards import TrainingStopped
from fedauc.metrics import auc
from fedauc.network import ModuleNetwork
from fedauc.training import Round
from federation.memory_grid import (
    NAMES,
    Fault,
    MemoryGrid,
    build_linear,
    collect_rounds,
    create_run,
    make_agreement,
    make_exchange,
    make_grid,
    make_policy,
    make_sites,
    resume_run,
)
from federation.test_faults import make_trace
from small_federations import EMPTY, NEGATIVES, POSITIVES, held_out, linear_scorer, same_bits, small_federation


class Killed(Exception):
    """Stands for a process that is killed."""


class BrittleFolder(RunFolder):
    """A folder whose server is killed just before it writes a checkpoint, after so many that were written."""

    def __init__(self, path: Path, survives: int) -> None:
        super().__init__(path)
        self._survives = survives

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._survives == 0:
            raise Killed
        self._survives -= 1
        super().write_checkpoint(checkpoint)


@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-two-way-partial-auc", "scaffold"])
def test_killed_anywhere_and_resumed_it_ends_the_same(method: str, tmp_path: Path) -> None:
    """Killed after the site's work of every second round, before the checkpoint: visits are repeated, not doubled."""
    agreement = make_agreement(method, {"evaluation": "histograms"}, participation="cyclic")
    test = held_out()
    uninterrupted = make_grid(tmp_path / "one", test=test)
    expected: list[Round] = []
    collect_rounds(create_run(agreement, uninterrupted, tmp_path / "uninterrupted"), expected)

    grid, out = make_grid(tmp_path / "two", test=test), tmp_path / "run"
    create_run(agreement, grid, out)
    result: list[Round] = []
    for attempt in range(20):
        run = resume_run(agreement, grid, out)
        folder = BrittleFolder(out, survives=attempt % 2)
        run.loop.checkpointer = Checkpointer(folder.write_checkpoint, every_round=True)
        try:
            collect_rounds(run, result)
            break
        except Killed:
            continue
    assert [finished.phase.round for finished in result] == [finished.phase.round for finished in expected]
    assert same_bits(result[-1].state.server, expected[-1].state.server)
    assert result[-1].traffic == expected[-1].traffic
    for name in ("records.jsonl", "attendance.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "uninterrupted" / name).read_bytes()
    visits = [header for name, header in grid.sent_headers if header["kind"] == "visit"]
    assert len(visits) > len([header for name, header in uninterrupted.sent_headers if header["kind"] == "visit"])


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites"), tmp_path / "run"
    create_run(agreement, grid, out).train_to_end()
    (out / "result.json").unlink()
    last = sorted((out / "checkpoints").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        resume_run(agreement, grid, out)
    last.unlink()
    assert resume_run(agreement, grid, out).loop.state.round == 5


def test_a_run_is_resumed_with_other_keys_of_its_sites(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    exchange = make_exchange(make_grid(tmp_path / "sites"), agreement)
    FederatedRun.create(agreement, exchange, tmp_path / "run", build_linear)
    rekeyed = replace(exchange, sites=tuple(replace(site, key="") for site in exchange.sites))
    assert FederatedRun.resume(rekeyed, RunFolder(tmp_path / "run"), build_linear).loop.state.round == 0


def test_the_folder_says_who_answered_and_why_others_did_not(tmp_path: Path) -> None:
    faults = [Fault(site=4, round=1, kind="nan", times=9), Fault(site=0, round=3, kind="lost", times=9)]
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"})
    grid, out = make_grid(tmp_path / "sites", faults), tmp_path / "run"
    result = create_run(agreement, grid, out).train_to_end()
    lines = RunFolder(out).read_lines("attendance.jsonl")
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


def test_a_round_without_available_sites_is_a_line_too(tmp_path: Path) -> None:
    """In round 1 a trace says that group 1 is unavailable; in round 2, below the quorum, one site did answer."""
    absences = {(1, 3), (1, 4)}
    faults = [Fault(site=site, round=2, kind="lost", times=9) for site in (5, 6)]
    changes = {"evaluation": "none", "quorum": 2}
    agreement = make_agreement("cycp-fedavg", changes, cycles=1, participation=make_trace(3, absences))
    out = tmp_path / "run"
    create_run(agreement, make_grid(tmp_path / "sites", faults), out).train_to_end()
    lines = RunFolder(out).read_lines("attendance.jsonl")
    assert lines[1]["answered"] == []
    assert lines[1]["absent"] == dict.fromkeys(["site-3", "site-4"], "is unavailable according to the schedule")
    assert lines[2]["answered"] == ["site-7"]
    assert lines[2]["absent"] == dict.fromkeys(["site-5", "site-6"], "did not answer before the deadline")


def test_no_folder_is_overwritten(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg")
    with pytest.raises(ValueError, match="exists already; choose another out"):
        FederatedRun.create(agreement, make_exchange(make_grid(tmp_path), agreement), tmp_path, build_linear)
    with pytest.raises(ValueError, match=r"has no federation\.json"):
        FederatedRun.resume(make_exchange(make_grid(tmp_path), agreement), RunFolder(tmp_path), build_linear)


# ------------------------------------------------------------------------------------------------------- registration


def test_the_census_is_what_the_sites_register(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg")
    result = register_sites(make_exchange(make_grid(tmp_path), agreement))
    assert result.census.positives.tolist() == list(POSITIVES)
    assert result.census.negatives.tolist() == list(NEGATIVES)
    assert result.shape == (4,)
    assert sum(POSITIVES[EMPTY : EMPTY + 1]) == 0


def test_without_any_site_the_run_does_not_begin(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg")
    grid = make_grid(tmp_path)
    grid.offline = set(NAMES)
    with pytest.raises(TrainingStopped, match="no site has answered within 10 s"):
        register_sites(make_exchange(grid, agreement))


def test_why_a_run_could_not_begin_is_forgotten_when_it_begins(tmp_path: Path) -> None:
    write_failure(tmp_path / "run", ValueError("site 'site-0' was offline"))
    create_run(make_agreement("cycp-fedavg"), make_grid(tmp_path / "sites"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sites_with_other_features_are_named(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg")
    grid = make_grid(tmp_path)
    wide = make_sites(small_federation(), tmp_path)["site-3"]
    data = wide._load_data()
    assert isinstance(data, SiteData)
    wide._load_data = lambda: data._replace(inputs=torch.zeros(4, 9))
    grid.sites["site-3"] = wide
    with pytest.raises(ValueError, match=r"site 'site-3' has rows float \(9,\), site 'site-0' has float \(4,\)"):
        register_sites(make_exchange(grid, agreement))


# ------------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("requested", ["histograms", "scores"])
def test_the_auc_over_sites_is_the_auc_of_all_rows(requested: str, tmp_path: Path) -> None:
    """25 of the 200 held-out rows at each of 8 sites; exact from scores, within its own bounds from histograms."""
    test = held_out()
    grid = MemoryGrid(make_sites(small_federation(), tmp_path / "sites", test, SitePolicy("scores")))
    agreement = make_agreement("cycp-pairwise", {"evaluation": requested})
    rounds: list[Round] = []
    run = create_run(agreement, grid, tmp_path / "run")
    final = collect_rounds(run, rounds)["final"]
    network = ModuleNetwork(linear_scorer())
    model = agreement.recipe.algorithm.extract_model(rounds[-1].state.server.shared)
    exact = auc(test.labels, network.predict(model, test.inputs))
    assert final["test_sites"] == 8
    assert final["test_positives"] + final["test_negatives"] == 200
    if requested == "scores":
        assert final["auc"] == exact == final["auc_low"] == final["auc_high"]
    else:
        assert final["auc_low"] <= exact <= final["auc_high"]
        # Bins of 2/4096 on a scale of about 1: of 10,000 pairs some dozens share one.
        assert 0 < final["auc_high"] - final["auc_low"] < 0.01
    assert "site_auc" not in final


def test_a_sites_own_auc_is_sent_only_where_its_policy_allows_it(tmp_path: Path) -> None:
    test = held_out()
    clients, folder = small_federation(), tmp_path / "sites"
    sites = make_sites(clients, folder, test)
    sites["site-1"] = make_sites(clients, folder, test, SitePolicy("histograms", share_auc=True))["site-1"]
    sites["site-3"] = make_sites(clients, folder, test, SitePolicy("nothing"))["site-3"]
    agreement = make_agreement("cycp-fedavg", {"evaluation": "histograms"}, cycles=1)
    final = create_run(agreement, MemoryGrid(sites), tmp_path / "run").train_to_end()["final"]
    assert set(final["site_auc"]) == {"site-1"}
    assert final["test_sites"] == 7


def test_scores_are_not_sent_where_only_histograms_are_allowed(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-fedavg", {"evaluation": "scores"}, cycles=1)
    grid = make_grid(tmp_path / "sites", test=held_out())
    final = create_run(agreement, grid, tmp_path / "run").train_to_end()["final"]
    assert final["auc"] is None
    assert final["test_sites"] == 0


# ----------------------------------------------------------------------------------------------------- the agreement


def test_an_agreement_survives_its_file(tmp_path: Path) -> None:
    agreement = make_agreement("cycp-minimax", {"quorum": 2, "norm_limit": 7.5}, prox=0.25)
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
def test_a_bad_policy_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(**change)


def test_a_bad_site_table_is_refused() -> None:
    recipe = make_agreement("cycp-fedavg").recipe
    with pytest.raises(ValueError, match="site 'a' is listed 2 times"):
        FederationAgreement(recipe=recipe, sites=(SiteEntry("a"), SiteEntry("a")))
    with pytest.raises(ValueError, match="site 'b' has no group, but others have one"):
        FederationAgreement(recipe=recipe, sites=(SiteEntry("a", "x"), SiteEntry("b")))
    with pytest.raises(ValueError, match="sites is empty"):
        FederationAgreement(recipe=recipe, sites=())


def test_the_folder_is_complete_or_not_there(tmp_path: Path) -> None:
    """A half-made folder of an earlier crash does not matter."""
    agreement = make_agreement("cycp-fedavg", {"evaluation": "none"}, cycles=1)
    (tmp_path / ".run.part").mkdir()
    FederatedRun.create(
        agreement, make_exchange(make_grid(tmp_path / "sites"), agreement), tmp_path / "run", build_linear
    ).train_to_end()
    assert not (tmp_path / ".run.part").exists()
    shutil.rmtree(tmp_path / "run")
