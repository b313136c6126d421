"""Whether the noise that a visit asks a site for keeps what the plan of the run promises.

The server computes the noise of a run from its budget and says how much it is. A site does not take its word: it
accounts for all visits that the plan may bring, with the numbers of the message and its own class counts. Noise that
the server itself adds is compared as well, but nobody can see whether it adds it: that server is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.private_training import find_client_dp, has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import (
    list_deviations,
    list_noised_parts,
    measure_joint_noise,
    measure_sampler_error,
)
from fedauc.federation.run_plan import RunPlan
from fedauc.federation.site_state import SiteRefusal
from fedauc.interfaces import Census
from fedauc.privacy.accounting import PrivacyAccount
from fedauc.privacy.example_accounting import example_account
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.client_dp import ClientDP
from fedauc.trees import Tree
from fedauc.wrappers.example_dp import ExampleDP

TOLERANCE = 1e-6
"""Share by which rounding may differ between server and site."""


class Noise(NamedTuple):
    """The noise multiplier of a visit, and the error with which it is drawn, summed over all visits."""

    multiplier: float
    error: float = 0.0


def check_planned_noise(
    plan: RunPlan,
    header: Mapping[str, Any],
    recipe: Recipe,
    secure: PreparedSecureSum | None,
    shared: Tree,
    class_counts: tuple[int, int],
) -> None:
    """Refuse a visit with less noise than the plan needs.

    `recipe` is that of the visit, `secure` its secure sum, and `shared` the state that clients change. The recipe has
    been compared with the plan, so that a multiplier which the plan gives is the one in the recipe.
    """
    planned, client_dp = plan.recipe, find_client_dp(recipe)
    promises_nothing = planned.epsilon is None and client_dp is not None and not client_dp.noise_multiplier
    if not planned.is_private or planned.epsilon == math.inf or promises_nothing:
        return
    rounds = plan.plan_rounds(header["cycle_length"], header["phase"]["round"], header["phase"])
    visits = rounds.total_rounds // (header["cycle_length"] if plan.once_per_cycle else 1)
    at_sites = has_client_noise(planned)
    if at_sites:
        assert client_dp is not None
        assert secure is not None
        noise = _measure_noise_of_sums(client_dp, secure, shared, visits, has_budget=planned.epsilon is not None)
    elif client_dp is not None:
        noise = Noise(client_dp.noise_multiplier or 0.0)
    else:
        fitting = plan.fit_rounds(header["cycle_length"], header["phase"]["round"], header["phase"])
        local_steps = {tuple(stage.local_steps for stage in known.stages) for known in fitting}
        # Any of the plans may be the run's; each visit has at least the noise of its own plan's worst one.
        noise = Noise(max(_measure_noise_of_steps(recipe, steps, class_counts) for steps in local_steps))
    if planned.epsilon is None:
        return
    account = PrivacyAccount(
        delta=planned.delta,
        noise_multiplier=noise.multiplier,
        sampling=plan.sampling,
        accountant="rdp" if at_sites else "exact",
        sampler_error=noise.error,
    )
    # Hardly any noise has an epsilon beyond all numbers.
    with np.errstate(all="ignore"):
        spent = account.epsilon(visits)
    if not spent <= planned.epsilon * (1 + TOLERANCE):
        promise = f"epsilon is {spent:.4g} after {visits} visits, and the plan promises {planned.epsilon:g}"
        raise SiteRefusal(f"the visit has too little noise: with it {promise}")


def _measure_noise_of_sums(
    client_dp: ClientDP, secure: PreparedSecureSum, shared: Tree, visits: int, has_budget: bool
) -> Noise:
    """The noise of a sum to which every site adds the deviations of the message."""
    honest = secure.survivors - secure.colluding
    parts = list_noised_parts(secure, client_dp, shared)
    needed = list_deviations(parts, secure, max(honest, 1))
    # Where the plan has a budget, the multiplier in the recipe is the server's, and the budget decides.
    is_enough = has_budget or all(
        deviation >= least * (1 - TOLERANCE) for deviation, least in zip(secure.deviations, needed, strict=False)
    )
    try:
        if honest < 1 or not parts or not is_enough:
            raise ValueError("the noise of the honest survivors is below that of the plan")
        # This refuses deviations of less than half a step.
        multiplier = measure_joint_noise(parts, secure, honest)
    except ValueError as error:
        described = f"deviations {list(secure.deviations)} at {secure.survivors} survivors"
        raise SiteRefusal(
            f"the visit has too little noise: {described}, of whom {secure.colluding} may collude"
        ) from error
    return Noise(multiplier, measure_sampler_error(visits, honest, shared))


def _measure_noise_of_steps(recipe: Recipe, local_steps: Iterable[int], class_counts: tuple[int, int]) -> float:
    """The noise multiplier of the visit that tells most about a row of this site, given the stages' local steps."""
    wrapper = next(member for member in recipe.wrappers if isinstance(member, ExampleDP))
    census, kind = Census(*(np.array([count]) for count in class_counts)), recipe.algorithm.objective.batch_kind
    return min(
        example_account(census, recipe.batch, steps, kind, wrapper.noise_multiplier).worst_multiplier
        for steps in local_steps
    )
