"""A site answers what its owner's policy allows, and every answer is in its audit log before it leaves."""

from __future__ import annotations

import datetime
import json
import math
import os
import stat
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_helpers import fedauc
from fedauc.cli.federation_site import plan
from fedauc.experiments.config import to_plain
from fedauc.experiments.recipe import Recipe
from fedauc.federation import site_control
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.audit_log import LOG_FILE, read_entries, verify_log
from fedauc.federation.delivery import MODEL_FOLDER
from fedauc.federation.in_process import InProcessGrid
from fedauc.federation.owner_policy import (
    EXAMPLE_POLICY,
    Disclosure,
    OpeningHours,
    OwnerPolicy,
    PrivacyRules,
    RunRules,
)
from fedauc.federation.run_plan import check_against_plan, describe_plan, hash_plan, read_plan
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.server import FederatedRun
from fedauc.federation.site_control import (
    MOST_PLANS,
    ControlledSite,
    SiteHome,
    answer_at_site,
    read_owner_policy,
    sum_budgets,
)
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_report import SiteReport, describe_report, list_reports
from fedauc.federation.site_state import SiteRefusal
from fedauc.federation.versions import stamp_version
from fedauc.federation.visit_messages import ClassTotals
from fedauc.guards import TrainingStopped
from fedauc.objectives.minimax import Minimax
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.uniform import Uniform
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.clip import Clip
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers.example_dp import ExampleDP
from federation.hospital_tables import (
    SCHEMA,
    make_controlled_sites,
    make_hospital_agreement,
    make_hospital_sites,
    make_hospitals,
    start_hospital_run,
)
from federation.memory_grid import NAMES, MemoryGrid, create_run, make_agreement, make_sites
from small_federations import small_federation


def read_weights(folder: Path) -> np.ndarray:
    with np.load(folder / "model.npz") as arrays:
        return np.concatenate([arrays[name].reshape(-1) for name in arrays.files])


def test_control_changes_no_bit_and_logs_every_answer(tmp_path: Path) -> None:
    start_hospital_run(make_hospital_sites(make_hospitals(), tmp_path / "plain"), tmp_path / "a").train_to_end()
    sites = make_controlled_sites(tmp_path / "sites")
    answers: list[Payload] = []
    answer_message = sites["north"].answer_message

    def record_answer(payload: Payload) -> Payload:
        answers.append(answer_message(payload))
        # The line is on the disk before anybody has the answer.
        entry = read_entries(tmp_path / "sites" / "north" / "state")[-1]
        assert entry["bytes_sent"] == len(answers[-1].header_text) + answers[-1].body.nbytes
        return answers[-1]

    sites["north"].answer_message = record_answer  # type: ignore[method-assign]
    start_hospital_run(sites, tmp_path / "b").train_to_end()
    assert np.array_equal(read_weights(tmp_path / "a"), read_weights(tmp_path / "b"))
    state = tmp_path / "sites" / "north" / "state"
    assert verify_log(state).problem == ""
    entries = read_entries(state)
    assert len(entries) == len(answers)
    assert [entry["asked"] for entry in entries[:3]] == ["summarize", "register", "visit"]
    assert entries[0]["rule"] == "disclosure.sums; runs.approval is any"
    assert entries[0]["arrays"]["sums"] == [["float64", 2, 4]]
    assert entries[1]["fields"] == ["class_counts", "dtype", "fedauc", "message_format", "shape"]


def test_a_site_that_cannot_log_sends_nothing(tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites")["north"]
    plan = describe_plan(make_hospital_agreement())
    message = pack_payload({"kind": "register", "run": "r1", "plan": plan, "schema": plan["schema"]})
    site.answer_message(message)
    log = tmp_path / "sites" / "north" / "state" / LOG_FILE
    log.write_text(log.read_text().replace("register", "regular"))
    header = site.answer_message(message).read_header()
    assert header == {
        **stamp_version({"kind": "refusal", "reason": "this site cannot write its audit log; see its own log"}),
        "layouts": {},
    }


def test_a_plan_awaits_the_operator_and_runs_after_approval(tmp_path: Path) -> None:
    agreement, sites = make_hospital_agreement(), make_controlled_sites(tmp_path / "sites", EXAMPLE_POLICY)
    digest = hash_plan(describe_plan(agreement))
    with pytest.raises(
        TrainingStopped, match=f"^site 'north': plan {digest[:12]} awaits approval.*; approve it there and"
    ):
        start_hospital_run(sites, tmp_path / "run", agreement)
    homes = {name: SiteHome(tmp_path / "sites" / name / "state") for name in sites}
    for home in homes.values():
        assert list(home.list_plans()) == [digest]
        home.decide(home.find_plan(digest[:6]), "approved", "ana")
    run = start_hospital_run(sites, tmp_path / "run", agreement)
    homes["west"].decide(digest, "refused", "ana")
    result = run.train_to_end()
    # Also while a run goes on, the operator can end the site's part in it.
    assert result["attendance"]["west"]["answered"] == 0
    assert result["attendance"]["north"]["answered"] > 0
    events = [entry["event"] for entry in read_entries(homes["west"].folder)]
    assert events.count("approved") == events.count("refused") == 1
    with pytest.raises(ValueError, match="plan is 'x'; no plan begins like that"):
        homes["west"].find_plan("x")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (f'[runs]\napproval = "listed"\nplans = ["{"0" * 64}"]', "is not among those that this site's policy lists"),
        ('[methods]\nmethods = ["cycp-pairwise"]', "method is 'cycp-minimax'; this site allows cycp-pairwise"),
        ('[methods]\nobjectives = ["pairwise"]', "objective is 'minimax'; this site allows pairwise"),
        ("[rows]\nminimum_per_class = 1000", "fewer than the 1000 that its policy asks for"),
        ("[disclosure]\nsums = false", "this site shares no sums of columns"),
        ("[privacy]\nepsilon = 4.0", "the plan has no privacy guarantee"),
    ],
)
def test_a_policy_refuses_in_one_line(policy: str, reason: str, tmp_path: Path) -> None:
    schema = make_hospital_agreement().schema
    assert schema is not None
    if "rows" in policy:
        columns = [replace(column, center=0.0, scale=1.0) for column in schema.columns if column.kind == "number"]
        ignored = ("sex", "ward", "patient")
        schema = replace(schema, columns=tuple(columns), ignored=ignored)
    with pytest.raises(TrainingStopped, match=reason) as caught:
        start_hospital_run(
            make_controlled_sites(tmp_path / "sites", policy), tmp_path / "run", make_hospital_agreement(schema)
        )
    assert "\n" not in str(caught.value)


def test_a_listed_plan_runs(tmp_path: Path) -> None:
    agreement = make_hospital_agreement()
    policy = f'[runs]\napproval = "listed"\nplans = ["{hash_plan(describe_plan(agreement))}"]'
    sites = make_controlled_sites(tmp_path / "sites", policy)
    assert start_hospital_run(sites, tmp_path / "run", agreement).train_to_end()["final"]["auc"] > 0.8


def test_scores_that_the_policy_withholds_do_not_leave(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites", '[disclosure]\nscores = "nothing"')
    result = start_hospital_run(sites, tmp_path / "run").train_to_end()
    assert result["final"]["auc"] is None
    sent = [(entry["asked"], entry["sent"]) for entry in read_entries(tmp_path / "sites" / "west" / "state")]
    assert ("evaluate", "refusal") in sent
    assert ("evaluate", "evaluate") not in sent


def test_runs_spend_the_privacy_budget_of_a_site(tmp_path: Path) -> None:
    """Of a budget of 8 a run of 5 leaves 3, so that a second one is refused."""
    policy = OwnerPolicy.read_toml(write_file(tmp_path / "p.toml", "[privacy]\nepsilon = 8.0\ndelta = 1e-4"))
    recipe = Recipe.of("cycp-fedavg", epsilon=5.0, delta=1e-5)
    policy.check_budget(recipe, (0.0, 0.0))
    with pytest.raises(SiteRefusal, match="the plan needs epsilon 5; 3 is left"):
        policy.check_budget(recipe, (5.0, 1e-5))
    with pytest.raises(SiteRefusal, match="delta 1e-05"):
        policy.check_budget(recipe, (0.0, 1e-4))
    home = SiteHome(tmp_path / "home")
    plan = home.propose_plan(describe_plan(make_hospital_agreement()))
    home.admit_run("r1", plan, True)
    assert sum_budgets(home.read_runs()) == (0.0, 0.0), "a run that has not trained has spent nothing"
    home.begin_training("r1", 2, recipe, policy)
    home.begin_training("r1", 2, recipe, policy)
    assert sum_budgets(home.read_runs()) == (5.0, 1e-5)
    home.admit_run("r2", plan, True)
    with pytest.raises(SiteRefusal, match="3 is left"):
        home.begin_training("r2", 2, recipe, policy)


# ---------------------------------------------------------------------------------------------------------- the plan


def make_message(agreement: FederationAgreement, **changes: Any) -> dict[str, Any]:
    """The header of an evaluation of an honest server, but for the changes."""
    plan = describe_plan(agreement)
    recipe = {**plan["recipe"], "epsilon": None, **changes.pop("recipe", {})}
    totals = ClassTotals(3, 3, (3, 3), (30, 70))
    header = {
        "kind": "evaluate",
        "round": 1,
        "cycle_length": 2,
        "requested": "histograms",
        "class_totals": list(totals),
    }
    return {**header, "recipe": recipe, "model": plan["model"], "schema": plan["schema"], **changes}


def test_a_message_must_follow_the_plan() -> None:
    agreement = make_hospital_agreement()
    document = describe_plan(agreement)
    plan = read_plan(document)
    check_against_plan(make_message(agreement), plan)
    algorithm = document["recipe"]["algorithm"]
    for changes, name in (
        ({"recipe": {"algorithm": {**algorithm, "objective": {**algorithm["objective"], "prior": 0.1}}}}, "algorithm"),
        ({"round": 4}, "round 4; the plan has 4"),
        ({"round": True}, "round True"),
        ({"cycle_length": 0}, "cycle has 0 rounds"),
        ({"recipe": {"local_steps": 99}}, "local_steps"),
        ({"recipe": {"transforms": [{"name": "clip", "norm": 1.0}]}}, "transforms"),
        ({"recipe": {"algorithm": {"name": "fedavg"}}}, "algorithm"),
        ({"recipe": {"patience": 3}}, "patience"),
        ({"model": {"name": "perceptron"}}, "model"),
        ({"schema": None}, "schema"),
        ({"requested": "scores"}, "scores"),
    ):
        with pytest.raises(SiteRefusal, match=name):
            check_against_plan(make_message(agreement, **changes), plan)
    clipped = replace(agreement, recipe=replace(agreement.recipe, transforms=(Clip(norm=1.0),)))
    message = make_message(clipped, recipe={"transforms": [{"name": "clip", "norm": 1e9}]})
    with pytest.raises(SiteRefusal, match="transforms"):
        check_against_plan(message, read_plan(describe_plan(clipped)))


def test_a_prior_from_the_data_is_that_of_the_class_totals() -> None:
    agreement = make_hospital_agreement()
    algorithm = replace(agreement.recipe.algorithm, objective=Minimax(prior_from_data=True))
    agreement = replace(agreement, recipe=replace(agreement.recipe, algorithm=algorithm))
    plan = read_plan(describe_plan(agreement))
    for prior, is_right in ((0.3, True), (0.2, False), (None, False)):
        completed = to_plain(replace(algorithm, objective=Minimax(prior_from_data=True, prior=prior)))
        message = make_message(agreement, recipe={"algorithm": completed})
        with nullcontext() if is_right else pytest.raises(SiteRefusal, match="algorithm"):
            check_against_plan(message, plan)


def test_the_hash_of_a_plan_does_not_depend_on_the_order_of_fields_or_on_the_schedule() -> None:
    plan = describe_plan(make_hospital_agreement())
    assert hash_plan(plan) == hash_plan(dict(reversed(list(plan.items()))))
    assert hash_plan(json.loads(json.dumps(plan))) == hash_plan(plan)
    written = json.loads(json.dumps(plan).replace('"minimum": 0,', '"minimum": 0.0,'))
    assert '"minimum": 0.0' in json.dumps(written)
    assert hash_plan(written) == hash_plan(plan), "a file turns whole numbers into floats"
    other = describe_plan(make_hospital_agreement(evaluation="scores"))
    assert hash_plan(other) != hash_plan(plan)


def test_a_site_asks_for_the_plan_of_a_run_that_it_has_not_admitted(tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites")["north"]
    for kind in ("register", "visit", "unmask", "evaluate"):
        header = site.answer_message(pack_payload({"kind": kind, "run": "r1"})).read_header()
        assert (header["kind"], header["what"]) == ("missing-state", "plan")
    header = site.answer_message(pack_payload({"kind": "visit", "run": "../up"})).read_header()
    assert "letters and digits" in header["reason"]
    header = site.answer_message(Payload("[" * 100_000, np.zeros(0, np.uint8))).read_header()
    assert header["kind"] == "refusal"
    assert verify_log(tmp_path / "sites" / "north" / "state").head.entries == 6


def test_a_run_that_has_trained_is_not_forgotten_for_others_that_were_only_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site would forget how many rounds a cycle of that run has, and accept another number."""
    monkeypatch.setattr(site_control, "MOST_RUNS", 3)
    home, plan = SiteHome(tmp_path), read_plan(describe_plan(make_hospital_agreement()))
    home.admit_run("trained", plan, is_chosen=False)
    home.begin_training("trained", 3, plan.recipe, OwnerPolicy())
    for number in range(5):
        home.admit_run(f"proposed{number}", plan, is_chosen=False)
    assert list(home.read_runs()) == ["trained", "proposed3", "proposed4"]


def test_settings_that_cannot_be_read_are_a_refusal_in_the_audit_log(tmp_path: Path) -> None:
    """A policy file that is missing; the log must not have gaps where a site answers anything."""
    state, config = tmp_path / "state", {"state": str(tmp_path / "state"), "policy": str(tmp_path / "missing.toml")}

    def load_nothing() -> SiteData:
        raise AssertionError("no row is read")

    message = pack_payload({"kind": "register", "run": "r1"})
    for expected in (1, 2):
        answer = answer_at_site(config, message, load_nothing).read_header()
        reason = "this site's settings cannot be read; see the site's log"
        assert (answer["kind"], answer["reason"]) == ("refusal", reason)
        report = verify_log(state)
        assert (report.problem, report.head.entries) == ("", expected)
    entry = read_entries(state)[-1]
    assert (entry["rule"], entry["asked"], entry["run"]) == (
        "refused by settings that cannot be read",
        "register",
        "r1",
    )
    write_file(tmp_path / "missing.toml", "[hours]\nopen = []")
    assert answer_at_site(config, message, load_nothing).read_header()["kind"] == "missing-state"


def test_settings_that_cannot_be_read_are_withheld_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    folder = write_file(tmp_path / "state", "a file, so that no folder can be made")
    config = {"state": str(folder), "policy": str(tmp_path / "missing.toml")}
    answer = answer_at_site(config, pack_payload({"kind": "register", "run": "r1"}), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert answer.read_header()["reason"] == "this site cannot write its audit log; see its own log"


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ('[runs]\napproval = "listed"', "runs.plans"),
        ('[runs]\napproval = "required"', "runs.approval"),
        ('[methods]\nmethods = ["scaffold"]', "methods.methods"),
        ('[methods]\nobjectives = ["square"]', "methods.objectives"),
        ("[privacy]\nepsilon = 2.0", "privacy.epsilon"),
        ('[hours]\nopen = ["mon 00:00-00:01"]', "hours.open"),
        ("[disclosure]\nsums = false", "disclosure.sums"),
    ],
)
def test_the_audit_log_names_the_rule_that_refused(policy: str, rule: str, tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites", policy)["north"]
    site._now = lambda: datetime.datetime(2026, 1, 6, 12, tzinfo=datetime.UTC)
    plan = describe_plan(make_hospital_agreement())
    message = {"kind": "summarize", "run": "r1", "plan": plan, "schema": plan["schema"], "site": "north"}
    answer = site.answer_message(pack_payload({**message, "needed": ["ward"], "asks_sums": True}))
    (entry,) = read_entries(tmp_path / "sites" / "north" / "state")
    assert (answer.read_header()["kind"], entry["rule"]) == ("refusal", f"refused by {rule}")
    assert entry["reason"] == answer.read_header()["reason"]


def test_the_audit_log_names_the_plan_and_the_schema_as_rules(tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites")["north"]
    plan = describe_plan(make_hospital_agreement())
    message = {"kind": "summarize", "run": "r1", "schema": plan["schema"], "site": "north", "needed": []}
    site.answer_message(pack_payload({**message, "plan": plan, "validation_fraction": 0.5}))
    narrow = describe_plan(make_hospital_agreement(replace(SCHEMA, columns=SCHEMA.columns[1:])))
    site.answer_message(pack_payload({**message, "run": "r2", "plan": narrow, "schema": narrow["schema"]}))
    rules = [entry["rule"] for entry in read_entries(tmp_path / "sites" / "north" / "state")]
    assert rules == ["refused by the plan of the run", "refused by schema"]


def test_a_site_that_has_lost_its_folder_is_sent_the_plan_and_takes_part_again(tmp_path: Path) -> None:
    """Without the plan it would refuse every visit until the end."""
    sites = make_controlled_sites(tmp_path / "sites")
    run = start_hospital_run(sites, tmp_path / "run")
    site = make_controlled_sites(tmp_path / "rebuilt")["north"]
    exchange = replace(run._exchange, grid=InProcessGrid({**sites, "north": site}))
    result = FederatedRun.resume(exchange, run.folder).train_to_end()
    counts = result["attendance"]["north"]
    assert counts["answered"] > 0
    assert (counts["absent"], counts["refused"]) == (0, 0)
    home = SiteHome(tmp_path / "rebuilt" / "north" / "state")
    assert list(home.read_runs()) == [json.loads((tmp_path / "run" / "census.json").read_text())["run"]]
    rules = [entry["rule"] for entry in read_entries(home.folder)]
    assert rules[:2] == ["the plan is missing", "upload of an admitted run; runs.approval is any"]


def test_a_site_that_has_lost_its_folder_awaits_approval_again(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites", EXAMPLE_POLICY)
    agreement = make_hospital_agreement()
    digest = hash_plan(describe_plan(agreement))
    for name in sites:
        home = SiteHome(tmp_path / "sites" / name / "state")
        home.propose_plan(describe_plan(agreement))
        home.decide(digest, "approved", "ana")
    run = start_hospital_run(sites, tmp_path / "run", agreement)
    site = make_controlled_sites(tmp_path / "rebuilt", EXAMPLE_POLICY)["north"]
    exchange = replace(run._exchange, grid=InProcessGrid({**sites, "north": site}))
    result = FederatedRun.resume(exchange, run.folder).train_to_end()
    assert result["attendance"]["north"]["answered"] == 0
    reasons = [line["refused"].get("north", "") for line in run.folder.read_lines("attendance.jsonl")]
    assert any(f"plan {digest[:12]} awaits approval" in reason for reason in reasons)


# -------------------------------------------------------------------------------------------------------- the policy


def write_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("hours", "day", "clock", "is_open"),
    [
        ([], 5, "03:00", True),
        (["mon-fri 19:00-07:00"], 5, "18:59", False),
        (["mon-fri 19:00-07:00"], 5, "19:00", True),
        (["mon-fri 19:00-07:00"], 6, "06:59", True),
        (["mon-fri 19:00-07:00"], 6, "07:00", False),
        (["mon-fri 19:00-07:00"], 5, "06:59", False),
        (["sat-mon 00:00-24:00"], 4, "12:00", True),
        (["sat-mon 00:00-24:00"], 5, "12:00", True),
        (["sat-mon 00:00-24:00"], 6, "12:00", False),
        (["22:00-06:00"], 7, "23:00", True),
        (["sun 08:00-09:00"], 7, "08:30", False),
    ],
)
def test_hours_of_operation(hours: list[str], day: int, clock: str, is_open: bool) -> None:
    """The fifth of January 2026 is a Monday."""
    now = datetime.datetime.fromisoformat(f"2026-01-{day:02d}T{clock}:00+00:00")
    assert OpeningHours(tuple(hours)).is_open(now) == is_open
    # Two hours ahead of UTC in summer.
    summer = datetime.datetime(2026, 7, 6, 21, 30, tzinfo=datetime.UTC)
    assert OpeningHours(("tue 23:00-24:00",), "Europe/Berlin").is_open(summer) is False
    assert OpeningHours(("mon 23:00-24:00",), "Europe/Berlin").is_open(summer) is True


def test_a_closed_site_says_when_it_is_open(tmp_path: Path) -> None:
    source = make_controlled_sites(tmp_path / "sites")["north"]
    noon = datetime.datetime(2026, 1, 5, 12, tzinfo=datetime.UTC)
    closed = OwnerPolicy(hours=OpeningHours(("19:00-07:00",)))
    site = ControlledSite(source._site, tmp_path / "closed", closed, lambda: noon)
    header = site.answer_message(pack_payload({"kind": "register", "run": "r1"})).read_header()
    assert header["reason"] == "this site answers 19:00-07:00 (UTC)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runs]\napproval = 'never'", "approval"),
        ("[hours]\nopen = ['25:00-26:00']", "write 'mon-fri 19:00-07:00'"),
        ("[hours]\nopen = ['xyz 01:00-02:00']", "write 'mon-fri 19:00-07:00'"),
        ("[hours]\ntimezone = 'Mars'", "timezone is 'Mars'"),
        ("[privacy]\nepsilon = -1.0", "epsilon is -1.0"),
        ("[disclosure]\nscores = 'rows'", "scores"),
        ("[row]\nminimum_per_class = 3", "rows"),
        ("nonsense", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        OwnerPolicy.read_toml(write_file(tmp_path / "policy.toml", text))
    assert "\n" not in str(caught.value)


def test_the_example_policy_can_be_read(tmp_path: Path) -> None:
    policy = OwnerPolicy.read_toml(write_file(tmp_path / "policy.toml", EXAMPLE_POLICY))
    assert policy.runs.approval == "required"
    assert policy.rows.minimum_per_class == 10


@pytest.mark.parametrize("digest", ["3f9a1c", "0" * 63, "G" * 64, ("0" * 64).upper() + "0"])
def test_a_hash_that_no_plan_can_have_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match=r"runs\.plans holds .*; a hash has 64 characters"):
        RunRules("listed", (digest,))


def test_the_nodes_configuration_says_what_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"share-auc is 'false'; it must be true or false, without quotes"):
        read_owner_policy({"share-auc": "false"})
    assert read_owner_policy({"share-auc": True, "share": "nothing"}).disclosure == Disclosure("nothing", True)
    # Without its policy a site would allow everything; settings of the app's own are no mistake.
    with pytest.raises(ValueError, match="node-config has 'polcy', which no site reads; did you mean 'policy'"):
        read_owner_policy({"polcy": "policy.toml", "table": "rows"})
    policy = str(write_file(tmp_path / "policy.toml", ""))
    assert read_owner_policy({"policy": policy}) == OwnerPolicy()
    for name in ("share", "share-auc"):
        with pytest.raises(ValueError, match=f"both policy and {name}, of which only the policy would count"):
            read_owner_policy({"policy": policy, name: "nothing"})


# ------------------------------------------------------------------------------------------------- the site's folder


def test_plans_that_nobody_has_decided_give_way_to_later_ones(tmp_path: Path) -> None:
    home, agreement = SiteHome(tmp_path), make_hospital_agreement()
    first = home.propose_plan(describe_plan(agreement)).digest
    home.decide(first, "refused", "ana")
    for seed in range(1, MOST_PLANS + 4):
        plan = home.propose_plan(describe_plan(replace(agreement, recipe=replace(agreement.recipe, seed=seed))))
    assert len(home.list_plans()) == MOST_PLANS + 1
    assert {first, plan.digest} <= {*home.list_plans()}
    document = describe_plan(agreement)
    document["schema"]["ignored"] = [f"column {number}" for number in range(20_000)]
    with pytest.raises(SiteRefusal, match=r"the plan cannot be read: it has \d+ characters; at most"):
        home.propose_plan(document)


def test_a_message_reads_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    start_hospital_run(sites, tmp_path / "run")
    home = SiteHome(tmp_path / "sites" / "north" / "state")
    (digest,) = home.list_plans()
    write_file(home.folder / "plans" / f"{'0' * 64}.json", "{")
    run = json.loads((tmp_path / "run" / "census.json").read_text())["run"]
    header = sites["north"].answer_message(pack_payload({"kind": "summarize", "run": run})).read_header()
    assert "another schema" in header["reason"], "it compares the message with the plan, and the other file is not read"
    assert home.read_plan(digest) is not None


def test_plans_are_listed_on_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a line break in a name nor a damaged file makes the list say something else, or nothing."""
    home, agreement = SiteHome(tmp_path), make_hospital_agreement()
    digest = home.propose_plan(describe_plan(agreement)).digest
    named = describe_plan(replace(agreement, recipe=replace(agreement.recipe, method="a\nffffffffffff  approved")))
    with pytest.raises(SiteRefusal, match="it must be a name"):
        home.propose_plan(named)
    write_file(tmp_path / "plans" / f"{'1' * 64}.json", "null")
    write_file(tmp_path / "plans" / f"{'2' * 64}.json", json.dumps(describe_plan(agreement)))
    done = fedauc(capsys, "federation", "approve", str(tmp_path))
    assert done.code == 0
    damaged, moved, *others = sorted(filter(None, done.out.splitlines()), key=lambda line: line.startswith(digest[:12]))
    assert f"{'1' * 64}.json cannot be used" in damaged
    assert f"{'2' * 64}.json holds another plan than its name says" in moved
    moment = home.read_proposal_time(digest).strftime("%Y-%m-%d %H:%M")
    assert others == [f"{digest[:12]}  undecided  {moment}  cycp-minimax, 2 cycles, no guarantee"]
    home.admit_run("1", read_plan(describe_plan(agreement)), is_chosen=True)
    listed = fedauc(capsys, "federation", "approve", str(tmp_path)).out
    assert f"{digest[:12]}  admitted   {moment}" in listed, "the policy allows it, and nobody needs to decide"


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}'])
@pytest.mark.parametrize("name", ["decisions.json", "runs.json"])
def test_a_damaged_file_of_the_folder_is_named(name: str, text: str, tmp_path: Path) -> None:
    home = SiteHome(tmp_path)
    write_file(tmp_path / name, text)
    with pytest.raises(ValueError, match=rf"{name} is damaged.*; put a copy of it back") as caught:
        home.read_decisions() if name == "decisions.json" else home.read_runs()
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        start_hospital_run(make_controlled_sites(tmp_path / "sites"), tmp_path / "run").train_to_end()
    finally:
        os.umask(before)
    state = tmp_path / "sites" / "north" / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    open_files = [
        path.relative_to(state).as_posix()
        for path in state.rglob("*")
        if path.is_file() and path.parent.name != MODEL_FOLDER and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    # The model is not secret, and in a folder that is.
    assert all(path.startswith(f"{MODEL_FOLDER}/") for path in open_files)
    assert list(state.glob("rows/prepared-*/x.npy"))
    assert list(state.glob("reports/*.jsonl"))


# -------------------------------------------------------------------------------------------------- the site's report


def test_a_line_of_the_report_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    report, labels, scores = SiteReport(tmp_path), np.array([1, 0, 1, 0]), np.array([0.9, 0.1, 0.8, 0.2])
    report.add_evaluation("r1", 0, labels, scores)
    path = tmp_path / "reports" / "r1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round": 1, "posi')
    assert "after round 1: AUC 1.0000" in describe_report(tmp_path, "r1")[0]
    report.add_evaluation("r1", 2, labels, -scores)
    lines = describe_report(tmp_path, "r1")
    assert "after round 3: AUC 0.0000" in lines[0]
    assert "last 2 evaluations: 1.0000, 0.0000" in lines[1]
    path.write_bytes(b'{"rou')
    assert describe_report(tmp_path, "r1") == ["run r1: no evaluation is complete"]


def test_the_report_is_about_the_delivered_model(tmp_path: Path) -> None:
    """With keep=best that is not the model of the last evaluation."""
    report = SiteReport(tmp_path)
    for round, scores in ((0, [0.1, 0.9]), (1, [0.9, 0.1])):
        report.add_evaluation("r1", round, np.array([0, 1]), np.array(scores))
    assert "after round 2: AUC 0.0000" in describe_report(tmp_path, "r1")[0]
    (tmp_path / "models" / "r1").mkdir(parents=True)
    (tmp_path / "models" / "r1" / "delivery.json").write_text('{"round": 0}')
    assert "the delivered model, of round 1: AUC 1.0000" in describe_report(tmp_path, "r1")[0]


def test_the_sites_own_report_stays_at_the_site(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    start_hospital_run(sites, tmp_path / "run").train_to_end()
    state = tmp_path / "sites" / "south" / "state"
    (run,) = list_reports(state)
    lines = describe_report(state, run)
    assert "on this site's held-out rows (" in lines[0]
    assert any("recall" in line for line in lines)
    auc = json.loads((state / "reports" / f"{run}.jsonl").read_text().splitlines()[-1])["auc"]
    assert f"AUC {auc:.4f}" in lines[0]
    records = (tmp_path / "run" / "records.jsonl").read_text()
    assert str(auc) not in records
    assert "site_auc" not in records


# --------------------------------------------------------------------------------------- every kind of run is admitted

GROUPS_OF_FOUR = Cyclic(given=((0, 1, 3), (4, 5, 6, 7)), assignment="given")
"""A secure sum needs groups of three sites or more."""

COMPLETED_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "prior": ("cycp-minimax", {"objective": Minimax(prior_from_data=True)}),
    "secure sum": ("cycp-fedavg", {"transforms": (SecureSum(),), "participation": GROUPS_OF_FOUR}),
    "client noise": (
        "cycp-fedavg",
        {
            "transforms": (ClientDP(clip=1.0), SecureSum()),
            "participation": GROUPS_OF_FOUR,
            "epsilon": 8.0,
            "delta": 1e-3,
            "weighting": "paper",
        },
    ),
    "server noise": ("cycp-fedavg", {"transforms": (ClientDP(clip=1.0),), "epsilon": 8.0, "delta": 1e-3}),
    "client noise of a multiplier": (
        "cycp-fedavg",
        {
            "transforms": (ClientDP(clip=1.0, noise_multiplier=2.0), SecureSum()),
            "participation": GROUPS_OF_FOUR,
            "weighting": "paper",
        },
    ),
    "no noise": (
        "cycp-fedavg",
        {
            "transforms": (ClientDP(), SecureSum()),
            "participation": GROUPS_OF_FOUR,
            "epsilon": math.inf,
            "weighting": "paper",
        },
    ),
    "server noise for drawn clients": (
        "cycp-fedavg",
        {
            "transforms": (ClientDP(clip=1.0),),
            "participation": CyclicPoisson(rate=0.6),
            "epsilon": 8.0,
            "delta": 1e-3,
        },
    ),
    "row noise in any round": (
        "fedavg",
        {"wrappers": (ExampleDP(),), "participation": Uniform(groups=2, per_round=4), "epsilon": 4.0, "delta": 1e-3},
    ),
    "row noise": ("cycp-fedavg", {"wrappers": (ExampleDP(),), "epsilon": 4.0, "delta": 1e-3}),
}
"""Runs whose recipe the server completes: with a prior, with the noise of a budget, with the sizes of a sum."""


@pytest.mark.parametrize("kind", COMPLETED_RUNS)
def test_what_the_server_completes_follows_the_plan(kind: str, tmp_path: Path) -> None:
    method, settings = COMPLETED_RUNS[kind]
    agreement = make_agreement(method, {"evaluation": "none"}, **settings)
    plain = make_sites(small_federation(), tmp_path / "sites")
    sites = {name: ControlledSite(site, tmp_path / "homes" / name, OwnerPolicy()) for name, site in plain.items()}
    grid = MemoryGrid(sites)  # type: ignore[arg-type]
    result = create_run(agreement, grid, tmp_path / "run").train_to_end()
    entries = [entry for name in NAMES for entry in read_entries(tmp_path / "homes" / name)]
    # These sites have no folder for models, and the one without rows fails when it registers.
    refused = {
        (entry["asked"], entry["reason"]) for entry in entries if entry["reason"] and entry["asked"] != "deliver"
    }
    assert refused == {("register", "ValueError; see the site's log")}
    assert sum(counts["answered"] for counts in result["attendance"].values()) > 0


def test_the_report_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    labels = np.arange(2000) % 2
    SiteReport(tmp_path).add_evaluation("1", 3, labels, np.sin(np.arange(2000.0)) * 1e-5 + labels)
    lines = describe_report(tmp_path, "1")
    assert any(line.startswith("fpr 0.01") for line in lines)
    # The command wraps the sentences before the table.
    assert max(map(len, lines[2:])) <= 80


def test_damaged_lines_of_a_report_are_counted(tmp_path: Path) -> None:
    SiteReport(tmp_path).add_evaluation("1", 3, np.arange(2), np.arange(2.0))
    path = tmp_path / "reports" / "1.jsonl"
    path.write_text(path.read_text() + "{\n")
    assert "lines of the report that are damaged and left out: 1" in describe_report(tmp_path, "1")


@pytest.mark.parametrize("text", ["", "[tool.flwr.app.config]\nmethod = 'focus'", "tool = 3", "[tool.flwr"])
def test_a_folder_that_is_no_app_has_no_plan(text: str, tmp_path: Path) -> None:
    write_file(tmp_path / "pyproject.toml", text)
    with pytest.raises(ValueError, match=r"pyproject\.toml (has no method and sites|is not TOML)"):
        plan(tmp_path)


def test_a_bound_on_delta_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"privacy\.delta is 0\.001 without privacy\.epsilon"):
        PrivacyRules(delta=1e-3)
