"""A site under its owner's control: every message passes the policy, and every answer is in the audit log before it
leaves.

The site's folder (`state` in --node-config) holds:

audit.jsonl, audit-head.json   what left the site, how many bytes, and under which rule
plans/HASH.json                plans that a server has proposed
decisions.json                 what the operator has approved or refused
runs.json                      runs that were admitted, with their plan and privacy budget
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedauc.federation.audit_log import AuditLog, read_time
from fedauc.federation.delivery import MODEL_FOLDER
from fedauc.federation.owner_policy import Disclosure, OwnerPolicy
from fedauc.federation.run_plan import check_against_plan, hash_plan
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site import ModelBuilder, Site, SiteLoader, refuse_after_error
from fedauc.federation.site_report import SiteReport
from fedauc.federation.site_state import FolderSiteState, MissingSiteState, SiteRefusal, SiteState
from fedauc.federation.versions import find_version_problem
from fedauc.files import make_folder, write_atomically

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


class SiteHome:
    """The files of a site's folder, apart from the log and the runs' states."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder = folder

    def propose_plan(self, plan: Mapping[str, Any]) -> str:
        """Keep a plan that a server has proposed, and return its hash."""
        digest = hash_plan(plan)
        path = self.folder / "plans" / f"{digest}.json"
        if not path.is_file():
            make_folder(path.parent)
            write_atomically(path, json.dumps(plan, indent=2).encode(), is_private=True)
        return digest

    def list_plans(self) -> dict[str, dict[str, Any]]:
        """Every plan that was proposed, by its hash."""
        return {path.stem: json.loads(path.read_text()) for path in sorted((self.folder / "plans").glob("*.json"))}

    def find_plan(self, beginning: str) -> str:
        """The hash of the plan that begins like that."""
        matching = [digest for digest in self.list_plans() if digest.startswith(beginning)]
        if len(matching) != 1 or not beginning:
            known = ", ".join(digest[:12] for digest in self.list_plans()) or "none"
            number = "no plan begins" if not matching else f"{len(matching)} plans begin"
            raise ValueError(f"plan is {beginning!r}; {number} like that: the plans proposed here are {known}")
        return matching[0]

    def read_decisions(self) -> dict[str, Any]:
        """What the operator has decided, by the plan's hash."""
        return self._read_json("decisions.json")

    def decide(self, digest: str, decision: str, operator: str) -> None:
        """Approve or refuse a plan; the audit log says so."""
        entry = {"decision": decision, "operator": operator, "time": read_time()}
        AuditLog(self.folder).append({"event": decision, "plan": digest, "operator": operator, "rule": "operator"})
        self._write_json("decisions.json", {**self.read_decisions(), digest: entry})

    def read_runs(self) -> dict[str, Any]:
        """The admitted runs: their plan, and the epsilon and delta that they may spend."""
        return self._read_json("runs.json")

    def admit_run(self, run: str, digest: str, plan: Mapping[str, Any]) -> None:
        """Remember which plan a run must follow."""
        recipe = plan["recipe"]
        budget = {"epsilon": recipe.get("epsilon") or 0.0, "delta": (recipe.get("delta") or 0.0)}
        budget = budget if recipe.get("epsilon") else {"epsilon": 0.0, "delta": 0.0}
        self._write_json("runs.json", {**self.read_runs(), run: {"plan": digest, "admitted": read_time(), **budget}})

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return stored

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.folder / name, json.dumps(content, indent=2).encode(), is_private=True)


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
        self._log = AuditLog(folder)

    def answer_message(self, payload: Payload) -> Payload:
        """The answer to a message, if the policy allows one; it is in the log before this returns."""
        header: dict[str, Any] = {}
        try:
            header = payload.read_header()
            rule = self._check_message(header)
        except SiteRefusal as refusal:
            LOG.warning("%s", refusal)
            rule = "refused by the site's policy"
            answer = pack_payload({"kind": "refusal", "reason": str(refusal)})
        except MissingSiteState as missing:
            rule, answer = "the plan is missing", pack_payload({"kind": "missing-state", "what": str(missing)})
        except Exception as error:
            rule, answer = "refused after an error", refuse_after_error(error)
        else:
            answer = self._site.answer_message(payload)
        try:
            self._log.append(describe_message(header, payload, answer, rule))
        except (OSError, ValueError) as error:
            # What is not in the log does not leave.
            LOG.error("the audit log cannot be written, so that the answer is withheld: %s", error)
            return pack_payload({"kind": "refusal", "reason": "this site cannot write its audit log; see its own log"})
        return answer

    def _check_message(self, header: Mapping[str, Any]) -> str:
        """The rule that allows an answer; raises a refusal where there is none."""
        run, kind = str(header.get("run", "")), str(header.get("kind", ""))
        if problem := find_version_problem(header, "the server", "this site"):
            raise SiteRefusal(problem)
        if not run.isalnum():
            raise SiteRefusal(f"run is {run[:40]!r}; it must be letters and digits")
        if not self._policy.hours.is_open(self._now()):
            hours = ", ".join(self._policy.hours.open)
            raise SiteRefusal(f"this site answers {hours} ({self._policy.hours.timezone})")
        admitted = self._home.read_runs().get(run)
        rule = RULES.get(kind, "unknown kind of message")
        if "plan" in header:
            digest = self._home.propose_plan(header["plan"])
            decision = self._home.read_decisions().get(digest, {}).get("decision", "")
            reason = self._policy.check_plan(header["plan"], digest, decision)
            check_against_plan(header, header["plan"])
            if admitted is not None and admitted["plan"] != digest:
                raise SiteRefusal("the run has changed its plan since this site admitted it")
            if admitted is None:
                self._policy.check_budget(header["plan"], self._sum_budgets())
                self._home.admit_run(run, digest, header["plan"])
            return f"{rule}; {reason}"
        if admitted is None:
            # The server sends the plan with the next message, for example where this folder was lost.
            raise MissingSiteState("plan")
        # The operator may change the policy, or refuse the plan, while a run goes on.
        plan = self._home.list_plans()[admitted["plan"]]
        decision = self._home.read_decisions().get(admitted["plan"], {}).get("decision", "")
        reason = self._policy.check_plan(plan, admitted["plan"], decision)
        check_against_plan(header, plan)
        return f"{rule}; {reason}"

    def _sum_budgets(self) -> tuple[float, float]:
        """The epsilons and deltas of all admitted runs, added up."""
        runs = self._home.read_runs().values()
        return sum(run["epsilon"] for run in runs), sum(run["delta"] for run in runs)


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
        "run": str(header.get("run", ""))[:64],
        "asked": str(header.get("kind", ""))[:40],
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
    if node_config.get("policy"):
        return OwnerPolicy.read_toml(Path(str(node_config["policy"])))
    shown = Disclosure()
    scores: Any = str(node_config.get("share", shown.scores))
    disclosure = dataclasses.replace(shown, scores=scores, auc=bool(node_config.get("share-auc", shown.auc)))
    return OwnerPolicy(disclosure=disclosure)


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
