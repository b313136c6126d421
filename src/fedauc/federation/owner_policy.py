"""What a site's owner allows, in a TOML file that stays at the site: runs, methods, disclosure, rows, privacy, hours.

A setting that the file leaves out has a default; the defaults together are what a site without a policy file allows.
"""

from __future__ import annotations

import datetime
import math
import re
import zoneinfo
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedauc.algorithms import find_methods
from fedauc.experiments.config import from_plain
from fedauc.experiments.recipe import Recipe
from fedauc.federation.run_plan import RunPlan
from fedauc.federation.site import SitePolicy
from fedauc.federation.site_state import SiteRefusal
from fedauc.federation.toml_files import read_toml_file
from fedauc.fields import check_fields, option

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

OPENING = re.compile(r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))? )?(?P<from>\d\d:[0-5]\d)-(?P<to>\d\d:[0-5]\d)")
"""Such as `mon-fri 19:00-07:00`, `sat 00:00-24:00` or `22:00-06:00`."""

MINUTES_PER_DAY = 24 * 60

PLAN_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class RunRules:
    """Which runs are answered."""

    approval: Literal["any", "listed", "required"] = option(
        "any", "any: every run; listed: plans in `plans`; required: plans in `plans`, or approved by the operator."
    )
    plans: tuple[str, ...] = option((), "The hashes of plans that may run.")

    def __post_init__(self) -> None:
        check_fields(self)
        for digest in self.plans:
            if not PLAN_HASH.fullmatch(digest):
                raise ValueError(
                    f"runs.plans holds {digest!r}; a hash has 64 characters, 0-9 and a-f: copy what `fedauc federation "
                    "plan` prints"
                )


@dataclass(frozen=True)
class MethodRules:
    """What may be trained; empty lists allow everything."""

    methods: tuple[str, ...] = option((), "Names of methods, such as cycp-minimax.")
    objectives: tuple[str, ...] = option((), "Names of objectives, such as minimax.")


@dataclass(frozen=True)
class Disclosure:
    """What may be sent beside uploads."""

    scores: Literal["nothing", "histograms", "scores"] = option("histograms", "What is sent about held-out scores.")
    auc: bool = option(False, "Whether the site's own AUC is sent.")
    sums: bool = option(True, "Whether sums of columns are sent before the first round.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RowRules:
    """From how many rows on a site uses a class, and sends a sum."""

    minimum_per_class: int = option(
        0,
        "The site takes no part where it has fewer rows of a class, but some; nor does it send a sum of fewer.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class PrivacyRules:
    """The privacy budget of all runs together; without one, runs need no guarantee."""

    epsilon: float | None = option(None, "Sum of the epsilons of all runs that the site trains in.", above=0)
    delta: float | None = option(None, "Sum of their deltas.", above=0, below=1)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epsilon is None and self.delta is not None:
            raise ValueError(
                f"privacy.delta is {self.delta!r} without privacy.epsilon, so that no budget holds: give both"
            )


@dataclass(frozen=True)
class OpeningHours:
    """When messages are answered; an empty list means always."""

    open: tuple[str, ...] = option((), "Such as 'mon-fri 19:00-07:00'.")
    timezone: str = option("UTC", "The time zone of the hours, such as Europe/Berlin.")

    def __post_init__(self) -> None:
        for text in self.open:
            _parse_opening(text)
        try:
            zoneinfo.ZoneInfo(self.timezone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"timezone is {self.timezone!r}; use a name such as 'Europe/Berlin' or 'UTC'") from None

    def is_open(self, now: datetime.datetime) -> bool:
        """Whether messages are answered at an instant, which has a time zone.

        >>> night = OpeningHours(("mon-fri 19:00-07:00",))
        >>> night.is_open(datetime.datetime(2026, 1, 3, 6, 59, tzinfo=datetime.UTC))  # Saturday, still Friday's night
        True
        >>> night.is_open(datetime.datetime(2026, 1, 3, 19, 0, tzinfo=datetime.UTC))
        False
        """
        local = now.astimezone(zoneinfo.ZoneInfo(self.timezone))
        day, minute = local.weekday(), 60 * local.hour + local.minute
        return not self.open or any(_covers(_parse_opening(text), day, minute) for text in self.open)

    def seconds_until_open(self, now: datetime.datetime) -> float:
        """How long messages are not answered from an instant on.

        >>> night = OpeningHours(("mon-fri 19:00-07:00",))
        >>> night.seconds_until_open(datetime.datetime(2026, 1, 5, 17, 30, 15, tzinfo=datetime.UTC))
        5385.0
        """
        moment = now
        while not self.is_open(moment):
            moment = moment.replace(second=0, microsecond=0) + datetime.timedelta(minutes=1)
        return (moment - now).total_seconds()


@dataclass(frozen=True)
class OwnerPolicy:
    """The policy file of a site."""

    runs: RunRules = RunRules()
    methods: MethodRules = MethodRules()
    disclosure: Disclosure = Disclosure()
    rows: RowRules = RowRules()
    privacy: PrivacyRules = PrivacyRules()
    hours: OpeningHours = OpeningHours()

    @staticmethod
    def read_toml(path: Path) -> OwnerPolicy:
        """Read a policy file."""
        data = read_toml_file(path, "policy", "`fedauc federation policy` writes one")
        policy: OwnerPolicy = from_plain(OwnerPolicy, data, str(path))
        return policy

    def to_site_policy(self) -> SitePolicy:
        """What concerns the content of answers."""
        shown = self.disclosure
        return SitePolicy(shown.scores, shown.auc, shown.sums, self.rows.minimum_per_class)

    def check_plan(self, plan: RunPlan, decision: str) -> str:
        """The rule that admits a plan; a plan that no rule admits is refused. `decision` is that of the operator."""
        method, objective, digest = plan.recipe.method, plan.recipe.algorithm.objective.name, plan.digest
        if decision == "refused":
            raise SiteRefusal(f"the operator of this site has refused plan {digest[:12]}", "decision of the operator")
        if self.methods.methods and method not in self.methods.methods:
            allowed = ", ".join(self.methods.methods)
            raise SiteRefusal(f"the plan's method is {method!r}; this site allows {allowed}", "methods.methods")
        if self.methods.methods and (problem := _find_other_part(plan.recipe)):
            reason = f"the plan is not what its method says: {method!r} does not have the {problem}"
            raise SiteRefusal(reason, "methods.methods")
        if self.methods.objectives and objective not in self.methods.objectives:
            allowed = ", ".join(self.methods.objectives)
            raise SiteRefusal(
                f"the plan's objective is {objective!r}; this site allows {allowed}", "methods.objectives"
            )
        if self.runs.approval == "any":
            return "runs.approval is any"
        if digest in self.runs.plans:
            return "runs.plans lists the plan"
        if self.runs.approval == "required" and decision == "approved":
            return "the operator approved the plan"
        if self.runs.approval == "required":
            reason = f"plan {digest[:12]} awaits approval at this site (fedauc federation approve)"
            raise SiteRefusal(reason, "runs.approval")
        raise SiteRefusal(f"plan {digest[:12]} is not among those that this site's policy lists", "runs.plans")

    def check_budget(self, recipe: Recipe, spent: tuple[float, float]) -> None:
        """Refuse a run whose guarantee is missing, or more than is left of the budget.

        A decoded recipe with an epsilon has what protects clients or rows, and its numbers are within their bounds.
        """
        if self.privacy.epsilon is None:
            return
        epsilon, delta = recipe.epsilon, recipe.delta
        if epsilon is None or not math.isfinite(epsilon):
            reason = "the plan has no privacy guarantee (epsilon); this site's policy asks for one"
            raise SiteRefusal(reason, "privacy.epsilon")
        left = self.privacy.epsilon - spent[0]
        if epsilon > left + 1e-9:
            reason = f"the plan needs epsilon {epsilon:g}; {max(0.0, left):g} is left of this site's budget"
            raise SiteRefusal(reason, "privacy.epsilon")
        if self.privacy.delta is not None and spent[1] + delta > self.privacy.delta * (1 + 1e-9):
            reason = f"the plan needs delta {delta:g}, more than is left of this site's budget"
            raise SiteRefusal(reason, "privacy.delta")


EXAMPLE_POLICY = """\
# What this site allows. Keep it at the site, and name it in --node-config: policy="/path/to/policy.toml".
[runs]
approval = "required"   # any, listed (only the plans below), or required (also what `fedauc federation approve` says)
plans = []              # hashes of plans, as `fedauc federation plan` prints them: 64 characters each

[methods]
methods = []            # names of methods; an empty list allows all
objectives = []         # names of objectives

[disclosure]
scores = "histograms"   # about held-out scores: nothing, histograms or scores
auc = false             # the site's own AUC
sums = true             # sums of columns, before the first round

[rows]
minimum_per_class = 10  # with fewer rows of a class, but some, the site takes no part; it sends no sum of fewer rows

[privacy]
# epsilon = 8.0         # budget of all runs in which this site trains; a run without a guarantee is then refused
# delta = 1e-5

[hours]
open = []               # such as ["mon-fri 19:00-07:00", "sat-sun 00:00-24:00"]; an empty list means always
timezone = "UTC"
"""


def _find_other_part(recipe: Recipe) -> str:
    """What a recipe has that its method does not have, such as another algorithm; empty if there is nothing.

    A method decides classes: its algorithm, and the objective or server optimizer that it brings along. Their numbers
    are settings.
    """
    method = find_methods().get(recipe.method)
    if method is None or type(recipe.algorithm) is not method.algorithm:
        return f"algorithm {recipe.algorithm.name!r}"
    for owner, settings in ((recipe.algorithm, method.parameters), (recipe, method.settings)):
        for field, value in settings:
            chosen = getattr(owner, field)
            if type(chosen) is not type(value):
                return f"{field} {getattr(chosen, 'name', chosen)!r}"
    return ""


def _parse_opening(text: str) -> tuple[int, int, int, int]:
    """The first and the last day, and the first minute and the one after the last; a night ends on the next day."""
    matched = OPENING.fullmatch(text.strip().lower())
    problem = f"hours.open holds {text!r}; write 'mon-fri 19:00-07:00', 'sat 00:00-24:00' or '22:00-06:00'"
    if matched is None or any(matched[name] not in (*DAYS, None) for name in ("first", "last")):
        raise ValueError(problem)
    first = DAYS.index(matched["first"]) if matched["first"] else 0
    last = DAYS.index(matched["last"]) if matched["last"] else first if matched["first"] else 6
    start, end = (60 * int(clock[:2]) + int(clock[3:]) for clock in (matched["from"], matched["to"]))
    if start >= MINUTES_PER_DAY or end > MINUTES_PER_DAY or start == end:
        raise ValueError(problem)
    return first, last, start, end


def _covers(opening: tuple[int, int, int, int], day: int, minute: int) -> bool:
    first, last, start, end = opening
    days = {(first + offset) % 7 for offset in range((last - first) % 7 + 1)}
    if start < end:
        return day in days and start <= minute < end
    return (day in days and minute >= start) or ((day - 1) % 7 in days and minute < end)
