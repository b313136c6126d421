"""A site under its owner's control: every message passes the policy, and every answer is in the audit log before it
leaves.

The site's folder (`state` in --node-config) holds:

audit.jsonl, audit-head.json   what left the site, how many bytes, and under which rule
plans/HASH.json                plans that a server has proposed
decisions.json                 what the operator has approved or refused
runs.json                      runs that were admitted, with their plan, and what those that have trained may spend
schemas.json                   schemas that the table was compared with without an operator's approval
held_out.json                  parts of the training rows that admitted plans hold out as validation rows
reports/RUN.jsonl              the site's own AUC and thresholds, which never leave
models/RUN/                    the model of a finished run
RUN/                           the site's state in a run
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedauc.experiments.recipe import Recipe
from fedauc.federation.audit_log import AuditLog, read_time
from fedauc.federation.delivery import MODEL_FOLDER
from fedauc.federation.owner_policy import Disclosure, OwnerPolicy
from fedauc.federation.run_plan import RunPlan, check_against_plan, hash_plan, read_plan
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site import ModelBuilder, Site, SiteLoader, answer_failure
from fedauc.federation.site_report import SiteReport
from fedauc.federation.site_settings import check_setting_names
from fedauc.federation.site_state import FolderSiteState, MissingSiteState, SiteRefusal, SiteState
from fedauc.federation.versions import find_version_problem
from fedauc.files import make_folder, write_atomically
from fedauc.locks import hold_lock

LOG = logging.getLogger("fedauc.site")

RULES = {
    "summarize": "disclosure.sums",
    "register": "class counts and shape of an admitted run",
    "visit": "upload of an admitted run",
    "unmask": "shares of a secure sum of an admitted run",
    "evaluate": "disclosure.scores",
    "deliver": "receipt of the model of an admitted run",
}
"""The rule under which an answer leaves, by the kind of message."""

UNKNOWN_KIND = "unknown kind of message"

PLAN_RULE = "the plan of the run"
"""The rule that refuses a message which asks for something else than the plan."""

MOST_PLANS = 32
"""Plans that a folder keeps beside those that the operator has decided about; a server sends a plan again."""

MOST_RUNS = 1000
"""Runs that a folder keeps beside those that have spent privacy; a server sends the plan of a run again."""

MOST_SCHEMAS = 5
"""Schemas that a table is compared with unless an operator approves the plan: each comparison tells something of it."""

LOCK_FILE, LOCK_SECONDS = ".runs.lock", 30.0


class SiteHome:
    """The files of a site's folder, apart from the log and the runs' states."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder, 0o700)
        self.folder = folder

    def propose_plan(self, document: Any) -> RunPlan:
        """Keep a plan that a server has proposed, if it can be read; the oldest undecided ones give way."""
        plan = read_plan(document)
        path = self._plan_path(plan.digest)
        if not path.is_file():
            make_folder(path.parent, 0o700)
            write_atomically(path, json.dumps(document, indent=2).encode(), is_private=True)
            decided = self.read_decisions()
            undecided = [file for file in path.parent.glob("*.json") if file.stem not in {*decided, plan.digest}]
            undecided.sort(key=lambda file: file.stat().st_mtime_ns)
            for file in undecided[: max(0, len(undecided) + 1 - MOST_PLANS)]:
                file.unlink(missing_ok=True)
        return plan

    def list_plans(self) -> list[str]:
        """The hash of every plan that was proposed, the latest last."""
        return sorted((path.stem for path in (self.folder / "plans").glob("*.json")), key=self.read_proposal_time)

    def read_proposal_time(self, digest: str) -> datetime.datetime:
        """When a plan was proposed first since it is kept here."""
        return datetime.datetime.fromtimestamp(self._plan_path(digest).stat().st_mtime, datetime.UTC)

    def read_plan(self, digest: str) -> RunPlan | None:
        """The plan with that hash, if it is here; a damaged file is named."""
        path = self._plan_path(digest)
        if not path.is_file():
            return None
        try:
            plan = read_plan(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError, SiteRefusal) as error:
            raise ValueError(
                f"{path} cannot be used ({error}); delete it, and the server sends the plan again"
            ) from error
        if plan.digest != digest:
            raise ValueError(f"{path} holds another plan than its name says; delete it, and the server sends it again")
        return plan

    def find_plan(self, beginning: str) -> str:
        """The hash of the plan that begins like that."""
        known = self.list_plans()
        matching = [digest for digest in known if digest.startswith(beginning)]
        if len(matching) != 1 or not beginning:
            listed = ", ".join(digest[:12] for digest in known) or "none"
            number = "no plan begins" if not matching else f"{len(matching)} plans begin"
            raise ValueError(f"plan is {beginning!r}; {number} like that: the plans proposed here are {listed}")
        return matching[0]

    def read_decisions(self) -> dict[str, Any]:
        """What the operator has decided, by the plan's hash."""
        return self._read_json("decisions.json")

    def find_decision(self, digest: str) -> str:
        """`approved`, `refused`, or an empty text."""
        return str(self.read_decisions().get(digest, {}).get("decision", ""))

    def decide(self, digest: str, decision: str, operator: str) -> None:
        """Approve or refuse a plan; the audit log says so."""
        entry = {"decision": decision, "operator": operator, "time": read_time()}
        with self._hold_lock():
            decisions = self.read_decisions()
            AuditLog(self.folder).append({"event": decision, "plan": digest, "operator": operator, "rule": "operator"})
            self._write_json("decisions.json", {**decisions, digest: entry})

    def read_runs(self) -> dict[str, Any]:
        """The admitted runs: their plan, and what those that have trained may spend of epsilon and delta."""
        return self._read_json("runs.json")

    def admit_run(self, run: str, plan: RunPlan, is_chosen: bool) -> None:
        """Remember which plan a run must follow; `is_chosen` is a plan that the operator or the policy names."""
        with self._hold_lock():
            runs, schema = self.read_runs(), plan.document["schema"]
            if run in runs:
                return
            self._note_fraction(plan.document.get("validation_fraction", 0.0), is_chosen)
            if schema is not None and not is_chosen:
                self._note_schema(schema)
            # Runs that have never trained go first: a server could propose many, to make a site forget another run.
            idle = [name for name, entry in runs.items() if not entry.get("epsilon")]
            idle.sort(key=lambda name: "cycle_length" in runs[name])
            for name in idle[: max(0, len(idle) + 1 - MOST_RUNS)]:
                del runs[name]
            self._write_json("runs.json", {**runs, run: {"plan": plan.digest, "admitted": read_time()}})

    def begin_training(self, run: str, cycle_length: int, recipe: Recipe, policy: OwnerPolicy) -> None:
        """Charge the budget of a run, and remember its rounds per cycle, before its first upload leaves."""
        if "cycle_length" in self.read_runs()[run]:
            return
        with self._hold_lock():
            runs = self.read_runs()
            entry = runs[run]
            check_cycle_length(entry, cycle_length)
            if "cycle_length" in entry:
                return
            budget = {}
            if recipe.epsilon is not None and math.isfinite(recipe.epsilon):
                policy.check_budget(recipe, sum_budgets(runs))
                budget = {"epsilon": recipe.epsilon, "delta": recipe.delta}
            self._write_json("runs.json", {**runs, run: {**entry, "cycle_length": cycle_length, **budget}})

    def _note_schema(self, schema: Any) -> None:
        """Count a schema that the table is compared with; one too many is refused."""
        digest, known = hash_plan(schema), self._read_json("schemas.json")
        if digest in known:
            return
        if len(known) >= MOST_SCHEMAS:
            raise SiteRefusal(
                f"this site has compared its table with {len(known)} schemas; its operator must approve the plan with "
                "another one (fedauc federation approve)",
                "a limited number of schemas without approval",
            )
        self._write_json("schemas.json", {**known, digest: {"compared": read_time()}})

    def _note_fraction(self, fraction: float, is_chosen: bool) -> None:
        """Keep which part of the rows is held out: sums over two parts that differ by a row would tell that row."""
        name, known = repr(float(fraction)), self._read_json("held_out.json")
        if name in known:
            return
        if known and not is_chosen:
            raise SiteRefusal(
                f"the plan holds out {fraction:g} of the training rows, and plans before it {', '.join(known)}; its "
                "operator must approve a plan with another part (fedauc federation approve)",
                "one validation fraction without approval",
            )
        self._write_json("held_out.json", {**known, name: {"admitted": read_time()}})

    def _plan_path(self, digest: str) -> Path:
        return self.folder / "plans" / f"{digest}.json"

    def _hold_lock(self) -> AbstractContextManager[bool]:
        path = self.folder / LOCK_FILE
        return hold_lock(path, f"{path} is held by process {{pid}}; wait until it ends", LOCK_SECONDS)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            stored: Any = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}); put a copy of it back") from error
        if not isinstance(stored, dict) or not all(isinstance(entry, dict) for entry in stored.values()):
            raise ValueError(f"{path} is damaged: it holds no table; put a copy of it back")
        return stored

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.folder / name, json.dumps(content, indent=2).encode(), is_private=True)


def sum_budgets(runs: Mapping[str, Any]) -> tuple[float, float]:
    """The epsilons and deltas of all runs that have trained, added up."""
    entries = runs.values()
    return sum(run.get("epsilon", 0.0) for run in entries), sum(run.get("delta", 0.0) for run in entries)


def check_cycle_length(entry: Mapping[str, Any], cycle_length: Any) -> None:
    """Refuse another number of rounds per cycle than in the first visit of a run: the length of its plan follows."""
    first = entry.get("cycle_length", cycle_length)
    if first != cycle_length:
        reason = f"the message says that a cycle has {cycle_length!r} rounds; before, the run had {first}"
        raise SiteRefusal(reason, PLAN_RULE)


class ControlledSite:
    """A site behind its owner's policy and log. `now` is the clock of the opening hours."""

    def __init__(
        self,
        site: Site,
        folder: Path,
        policy: OwnerPolicy,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._site, self._home, self._policy, self._now = site, SiteHome(folder), policy, now

    def answer_message(self, payload: Payload) -> Payload:
        """The answer to a message, if the policy allows one; it is in the log before this returns."""
        try:
            header = payload.read_header()
            rule, plan = self._check_message(header)
            answer = self._site.answer_planned_message(payload, plan)
            if header["kind"] == "visit":
                self._home.begin_training(header["run"], header["cycle_length"], plan.recipe, self._policy)
        except Exception as error:
            rule, answer = name_rule(error), answer_failure(error)
        return log_answer(self._home.folder, payload, answer, rule)

    def _check_message(self, header: Mapping[str, Any]) -> tuple[str, RunPlan]:
        """The rule that allows an answer, and the plan that it follows; raises a refusal where there is none."""
        run, kind = str(header.get("run", "")), str(header.get("kind", ""))
        if problem := find_version_problem(header, "the server", "this site"):
            raise SiteRefusal(problem, "message format")
        if not is_run_name(run):
            raise SiteRefusal(f"run is {run[:40]!r}; it must be letters and digits")
        if not self._policy.hours.is_open(self._now()):
            hours = ", ".join(self._policy.hours.open)
            reason = f"this site answers {hours} ({self._policy.hours.timezone})"
            raise SiteRefusal(reason, "hours.open", self._policy.hours.seconds_until_open(self._now()))
        admitted = self._home.read_runs().get(run)
        if "plan" in header:
            plan: RunPlan | None = self._home.propose_plan(header["plan"])
        else:
            plan = None if admitted is None else self._home.read_plan(admitted["plan"])
        if plan is None:
            # The server sends the plan with the next message, for example where this folder was lost.
            raise MissingSiteState("plan")
        # The operator may change the policy, or refuse the plan, while a run goes on.
        decision = self._home.find_decision(plan.digest)
        reason = self._policy.check_plan(plan, decision)
        try:
            check_against_plan(header, plan)
        except SiteRefusal as refusal:
            raise SiteRefusal(str(refusal), PLAN_RULE) from refusal
        if admitted is None:
            self._policy.check_budget(plan.recipe, sum_budgets(self._home.read_runs()))
            self._home.admit_run(run, plan, decision == "approved" or plan.digest in self._policy.runs.plans)
        elif admitted["plan"] != plan.digest:
            raise SiteRefusal("the run has changed its plan since this site admitted it", PLAN_RULE)
        elif "cycle_length" in header:
            check_cycle_length(admitted, header["cycle_length"])
        return f"{RULES.get(kind, UNKNOWN_KIND)}; {reason}", plan


def is_run_name(run: Any) -> bool:
    """Whether a message names its run with letters and digits, which a folder and a line of the log can be called."""
    return isinstance(run, str) and run.isascii() and run.isalnum() and len(run) <= 64


def name_rule(error: Exception) -> str:
    """Why an answer is a refusal, for the audit log, which also has the reason that the server is told."""
    if isinstance(error, MissingSiteState):
        return f"the {error} is missing"
    if isinstance(error, SiteRefusal):
        return f"refused by {error.rule}" if error.rule else "refused"
    return "refused after an error"


def log_answer(folder: Path, received: Payload, answer: Payload, rule: str) -> Payload:
    """The answer, once it is in the audit log of a site's folder; if it cannot be written there, a refusal instead."""
    try:
        header = received.read_header()
    except ValueError:
        header = {}
    try:
        AuditLog(folder).append(describe_message(header, received, answer, rule))
    except (OSError, ValueError) as error:
        # What is not in the log does not leave.
        LOG.error("the audit log cannot be written, so that the answer is withheld: %s", error)
        return pack_payload({"kind": "refusal", "reason": "this site cannot write its audit log; see its own log"})
    return answer


def describe_message(header: Mapping[str, Any], received: Payload, answer: Payload, rule: str) -> dict[str, Any]:
    """A line of the audit log: what was asked, what leaves, how many bytes, and under which rule."""
    sent = answer.read_header()
    content = {key: value for key, value in sent.items() if key not in ("kind", "layouts")}
    digest = hashlib.sha256(answer.header_text.encode())
    digest.update(answer.body_bytes())
    phase = header.get("phase")
    round = phase.get("round") if isinstance(phase, Mapping) else header.get("round")
    return {
        "event": "message",
        # The server's own words are not repeated: they could be anything.
        "run": header["run"] if is_run_name(header.get("run")) else "",
        "asked": header["kind"] if str(header.get("kind")) in RULES else UNKNOWN_KIND,
        "round": round if isinstance(round, int) else None,
        "sent": sent.get("kind"),
        # Names of fields and shapes of arrays; the values are identified by their hash.
        "fields": sorted(content),
        "arrays": {name: layouts for name, layouts in sent.get("layouts", {}).items() if layouts},
        "reason": sent.get("reason", ""),
        "bytes_received": len(received.header_text.encode()) + received.body.nbytes,
        "bytes_sent": len(answer.header_text.encode()) + answer.body.nbytes,
        "sha256": digest.hexdigest(),
        "rule": rule,
    }


def read_owner_policy(node_config: Mapping[str, Any]) -> OwnerPolicy:
    """The site's policy file; without one, what `share` and `share-auc` in the node's configuration say."""
    check_setting_names(node_config)
    disclosure, shared_settings = Disclosure(), [name for name in ("share", "share-auc") if name in node_config]
    if node_config.get("policy"):
        if shared_settings:
            remedy = "leave it out, and set disclosure in the policy file"
            raise ValueError(
                f"node-config has both policy and {shared_settings[0]}, of which only the policy would count: {remedy}"
            )
        return OwnerPolicy.read_toml(Path(str(node_config["policy"])))
    scores: Any = str(node_config.get("share", disclosure.scores))
    shares_auc = node_config.get("share-auc", disclosure.auc)
    if not isinstance(shares_auc, bool):
        raise ValueError(f"share-auc is {shares_auc!r}; it must be true or false, without quotes: correct node-config")
    return OwnerPolicy(disclosure=dataclasses.replace(disclosure, scores=scores, auc=shares_auc))


def open_controlled_site(
    node_config: Mapping[str, Any], load_data: SiteLoader, build_model: ModelBuilder | None = None
) -> ControlledSite:
    """The site that a node's configuration describes, with its state, log and reports in the folder `state`."""
    folder, policy = Path(str(node_config["state"])), read_owner_policy(node_config)

    def open_state(run: str) -> SiteState:
        return FolderSiteState(folder / run)

    site_policy, report = policy.to_site_policy(), SiteReport(folder)
    site = Site(load_data, open_state, site_policy, build_model, report=report, model_folder=folder / MODEL_FOLDER)
    return ControlledSite(site, folder, policy)


def answer_at_site(
    node_config: Mapping[str, Any], payload: Payload, load_data: SiteLoader, build_model: ModelBuilder | None = None
) -> Payload:
    """The answer of the site that a node's configuration describes; it is in the audit log before this returns.

    A site whose settings cannot be read, as where its policy file is missing, refuses every message.
    """
    try:
        site = open_controlled_site(node_config, load_data, build_model)
    except Exception as error:
        LOG.error("the site's settings cannot be read: %s", error)
        refusal = SiteRefusal("this site's settings cannot be read; see the site's log", "settings that cannot be read")
        return log_answer(Path(str(node_config["state"])), payload, answer_failure(refusal), name_rule(refusal))
    return site.answer_message(payload)
