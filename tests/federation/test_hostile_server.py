"""A server that edits its messages: a site answers what the plan that it has admitted implies, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.audit_log import read_entries
from fedauc.federation.owner_policy import OwnerPolicy
from fedauc.federation.run_plan import describe_plan, hash_plan, read_plan
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site_control import ControlledSite, SiteHome
from fedauc.federation.site_report import describe_report
from fedauc.federation.site_state import SiteRefusal
from fedauc.participation.cyclic import Cyclic
from fedauc.privacy.secure_sum import create_session_id
from fedauc.stages import Theory
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers.example_dp import ExampleDP
from federation.hospital_tables import (
    SCHEMA,
    make_controlled_sites,
    make_hospital_agreement,
    start_hospital_run,
)
from federation.memory_grid import NAMES, MemoryGrid, collect_rounds, create_run, make_agreement, make_sites
from small_federations import held_out, small_federation

Messages = dict[str, list[Payload]]
"""What one site was sent in an honest run, by the kind of message."""


def record_messages(site: ControlledSite) -> Messages:
    """What a site is sent from now on."""
    messages, answer_message = Messages(), site.answer_message

    def record_message(payload: Payload) -> Payload:
        messages.setdefault(payload.read_header()["kind"], []).append(payload)
        return answer_message(payload)

    site.answer_message = record_message  # type: ignore[method-assign]
    return messages


def edit(payload: Payload, **changes: Any) -> Payload:
    """The message with other values in its header."""
    return Payload(json.dumps({**payload.read_header(), **changes}), payload.body)


def ask(site: ControlledSite, payload: Payload, **changes: Any) -> tuple[str, str]:
    """The kind of a site's answer, and the reason of a refusal."""
    header = site.answer_message(edit(payload, **changes)).read_header()
    return header["kind"], header.get("reason", header.get("what", ""))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Messages:
    """The messages to one hospital in a run of CyCp-Minimax over two cycles of two rounds."""
    folder = tmp_path_factory.mktemp("honest")
    sites = make_controlled_sites(folder / "sites")
    messages = record_messages(sites["north"])
    start_hospital_run(sites, folder / "run").train_to_end()
    return messages


@pytest.fixture
def plan() -> dict[str, Any]:
    return describe_plan(make_hospital_agreement())


@pytest.fixture
def site(tmp_path: Path) -> ControlledSite:
    return make_controlled_sites(tmp_path / "sites")["north"]


def make_private_agreement(**settings: Any) -> FederationAgreement:
    """Hospitals in one group whose schema needs no sums, with a budget of epsilon 8."""
    columns = [
        dataclasses.replace(column, categories=("a", "b", "c"))
        if column.name == "ward"
        else dataclasses.replace(column, center=50.0, scale=20.0)
        if column.kind == "number"
        else column
        for column in SCHEMA.columns
    ]
    schema = dataclasses.replace(SCHEMA, columns=tuple(columns))
    agreement = make_hospital_agreement(schema, evaluation="none", patience=2)
    recipe = Recipe.of(
        "cycp-minimax",
        **{
            "engine": "loop",
            "cycles": 2,
            "participation": Cyclic(groups=1),
            "epsilon": 8.0,
            "delta": 1e-3,
            "weighting": "paper",
            "transforms": (ClientDP(), SecureSum()),
            **settings,
        },
    )
    sites = tuple(dataclasses.replace(entry, group="") for entry in agreement.sites)
    return dataclasses.replace(agreement, recipe=recipe, sites=sites)


# ------------------------------------------------------------------------------------------------ phases and rounds


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"batch": [1, 0], "local_steps": 1}, "batch"),
        ({"batch": [1, 1]}, "batch"),
        ({"local_steps": 2000}, "local_steps"),
        ({"learning_rate": 50.0}, "learning_rate"),
        ({"stage": 7}, "stage"),
        ({"scoring": True}, "scoring"),
        ({"ends_cycle": 0}, "ends_cycle"),
        ({"round": 10**6, "cycle": 10**6}, "the plan has 4"),
        ({"round": -1}, "round -1"),
        ({"round": True}, "round True"),
    ],
)
def test_a_visit_has_the_phase_of_the_plan(
    honest: Messages, plan: dict[str, Any], site: ControlledSite, changes: dict[str, Any], part: str
) -> None:
    """A batch of one row and one local step would send the gradient of a single patient."""
    visit = honest["visit"][0]
    phase = visit.read_header()["phase"]
    kind, reason = ask(site, visit, plan=plan, phase={**phase, **changes})
    assert kind == "refusal"
    assert part in reason
    assert ask(site, visit, plan=plan) == ("visit", "")


def test_the_length_of_a_cycle_stays(honest: Messages, plan: dict[str, Any], site: ControlledSite) -> None:
    """The rounds of a plan follow from it, and only the server knows it before the first visit."""
    first, second = honest["visit"]
    assert ask(site, first, plan=plan) == ("visit", "")
    kind, reason = ask(site, honest["evaluate"][0], cycle_length=500_000)
    assert (kind, "before, the run had 2" in reason) == ("refusal", True)
    assert ask(site, second) == ("visit", "")
    assert ask(site, honest["evaluate"][0], round=4)[0] == "refusal"
    assert ask(site, honest["evaluate"][0]) == ("evaluate", "")


def test_the_stages_of_the_theorem_are_found(tmp_path: Path) -> None:
    """They depend on the clients per round, which a site is not told."""
    agreement = make_agreement("cycp-minimax", {"evaluation": "none"}, stages=Theory(), cycles=2)
    sites = control_small_sites(tmp_path)
    messages = record_messages(sites[NAMES[0]])
    run_small_federation(agreement, sites, tmp_path)
    entries = read_entries(tmp_path / "homes" / NAMES[0])
    assert [entry["sent"] for entry in entries if entry["asked"] == "visit"] == ["visit", "visit"]
    phase = messages["visit"][0].read_header()["phase"]
    changed = {**phase, "local_steps": phase["local_steps"] + 1000}
    assert ask(sites[NAMES[0]], messages["visit"][0], phase=changed)[0] == "refusal"


def test_the_noise_of_rows_is_that_of_any_plan_of_the_theorem(tmp_path: Path) -> None:
    """With one client per round the second stage would have two local steps; this run has one throughout."""
    agreement = make_agreement(
        "cycp-fedavg",
        {"evaluation": "none", "patience": 1},
        participation="full",
        cycles=500,
        stages=Theory(mu=1.0),
        learning_rate=0.46,
        weighting="paper",
        wrappers=(ExampleDP(),),
        epsilon=4.0,
        delta=1e-3,
    )
    sites = control_small_sites(tmp_path)

    def stop(finished: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_rounds(create_run(agreement, MemoryGrid(sites), tmp_path / "run"), [], stop)  # type: ignore[arg-type]
    for name in NAMES:
        sent = [entry["sent"] for entry in read_entries(tmp_path / "homes" / name) if entry["asked"] == "visit"]
        assert set(sent) <= {"visit"}


# --------------------------------------------------------------------------------------------------------- the plan


def change(document: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a plan with another value, or without it."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    *owners, name = path.split(".")
    inner = changed
    for owner in owners:
        inner = inner[owner]
    if value is None:
        del inner[name]
    else:
        inner[name] = value
    return changed


@pytest.mark.parametrize("path", ["recipe.learning_rate", "recipe.transforms", "recipe.seed", "evaluation", "schema"])
def test_a_plan_leaves_nothing_out(
    honest: Messages, plan: dict[str, Any], site: ControlledSite, tmp_path: Path, path: str
) -> None:
    """What it leaves out would be open: the visit could say anything."""
    kind, reason = ask(site, honest["visit"][0], plan=change(plan, path, None))
    assert (kind, reason.startswith("the plan ")) == ("refusal", True)
    assert not list((tmp_path / "sites" / "north" / "state").glob("plans/*")), "what is refused is not kept"


def test_a_plan_has_nothing_that_the_site_does_not_know(
    honest: Messages, plan: dict[str, Any], site: ControlledSite
) -> None:
    for path in ("recipe.rows", "recipe.algorithm.rows", "rows"):
        assert ask(site, honest["visit"][0], plan=change(plan, path, "all"))[0] == "refusal"


@pytest.mark.parametrize("document", [None, 5, [], "plan", {"recipe": 3}, {"recipe": {"method": "a\nb"}}])
def test_what_is_no_plan_is_not_kept(site: ControlledSite, tmp_path: Path, document: Any) -> None:
    message = pack_payload({"kind": "register", "run": "r1", "plan": document})
    header = site.answer_message(message).read_header()
    assert header["kind"] == "refusal"
    assert header["reason"].startswith("the plan cannot be read")
    assert not list((tmp_path / "sites" / "north" / "state").glob("plans/*"))


def test_a_method_is_what_it_says(honest: Messages, plan: dict[str, Any], tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites", '[methods]\nmethods = ["cycp-pairwise"]')["north"]
    visit = honest["visit"][0]
    labelled = {**visit.read_header()["recipe"], "method": "cycp-pairwise"}
    kind, reason = ask(site, visit, plan=change(plan, "recipe.method", "cycp-pairwise"), recipe=labelled)
    assert (kind, "'cycp-pairwise' does not have the algorithm 'minimax'" in reason) == ("refusal", True)


def test_a_method_has_its_objective(tmp_path: Path) -> None:
    """Focal loss is what one of two methods with the same algorithm brings along."""
    site = make_controlled_sites(tmp_path / "sites", '[methods]\nmethods = ["cycp-fedavg-focal"]')["north"]
    agreement = make_hospital_agreement()
    for method, problem in (("cycp-fedavg-focal", ""), ("cycp-fedavg", "does not have the objective")):
        recipe = dataclasses.replace(Recipe.of(method, cycles=2), method="cycp-fedavg-focal")
        plan = describe_plan(dataclasses.replace(agreement, recipe=recipe))
        header = {"kind": "summarize", "run": method.replace("-", ""), "plan": plan, "schema": plan["schema"]}
        answer = site.answer_message(pack_payload({**header, "needed": [], "asks_sums": True, "site": "n"}))
        assert problem in answer.read_header().get("reason", "")
        assert (answer.read_header()["kind"] == "refusal") is bool(problem)


# ------------------------------------------------------------------------------------------------- rows and disclosure


def test_a_site_with_few_rows_answers_nothing_of_them(honest: Messages, plan: dict[str, Any], tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites", "[rows]\nminimum_per_class = 1000")["north"]
    for kind in ("register", "visit", "evaluate", "deliver"):
        answered, reason = ask(site, honest[kind][0], plan=plan)
        assert (kind, answered) == (kind, "refusal")
        assert "fewer than the 1000 that its policy asks for" in reason


def test_few_held_out_rows_are_not_evaluated(honest: Messages, plan: dict[str, Any], tmp_path: Path) -> None:
    """Of about thirty positives ten are held out."""
    site = make_controlled_sites(tmp_path / "sites", "[rows]\nminimum_per_class = 15")["north"]
    assert ask(site, honest["visit"][0], plan=plan) == ("visit", "")
    kind, reason = ask(site, honest["evaluate"][0])
    assert (kind, "held-out positives, but fewer than the 15" in reason) == ("refusal", True)
    # The site's own report, which stays there, has the evaluation.
    state = tmp_path / "sites" / "north" / "state"
    assert any("AUC 0." in line for line in describe_report(state, honest["evaluate"][0].read_header()["run"]))
    assert read_entries(state)[-1]["rule"] == "refused by rows.minimum_per_class"


def test_a_private_run_tells_no_exact_sums_and_counts(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites")
    messages = record_messages(sites["north"])
    start_hospital_run(sites, tmp_path / "run", make_private_agreement())
    site = make_controlled_sites(tmp_path / "again")["north"]
    assert ask(site, messages["summarize"][0], asks_sums=True)[0] == "refusal"
    assert ask(site, messages["register"][0], hides_counts=False)[0] == "refusal"
    assert ask(site, messages["register"][0], secure_sum=False)[0] == "refusal"
    header = site.answer_message(messages["summarize"][0]).read_header()
    assert (header["kind"], header["has_sums"]) == ("summarize", False)
    header = site.answer_message(messages["register"][0]).read_header()
    assert (header["kind"], "class_counts" in header) == ("register", False)


def test_a_table_is_compared_with_few_schemas(plan: dict[str, Any], tmp_path: Path) -> None:
    """A refusal tells whether a value is above the maximum, so that eight schemas found the oldest patient."""
    site = make_controlled_sites(tmp_path / "sites")["north"]
    answered = []
    for number in range(8):
        changed = copy.deepcopy(plan)
        changed["schema"]["columns"][0]["maximum"] = 60.0 + 8 * number
        header = {"kind": "summarize", "run": f"r{number}", "plan": changed, "schema": changed["schema"]}
        answer = site.answer_message(pack_payload({**header, "needed": [], "asks_sums": False, "site": "n"}))
        answered.append(answer.read_header())
    compared = [header for header in answered if "schemas" not in header.get("reason", "")]
    assert len(compared) == 5
    assert "its operator must approve the plan" in answered[-1]["reason"]
    assert any("outside" in header.get("reason", "") for header in compared)


def test_plans_that_hold_out_other_rows_need_an_approval(plan: dict[str, Any], tmp_path: Path) -> None:
    """Sums over two parts of the training rows that differ by one row would tell that row."""
    site, answered = make_controlled_sites(tmp_path / "sites")["north"], []
    for number, fraction in enumerate((0.2, 0.21, 0.0, 0.2)):
        changed = {**plan, "validation_fraction": fraction} if fraction else plan
        header = {"kind": "summarize", "run": f"r{number}", "plan": changed, "schema": changed["schema"]}
        header |= {"validation_fraction": fraction} if fraction else {}
        payload = pack_payload({**header, "needed": [], "asks_sums": False, "site": "n"})
        answered.append(site.answer_message(payload).read_header())
    assert [header["kind"] for header in answered] == ["summarize", "refusal", "refusal", "summarize"]
    assert answered[1]["reason"].startswith("the plan holds out 0.21 of the training rows, and plans before it 0.2;")
    (folder,) = [path.parent for path in (tmp_path / "sites").rglob("held_out.json")]
    SiteHome(folder).decide(hash_plan(plan), "approved", "an operator")
    header = {"kind": "summarize", "run": "r9", "plan": plan, "schema": plan["schema"]}
    payload = pack_payload({**header, "needed": [], "asks_sums": False, "site": "n"})
    assert site.answer_message(payload).read_header()["kind"] == "summarize"


def test_a_private_plan_holds_out_no_rows() -> None:
    """Their scores would leave without noise, and their number would tell the class counts that sites hide."""
    private = describe_plan(make_private_agreement())
    with pytest.raises(SiteRefusal, match=r"validation_fraction is 0\.2, but the run evaluates nothing, or is private"):
        read_plan({**private, "validation_fraction": 0.2})
    with pytest.raises(ValueError, match=r"validation-fraction is 0\.2, but"):
        make_agreement(
            "cycp-fedavg",
            {"evaluation": "histograms", "validation_fraction": 0.2},
            wrappers=(ExampleDP(),),
            epsilon=4.0,
            delta=1e-3,
        )


def test_a_run_is_admitted_once(plan: dict[str, Any], tmp_path: Path) -> None:
    """A late admission must not delete what the run has spent since then."""
    home, admitted = SiteHome(tmp_path / "home"), read_plan(plan)
    home.admit_run("r1", admitted, is_chosen=True)
    home.begin_training("r1", 3, admitted.recipe, OwnerPolicy())
    before = home.read_runs()
    home.admit_run("r1", admitted, is_chosen=True)
    assert home.read_runs() == before


# ------------------------------------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("epsilon", [-1000.0, float("nan"), float("inf"), 0.0, True, "5"])
def test_a_budget_takes_numbers_that_can_be_spent(
    honest: Messages, plan: dict[str, Any], tmp_path: Path, epsilon: Any
) -> None:
    """A negative epsilon would fill the budget again, and no sum with a NaN is above it."""
    site = make_controlled_sites(tmp_path / "sites", "[privacy]\nepsilon = 8.0")["north"]
    private = describe_plan(make_private_agreement())
    for document in (plan, private):
        changed = change(document, "recipe.epsilon", epsilon)
        kind, _ = ask(site, honest["register"][0], plan=changed, schema=changed["schema"], hides_counts=True)
        assert kind == "refusal"
    assert not (tmp_path / "sites" / "north" / "state" / "runs.json").exists()


def test_an_epsilon_needs_what_keeps_it(honest: Messages, plan: dict[str, Any], tmp_path: Path) -> None:
    site = make_controlled_sites(tmp_path / "sites", "[privacy]\nepsilon = 8.0")["north"]
    promised = change(change(plan, "recipe.epsilon", 0.5), "recipe.delta", 1e-5)
    for kind in ("summarize", "register", "visit", "evaluate"):
        answered, reason = ask(site, honest[kind][0], plan=promised)
        assert (kind, answered, reason.startswith("the plan ")) == (kind, "refusal", True)
    scored = change(describe_plan(make_private_agreement()), "evaluation", "histograms")
    answered, reason = ask(site, honest["register"][0], plan=scored, schema=scored["schema"])
    assert (answered, "scores of a private run are not noised" in reason) == ("refusal", True)


def test_a_run_spends_its_budget_when_it_trains(tmp_path: Path) -> None:
    """A table that does not fit the schema costs nothing, however often the run is tried."""
    agreement = make_private_agreement(epsilon=3.0)
    sites = make_controlled_sites(tmp_path / "sites", "[privacy]\nepsilon = 8.0")
    rows = tmp_path / "sites" / "north" / "rows.csv"
    table = rows.read_text()
    rows.write_text("age,x\n1,2\n")
    plan = describe_plan(agreement)
    header = {"kind": "summarize", "plan": plan, "schema": plan["schema"], "needed": [], "asks_sums": False}
    for number in range(4):
        answer = sites["north"].answer_message(pack_payload({**header, "run": f"r{number}", "site": "n"}))
        assert "column" in answer.read_header()["reason"]
    rows.write_text(table)
    for number, answered in ((0, 2), (1, 2)):
        result = start_hospital_run(sites, tmp_path / f"run-{number}", agreement).train_to_end()
        assert result["attendance"]["north"]["answered"] == answered
    refused = sites["north"].answer_message(pack_payload({**header, "run": "r9", "site": "n"})).read_header()
    assert refused["reason"] == "the plan needs epsilon 3; 2 is left of this site's budget"


def test_a_secure_sum_has_the_noise_of_the_plan(tmp_path: Path) -> None:
    sites = make_controlled_sites(tmp_path / "sites", "[privacy]\nepsilon = 8.0")
    messages = record_messages(sites["north"])
    start_hospital_run(sites, tmp_path / "run", make_private_agreement()).train_to_end()
    visit = messages["visit"][0]
    asked = visit.read_header()["secure_sum"]
    (change_deviation, histogram), survivors = asked["deviations"], asked["survivors"]
    assert change_deviation > 0
    for changes in (
        {"deviations": [0.0, 0.0]},
        {"deviations": [0.99 * change_deviation, histogram]},
        {"deviations": [float("nan"), 0.0]},
        {"deviations": [float("inf"), 0.0]},
        {"deviations": [change_deviation / 10, histogram], "survivors": 1000 * survivors},
        {"survivors": 1},
    ):
        kind, reason = ask_new_site(visit, messages, tmp_path, secure_sum={**asked, **changes})
        assert kind == "refusal", changes
        # What is no finite number is no deviation.
        assert any(word in reason for word in ("noise", "threshold", "ValueError"))
    assert ask_new_site(visit, messages, tmp_path) == ("visit", "")


def ask_new_site(visit: Payload, messages: Messages, folder: Path, **changes: Any) -> tuple[str, str]:
    """Ask a site that has registered for the run, and has answered no visit."""
    folder = folder / f"new-{len(list(folder.glob('new-*')))}"
    site = make_controlled_sites(folder)["north"]
    key = site.answer_message(messages["register"][0]).read_header()["public_key"]
    return ask(site, visit, session=make_session(visit, 0, key), **changes)


def make_session(visit: Payload, round: int, key: str) -> dict[str, Any]:
    """A new session of the sites of a visit, of which the visited one has another key."""
    header = visit.read_header()
    session, position = header["session"], header["session"]["members"].index(header["client"])
    keys = [*session["public_keys"][:position], key, *session["public_keys"][position + 1 :]]
    return {**session, "public_keys": keys, "session_id": create_session_id(round).hex()}


# ------------------------------------------------------------------------------------------- the small federation


GROUPS_OF_FOUR = Cyclic(given=((0, 1, 3), (4, 5, 6, 7)), assignment="given")


def control_small_sites(folder: Path) -> dict[str, ControlledSite]:
    plain = make_sites(small_federation(), folder / "sites", held_out())
    return {name: ControlledSite(site, folder / "homes" / name, OwnerPolicy()) for name, site in plain.items()}


def run_small_federation(agreement: FederationAgreement, sites: dict[str, ControlledSite], folder: Path) -> None:
    create_run(agreement, MemoryGrid(sites), folder / "run").train_to_end()  # type: ignore[arg-type]


def record_small_run(folder: Path, **settings: Any) -> tuple[Messages, Messages]:
    """The messages to a site of each group of the small federation, in a private run with two rounds per cycle."""
    agreement = make_agreement(
        "cycp-fedavg",
        {"evaluation": "none", "patience": 2},
        **{"participation": GROUPS_OF_FOUR, "weighting": "paper", "epsilon": 4.0, "delta": 1e-3, **settings},
    )
    sites = control_small_sites(folder)
    messages = record_messages(sites[NAMES[4]]), record_messages(sites[NAMES[0]])
    run_small_federation(agreement, sites, folder)
    return messages


NOISES: dict[str, tuple[dict[str, Any], str]] = {
    "of rows": ({"wrappers": (ExampleDP(),)}, "wrappers"),
    "of the server": ({"transforms": (ClientDP(),)}, "transforms"),
}


@pytest.mark.parametrize("kind", NOISES)
def test_noise_keeps_the_epsilon_of_the_plan(kind: str, tmp_path: Path) -> None:
    settings, field = NOISES[kind]
    messages, _ = record_small_run(tmp_path / "honest", **settings)
    visit, document = messages["visit"][0], messages["register"][0].read_header()["plan"]
    recipe = visit.read_header()["recipe"]
    multiplier = recipe[field][0]["noise_multiplier"]
    site = control_small_sites(tmp_path / "again")[NAMES[4]]
    for factor, is_enough in ((1e-12, False), (0.5, False), (1.0, True)):
        weak = {**recipe, field: [{**recipe[field][0], "noise_multiplier": factor * multiplier}]}
        answered, reason = ask(site, visit, plan=document, recipe=weak)
        assert (answered, "too little noise" in reason) == (("visit", False) if is_enough else ("refusal", True))
    louder = {**recipe, field: [{**recipe[field][0], "clip": 9.0}]}
    assert f"another {field}" in ask(site, visit, recipe=louder)[1]


@pytest.mark.parametrize("kind", ["rows", "sums"])
def test_a_private_run_visits_a_site_once_per_cycle(kind: str, tmp_path: Path) -> None:
    """The noise of a cycle is that of one visit, and the site is asked in every round."""
    settings = {"wrappers": (ExampleDP(),)} if kind == "rows" else {"transforms": (ClientDP(), SecureSum())}
    groups = Cyclic(given=((4, 5, 6, 7), (0, 1, 3)), assignment="given")
    messages, others = record_small_run(tmp_path / "honest", participation=groups, **settings)
    visit, document = messages["visit"][0], messages["register"][0].read_header()["plan"]
    site = control_small_sites(tmp_path / "again")[NAMES[4]]
    key = site.answer_message(messages["register"][0]).read_header().get("public_key")
    first, second = [{"session": make_session(visit, round, key)} if key else {} for round in (0, 1)]
    assert ask(site, visit, plan=document, **first) == ("visit", "")
    phase = others["visit"][0].read_header()["phase"]
    assert (phase["round"], phase["cycle"]) == (1, 0)
    answered, reason = ask(site, visit, phase=phase, **second)
    assert (answered, "a second answer in its cycle costs privacy" in reason) == ("refusal", True)


# ------------------------------------------------------------------------------------------------------ the audit log


def test_the_audit_log_repeats_no_words_of_the_server(site: ControlledSite, tmp_path: Path) -> None:
    """A lone surrogate would end `fedauc federation audit` with an encoding error for good."""
    for header in ({"kind": "\ud800", "run": "r1"}, {"kind": "visit", "run": "\ud800"}, {"kind": ["visit"], "run": 3}):
        assert site.answer_message(pack_payload(header)).read_header()["kind"] in ("refusal", "missing-state")
    entries = read_entries(tmp_path / "sites" / "north" / "state")
    assert [(entry["asked"], entry["run"]) for entry in entries] == [
        ("unknown kind of message", "r1"),
        ("visit", ""),
        ("unknown kind of message", ""),
    ]
