"""What a run is going to do, in a form that a site can approve: a document, and its hash.

The plan holds all that a site contributes to: recipe, model, schema, what is asked about held-out scores, which part of
the training rows is held out, and how often a site is visited. Who takes part in which round is left out, because sites
need not know it. A site decodes the plan when it admits a run, and then compares every message with what it implies.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedauc.discovery import UnknownName
from fedauc.experiments.assembly import complete_algorithm, plan_rounds
from fedauc.experiments.config import from_plain, to_plain
from fedauc.experiments.private_training import (
    check_client_noise,
    check_guarantee,
    find_client_dp,
    find_sampling,
    has_client_noise,
    visits_once_per_cycle,
)
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import check_secure_uploads, find_secure_sum
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.schema import DataSchema
from fedauc.federation.site_state import SiteRefusal
from fedauc.federation.visit_messages import phase_to_json
from fedauc.files import DAMAGE_ERRORS
from fedauc.interfaces import Algorithm, Phase
from fedauc.models.model import ModelConfig
from fedauc.participation.full import Full
from fedauc.plugins import VARIABLE
from fedauc.stages import Plan, Theory
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers.example_dp import ExampleDP

PLAN_FORMAT = 2

MAX_PLAN_LENGTH = 1 << 18
"""Longest plan, in characters; a plan for a table of a hundred columns has some twenty thousand."""

MAX_PER_ROUND = 1000
"""Clients per round up to which a site looks for the stages of the theorem's schedule, which depend on that number."""

COMPUTED_FIELDS: Mapping[type, tuple[str, ...]] = {
    ClientDP: ("noise_multiplier", "bands"),
    SecureSum: ("largest", "scale_bits"),
}
"""Numbers of a transform that the server computes before the first round, where the plan has none."""

UNCOMPARED_FIELDS = ("participation", "engine", "device")
"""Fields of a recipe that no visit holds, or that the site decides."""

SENT_LEVELS = ("none", "histograms", "scores")


@dataclass(frozen=True)
class RunPlan:
    """A plan as a site understands it.

    `once_per_cycle` says that no site is visited twice in a cycle. `sampling` is the probability with which a site
    takes part in its turn, where the guarantee of the run counts on that.
    """

    document: Mapping[str, Any]
    recipe: Recipe
    once_per_cycle: bool
    sampling: float

    @functools.cached_property
    def digest(self) -> str:
        """The hash of the plan."""
        return hash_plan(self.document)

    def plan_rounds(self, cycle_length: Any, round: Any, phase: Any = None) -> Plan:
        """The phases of the run, whose round and phase a message names; those of another plan are refused."""
        return next(self.fit_rounds(cycle_length, round, phase))

    def fit_rounds(self, cycle_length: Any, round: Any, phase: Any = None) -> Iterator[Plan]:
        """All phases that the run may have, given its round and phase: of all rules for stages only the theorem's
        depends on the clients per round, which a site does not know.
        """
        if type(cycle_length) is not int or cycle_length < 1:
            raise SiteRefusal(f"the message says that a cycle has {cycle_length!r} rounds; it must be a count")
        rounds = plan_rounds(self.recipe, cycle_length, 1)
        if type(round) is not int or not 0 <= round < rounds.total_rounds:
            raise SiteRefusal(f"the message is of round {round!r}; the plan has {rounds.total_rounds}")
        is_fitting = phase is None or _is_same(phase, rounds.phase(round))
        if is_fitting:
            yield rounds
        for per_round in range(2, MAX_PER_ROUND + 1) if isinstance(self.recipe.stages, Theory) else ():
            rounds = plan_rounds(self.recipe, cycle_length, per_round)
            if phase is None or _is_same(phase, rounds.phase(round)):
                is_fitting = True
                yield rounds
        if not is_fitting:
            name = _find_difference(phase_to_json(rounds.phase(round)), phase) or "phase"
            raise SiteRefusal(f"the visit has another {name} than round {round} of the plan")


def _is_same(phase: Any, planned: Phase) -> bool:
    # As text, because True would equal 1.
    return json.dumps(phase, sort_keys=True) == json.dumps(phase_to_json(planned), sort_keys=True)


def describe_plan(agreement: FederationAgreement) -> dict[str, Any]:
    """The plan of a run."""
    recipe = agreement.recipe
    return _write_plan(
        recipe=dataclasses.replace(recipe, participation=Full()),
        model=agreement.model,
        schema=agreement.schema,
        evaluation=agreement.policy.evaluation,
        once_per_cycle=visits_once_per_cycle(recipe.participation),
        sampling=find_sampling(recipe) if find_client_dp(recipe) is not None else 1.0,
        validation_fraction=agreement.policy.validation_fraction,
    )


def _write_plan(
    recipe: Recipe,
    model: ModelConfig,
    schema: DataSchema | None,
    evaluation: str,
    once_per_cycle: bool,
    sampling: float,
    validation_fraction: float,
) -> dict[str, Any]:
    return {
        "format": PLAN_FORMAT,
        "recipe": to_plain(dataclasses.replace(recipe, engine="loop", device="cpu")),
        "model": to_plain(model),
        "schema": None if schema is None else schema.to_header(),
        "evaluation": evaluation,
        "once_per_cycle": once_per_cycle,
        "sampling": sampling,
        **describe_validation(validation_fraction),
    }


def describe_validation(fraction: float) -> dict[str, float]:
    """What a plan and its messages say of validation rows: nothing where there are none, as before there were any."""
    return {"validation_fraction": fraction} if fraction else {}


def read_plan(document: Any) -> RunPlan:
    """Decode a plan that a server has proposed; one that leaves anything open, or cannot be kept, is refused."""
    try:
        length = len(json.dumps(document))
        if length > MAX_PLAN_LENGTH:
            raise ValueError(f"it has {length} characters; at most {MAX_PLAN_LENGTH} are accepted")
        recipe: Recipe = from_plain(Recipe, document["recipe"], "recipe")
        evaluation, once, sampling = document["evaluation"], document["once_per_cycle"], document["sampling"]
        _check_recipe(recipe)
        if evaluation not in SENT_LEVELS or type(once) is not bool:
            raise ValueError(f"evaluation is {evaluation!r} and once_per_cycle is {once!r}")
        is_amplified = find_client_dp(recipe) is not None and find_secure_sum(recipe) is None
        if type(sampling) not in (int, float) or not 0 < sampling <= 1 or (sampling < 1 and not is_amplified):
            raise ValueError(
                f"sampling is {sampling!r}; it must be 1, or above 0 where draws of clients amplify privacy"
            )
        if find_client_dp(recipe) is not None and evaluation != "none":
            raise ValueError(f"evaluation is {evaluation!r}, and scores of a private run are not noised")
        fraction = document.get("validation_fraction", 0.0)
        if type(fraction) not in (int, float) or not 0 <= fraction < 1:
            raise ValueError(f"validation_fraction is {fraction!r}; it must be at least 0 and below 1")
        if fraction and (evaluation == "none" or recipe.is_private):
            raise ValueError(f"validation_fraction is {fraction!r}, but the run evaluates nothing, or is private")
        schema = None if document["schema"] is None else DataSchema.from_header(document["schema"])
        model = from_plain(ModelConfig, document["model"], "model")
        written = _write_plan(recipe, model, schema, evaluation, once, sampling, fraction)
    except UnknownName as error:
        raise SiteRefusal(f"{error}; install the plug-in that has it at this site, or name it in {VARIABLE}") from error
    except (ValueError, *DAMAGE_ERRORS) as error:
        reason = " ".join(f"{error}".split())[:300] if isinstance(error, ValueError) else type(error).__name__
        raise SiteRefusal(f"the plan cannot be read: {reason}") from error
    # A setting that the plan leaves out would be open, and one that this version does not know could mean anything.
    if hash_plan(written) != hash_plan(document):
        raise SiteRefusal(f"the plan has another {_find_difference(written, document)} than this version would write")
    return RunPlan(document, recipe, once, float(sampling))


def _check_recipe(recipe: Recipe) -> None:
    """Refuse what a run would refuse whose clients protect themselves, as far as a site can tell."""
    if not recipe.method.isprintable() or len(recipe.method) > 100:
        raise ValueError(f"method is {recipe.method[:100]!r}; it must be a name")
    client_dp = find_client_dp(recipe)
    if client_dp is not None:
        check_guarantee(recipe, recipe.algorithm, clients=1, has_buffers=False)
    if has_client_noise(recipe):
        check_client_noise(recipe)
        check_secure_uploads(recipe, client_dp)


def _find_difference(written: Any, document: Any) -> str:
    """Where a plan differs from the one that this version would write, such as `recipe.epsilon`."""
    if isinstance(written, Mapping) and isinstance(document, Mapping):
        for name in sorted({*written, *document}, key=str):
            if name not in written or name not in document or hash_plan(written[name]) != hash_plan(document[name]):
                inner = _find_difference(written.get(name), document.get(name))
                return f"{str(name)[:40]!r}"[1:-1] + (f".{inner}" if inner else "")
    return ""


def hash_plan(plan: Any) -> str:
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


# ------------------------------------------------------------------------------------- messages of an admitted run


def check_against_plan(header: Mapping[str, Any], plan: RunPlan) -> None:
    """Refuse a message that asks for something else than the admitted plan.

    Shares of a secure sum are not part of a plan: a site reveals them for the session that it has answered.
    """
    kind = str(header.get("kind"))
    if kind == "unmask":
        return
    fraction, agreed = (said.get("validation_fraction", 0.0) for said in (header, plan.document))
    if fraction != agreed:
        raise SiteRefusal(f"the message holds out {fraction!r} of the training rows; the plan says {agreed!r}")
    if header.get("schema") != plan.document["schema"]:
        raise SiteRefusal("the message has another schema than the plan that this site has admitted")
    if (check := CHECKS.get(kind)) is not None:
        check(header, plan)


def _check_summary(header: Mapping[str, Any], plan: RunPlan) -> None:
    if header.get("asks_sums") and plan.recipe.is_private:
        raise SiteRefusal("the message asks for sums of columns, which are exact; the plan is that of a private run")


def _check_registration(header: Mapping[str, Any], plan: RunPlan) -> None:
    implied = {"hides_counts": has_client_noise(plan.recipe), "secure_sum": find_secure_sum(plan.recipe) is not None}
    for name, expected in implied.items():
        if header.get(name) is not expected:
            raise SiteRefusal(f"the message has {name} {header.get(name)!r}; the plan implies {expected}")


def _check_training(header: Mapping[str, Any], plan: RunPlan) -> None:
    """What all messages that hold a recipe have in common."""
    if header.get("model") != plan.document["model"]:
        raise SiteRefusal("the message has another model than the plan that this site has admitted")
    sent: Recipe = from_plain(Recipe, {**header["recipe"], "engine": "loop", "device": "cpu"}, "recipe")
    planned, described = _complete_recipe(plan.recipe, sent, header["class_totals"]), to_plain(sent)
    for name in planned:
        if name not in UNCOMPARED_FIELDS and described[name] != planned[name]:
            raise SiteRefusal(f"the message has another {name} than the plan that this site has admitted")


def _check_visit(header: Mapping[str, Any], plan: RunPlan) -> None:
    _check_training(header, plan)
    phase = header["phase"]
    plan.plan_rounds(header.get("cycle_length"), phase["round"], phase)


def _check_evaluation(header: Mapping[str, Any], plan: RunPlan) -> None:
    _check_training(header, plan)
    plan.plan_rounds(header.get("cycle_length"), header.get("round"))
    requested = header.get("requested")
    if requested not in SENT_LEVELS or SENT_LEVELS.index(requested) > SENT_LEVELS.index(plan.document["evaluation"]):
        raise SiteRefusal(f"the message asks for {requested!r}; the plan says {plan.document['evaluation']!r}")


CHECKS: Mapping[str, Callable[[Mapping[str, Any], RunPlan], None]] = {
    "summarize": _check_summary,
    "register": _check_registration,
    "visit": _check_visit,
    "evaluate": _check_evaluation,
    "deliver": _check_training,
}
"""What a message must have in common with the plan beside the schema, by its kind."""


def _complete_recipe(planned: Recipe, sent: Recipe, class_totals: Any) -> dict[str, Any]:
    """The recipe that a message must hold: the planned one, with the numbers that the server computes for the run.

    A proximal weight and a class prior follow from the plan and from the class totals. Noise and scales are taken from
    the message: `planned_noise.py` compares them with the plan's promise.
    """
    completed: dict[str, Any] = to_plain(planned) | {
        "algorithm": to_plain(_complete_algorithm(planned, class_totals)),
        "wrappers": _complete_members(planned.wrappers, sent.wrappers, planned),
        "transforms": _complete_members(planned.transforms, sent.transforms, planned),
        "epsilon": None,
        "stop_at_epsilon": None,
    }
    return completed


def _complete_algorithm(planned: Recipe, class_totals: Any) -> Algorithm:
    # A private run sends no rows; its algorithm needs none.
    rows = class_totals[3] if len(class_totals) == 4 else (0, 0)
    return complete_algorithm(planned, *map(int, rows))


def _complete_members(planned: tuple[Any, ...], sent: tuple[Any, ...], recipe: Recipe) -> Any:
    if [type(member) for member in planned] != [type(member) for member in sent]:
        return to_plain(planned)
    return to_plain(tuple(_complete_member(*pair, recipe) for pair in zip(planned, sent, strict=True)))


def _complete_member(planned: Any, sent: Any, recipe: Recipe) -> Any:
    computed = [name for name in COMPUTED_FIELDS.get(type(planned), ()) if getattr(planned, name) is None]
    if isinstance(planned, ExampleDP) and recipe.epsilon is not None:
        computed = ["noise_multiplier"]
    changes = {name: getattr(sent, name) for name in computed}
    if isinstance(planned, ClientDP) and recipe.epsilon == math.inf:
        changes["clip"] = math.inf
    return dataclasses.replace(planned, **changes)
