"""What a run is going to do, in a form that a site can approve: a document, and its hash.

The plan holds all that a site contributes to: recipe, model, schema, what is asked about held-out scores, and which
part of the training rows is held out. Who takes part when is left out, because sites need not know it. A site that has
admitted a plan compares every visit with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedauc.experiments.config import to_plain
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.site_state import SiteRefusal
from fedauc.participation.full import Full

PLAN_FORMAT = 1

COMPLETED_ZEROS = ("prox",)
"""Numbers that a schedule replaces where the plan says 0; of the others only those that the plan leaves open change."""

BUDGETED = ("noise_multiplier",)
"""Numbers that the server computes from a budget, where the plan has one; never 0, which would be no noise."""

UNSENT_FIELDS = ("participation", "epsilon", "stop_at_epsilon", "engine", "device")
"""Fields of a recipe that no visit holds, or that the site decides."""

SENT_LEVELS = ("none", "histograms", "scores")


def describe_plan(agreement: FederationAgreement) -> dict[str, Any]:
    """The plan of a run."""
    recipe = dataclasses.replace(agreement.recipe, participation=Full(), engine="loop", device="cpu")
    return {
        "format": PLAN_FORMAT,
        "recipe": to_plain(recipe),
        "model": to_plain(agreement.model),
        "schema": None if agreement.schema is None else agreement.schema.to_header(),
        "evaluation": agreement.policy.evaluation,
        **describe_validation(agreement.policy.validation_fraction),
    }


def describe_validation(fraction: float) -> dict[str, float]:
    """What a plan and its messages say of validation rows: nothing where there are none, as before there were any."""
    return {"validation_fraction": fraction} if fraction else {}


def hash_plan(plan: Mapping[str, Any]) -> str:
    """The SHA-256 of a plan, whatever the order of its fields, and whether a number is written as 1 or as 1.0."""
    text = json.dumps(_shorten_numbers(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _shorten_numbers(value: Any) -> Any:
    """A plain value with whole numbers as integers, which a file may have turned into floats."""
    if isinstance(value, Mapping):
        return {name: _shorten_numbers(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_against_plan(header: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Refuse a message that asks for something else than the admitted plan."""
    if ("schema" in header or "model" in header) and header.get("schema") != plan.get("schema"):
        raise SiteRefusal("the message has another schema than the plan that this site has admitted")
    if "model" in header and header["model"] != plan["model"]:
        raise SiteRefusal("the message has another model than the plan that this site has admitted")
    requested = header.get("requested", "none")
    if requested not in SENT_LEVELS or SENT_LEVELS.index(requested) > SENT_LEVELS.index(plan["evaluation"]):
        raise SiteRefusal(f"the message asks for {requested!r}; the plan says {plan['evaluation']!r}")
    fraction, agreed = (read.get("validation_fraction", 0.0) for read in (header, plan))
    # The second exchange of a secure sum is about no rows.
    if fraction != agreed and header.get("kind") != "unmask":
        raise SiteRefusal(f"the message holds out {fraction!r} of the training rows; the plan says {agreed!r}")
    if "recipe" not in header:
        return
    planned, sent = plan["recipe"], header["recipe"]
    budgeted = BUDGETED if planned.get("epsilon") is not None else ()
    for name in sorted({*planned, *sent} - {*UNSENT_FIELDS}):
        if not _completes(sent.get(name), planned.get(name), name, budgeted):
            raise SiteRefusal(f"the message has another {name} than the plan that this site has admitted")


def _completes(sent: Any, planned: Any, name: str, budgeted: tuple[str, ...]) -> bool:
    """Whether a value is the planned one, or one that the server computes from class counts or from a budget."""
    if isinstance(planned, Mapping) and isinstance(sent, Mapping):
        pairs = ((sent[key], planned[key], key) for key in planned if key in sent)
        return planned.keys() == sent.keys() and all(_completes(*pair, budgeted) for pair in pairs)
    if isinstance(planned, list) and isinstance(sent, list):
        items = ((value, expected, name) for value, expected in zip(sent, planned, strict=False))
        return len(sent) == len(planned) and all(_completes(*item, budgeted) for item in items)
    if name in budgeted:
        return isinstance(sent, float | int) and sent > 0
    return bool(sent == planned or planned is None or (name in COMPLETED_ZEROS and planned == 0))
