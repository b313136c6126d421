"""Secure sums of a run: how large its cohorts are, how fine its integers can be, and how much noise clients add.

`prepare_secure_sum` is called once, before training, by the simulator and by the server of a federation alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fedauc.experiments.private_training import describe_raw_pool
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Schedule, ScoreHistogram
from fedauc.privacy.accounting import (
    PrivacyAccount,
    calibrate_gaussian_rdp,
    combine_multipliers,
    sum_discrete_noise,
)
from fedauc.privacy.discrete_noise import SAMPLER_ERROR, integer_sensitivity, noise_deviation
from fedauc.privacy.fixed_point import LARGEST_SUM
from fedauc.privacy.secure_sum import choose_threshold
from fedauc.stages import Plan
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.client_dp import HISTOGRAM_NORM, ClientDP, list_change_leaves
from fedauc.transforms.secure_sum import DEFAULT_LARGEST, ROUNDING_SLACK, SecureSum
from fedauc.trees import Tree, list_nodes, tree_leaves
from fedauc.uploads import UploadPipeline

MOST_BITS = 60
"""Bits after the binary point, at most; more would not help a float64."""


LARGEST_EPSILON = 600.0
"""Where exp(ε) would overflow soon."""

MARGIN = 1 - 1e-6
"""Share of ε to calibrate for, so that rounding in the account stays within the budget."""


MOST_ROUNDING = 1e-3
"""Share of the clipping norm that rounding to integers may add where the server adds the noise, which grows by it."""


class PrivateUploads(NamedTuple):
    """What happens to uploads, and what that costs; no account for a run that is not private."""

    uploads: UploadPipeline
    account: PrivacyAccount | None


class NoisedPart(NamedTuple):
    """A part of an upload that clients noise: its noise multiplier, its largest norm, and how many numbers it has."""

    multiplier: float
    norm: float
    dimension: int


def prepare_secure_sum(
    recipe: Recipe, private: PrivateUploads, schedule: Schedule, plan: Plan, shared: Tree
) -> PrivateUploads:
    """The uploads of a run with `secure-sum`, with its scale and noise, and the account of that noise.

    `private` is what `prepare_privacy` has made of the other transforms; without `secure-sum` it stays as it is.
    """
    uploads, account = private
    secure = find_secure_sum(recipe)
    if secure is None:
        return private
    client_dp = next((transform for transform in uploads.transforms if isinstance(transform, ClientDP)), None)
    check_secure_uploads(recipe, client_dp)
    smallest, largest = _measure_cohorts(schedule, plan)
    if smallest < secure.minimum_cohort:
        raise ValueError(
            f"a round has {smallest} clients; secure-sum needs {secure.minimum_cohort}, or the sum would show too much "
            "of one of them: make fewer groups, or take more clients per round"
        )
    survivors = choose_threshold(smallest, secure.threshold)
    honest = survivors - secure.colluding
    if honest < 1:
        raise ValueError(
            f"colluding is {secure.colluding}; it must be below {survivors}, the least clients of a sum: lower it, or "
            "raise the threshold"
        )
    cycles = plan.total_rounds // schedule.cycle_length
    error = measure_sampler_error(cycles, honest, shared)
    if client_dp is not None and secure.noise == "clients":
        client_dp = _calibrate_client_noise(recipe, client_dp, cycles, error)
    parts = list_noised_parts(secure, client_dp, shared)
    secret = uploads.secret if parts else None
    prepared = PreparedSecureSum.of(
        secure, largest=_choose_largest(secure, client_dp, shared), survivors=survivors, secret=secret
    )
    prepared = _choose_scale(prepared, parts, honest, largest)
    if isinstance(client_dp, NoisedClientDP) and not client_dp.is_unlimited:
        _check_rounding(client_dp, prepared, shared)
        client_dp = replace(client_dp, slack=1 + MOST_ROUNDING)
    others = [
        client_dp if client_dp is not None and isinstance(transform, ClientDP) else transform
        for transform in uploads.transforms[:-1]
    ]
    uploads = replace(uploads, transforms=(*others, prepared))
    if account is None or not parts:
        return PrivateUploads(uploads, account)
    account = replace(account, noise_multiplier=measure_joint_noise(parts, prepared, honest), sampler_error=error)
    spent = account.epsilon(cycles)
    if recipe.epsilon is not None and spent > recipe.epsilon:
        raise ValueError(
            f"epsilon is {recipe.epsilon:g}, but noise of so few integer steps costs {spent:.6g}: raise scale_bits"
        )
    return PrivateUploads(uploads, account)


def measure_sampler_error(cycles: int, honest: int, shared: Tree) -> float:
    """Total variation distance between all noise of a run as drawn and as the proof assumes it, at most."""
    # Whoever else has come adds noise too, which changes nothing: the proof needs that of the honest survivors alone.
    return SAMPLER_ERROR * cycles * honest * sum(leaf.numel() for leaf in tree_leaves(shared))


def measure_joint_noise(parts: list[NoisedPart], prepared: PreparedSecureSum, honest: int) -> float:
    """The noise multiplier that all parts of a sum have together, with the noise of so many clients."""
    multipliers = [
        sum_discrete_noise(deviation, honest, _sensitivity(part, prepared), part.dimension)
        for part, deviation in zip(parts, prepared.deviations, strict=False)
    ]
    return combine_multipliers(*multipliers)


def list_deviations(parts: list[NoisedPart], prepared: PreparedSecureSum, honest: int) -> list[float]:
    """The deviation in integer steps with which so many clients reach the noise multiplier of each part."""
    return [part.multiplier * _sensitivity(part, prepared) / math.sqrt(honest) for part in parts]


def _check_rounding(client_dp: ClientDP, prepared: PreparedSecureSum, shared: Tree) -> None:
    """Refuse integers so coarse that rounding enlarges a part of a clipped upload by more than a thousandth.

    Rounding adds at most √d / 2 steps; a trusted server's noise is a thousandth larger for that.
    """
    masses = [histogram.masses for histogram in list_nodes(shared, ScoreHistogram)]
    for norm, leaves in ((client_dp.clip, list_change_leaves(shared)), (HISTOGRAM_NORM, masses)):
        added = math.sqrt(sum(leaf.numel() for leaf in leaves)) / 2 / prepared.scale
        if added > MOST_ROUNDING * norm:
            raise ValueError(
                f"scale_bits is {prepared.scale_bits}; rounding could enlarge an upload of norm {norm:g} by "
                f"{added:.2g}, but the noise allows for {MOST_ROUNDING * norm:.2g}: raise scale_bits"
            )


def find_secure_sum(recipe: Recipe) -> SecureSum | None:
    """The transform that hides single uploads from the server, if a recipe has it."""
    return next((transform for transform in recipe.transforms if isinstance(transform, SecureSum)), None)


def check_secure_uploads(recipe: Recipe, client_dp: ClientDP | None) -> None:
    """Refuse what a secure sum cannot hide or hold."""
    algorithm = recipe.algorithm
    if algorithm.scoring_pass:
        pool, remedy = describe_raw_pool(algorithm)
        raise ValueError(
            f"{recipe.method} shares the raw scores of each client ({pool}), which a secure sum does not hide; use "
            f"{remedy}"
        )
    if client_dp is not None and client_dp.clip_quantile is not None:
        raise ValueError(
            f"clip_quantile is {client_dp.clip_quantile}; the integers of a secure sum need a norm that stays: leave "
            "clip_quantile out"
        )


def _calibrate_client_noise(recipe: Recipe, client_dp: ClientDP, cycles: int, error: float) -> ClientDP:
    """The noise multiplier for the budget, if there is one, where errors of the sampler take a part of δ."""
    if recipe.epsilon is None or math.isinf(recipe.epsilon):
        return client_dp
    rest = recipe.delta - (1 + math.exp(recipe.epsilon)) * error if recipe.epsilon < LARGEST_EPSILON else 0.0
    if rest <= 0:
        raise ValueError(
            f"epsilon is {recipe.epsilon:g}; at delta {recipe.delta:g} the rounding of clients' noise would cost more: "
            "lower epsilon, or raise delta"
        )
    return replace(client_dp, noise_multiplier=calibrate_gaussian_rdp(MARGIN * recipe.epsilon, rest, cycles))


def _measure_cohorts(schedule: Schedule, plan: Plan) -> tuple[int, int]:
    """The smallest number of clients that a round expects, and the largest that may come."""
    cohorts = [schedule.cohort(round).fix_denominator() for round in range(plan.total_rounds)]
    smallest = min(math.floor(cohort.expected_size or 0) for cohort in cohorts)
    return smallest, max(len(cohort.clients) + len(cohort.absent) for cohort in cohorts)


def list_noised_parts(secure: SecureSum, client_dp: ClientDP | None, shared: Tree) -> list[NoisedPart]:
    """The parts of an upload that clients noise: changes, then histograms; none where they add no noise."""
    if client_dp is None or secure.noise == "server" or not client_dp.noise_multiplier or client_dp.is_unlimited:
        return []
    masses = [histogram.masses for histogram in list_nodes(shared, ScoreHistogram)]
    multipliers = client_dp.divide_noise(bool(masses))
    dimension = sum(leaf.numel() for leaf in list_change_leaves(shared))
    parts = [NoisedPart(multipliers.model, client_dp.clip, dimension)]
    if masses:
        parts.append(NoisedPart(multipliers.pool, HISTOGRAM_NORM, sum(leaf.numel() for leaf in masses)))
    return parts


def _choose_largest(secure: SecureSum, client_dp: ClientDP | None, shared: Tree) -> float:
    """The largest number that an upload may hold: no number exceeds the norm, and no mass of a histogram 1."""
    if client_dp is None or client_dp.is_unlimited:
        return DEFAULT_LARGEST if secure.largest is None else secure.largest
    bound = max(client_dp.clip, 1.0 if list_nodes(shared, ScoreHistogram) else 0.0)
    if secure.largest is not None and secure.largest < bound:
        reason = "whether a client is refused would tell something of its upload"
        raise ValueError(
            f"largest is {secure.largest:g}; after client-dp it must be at least {bound:g}, or {reason}: leave it out"
        )
    return secure.largest or bound


def _choose_scale(prepared: PreparedSecureSum, parts: list[NoisedPart], honest: int, clients: int) -> PreparedSecureSum:
    """The transform with the finest integers of which the sum over the largest cohort fits 32 bits, and its noise."""
    for bits in _list_scale_bits(prepared, clients):
        scaled = replace(prepared, scale_bits=bits)
        change, histogram = [*list_deviations(parts, scaled, honest), 0.0, 0.0][:2]
        scaled = replace(scaled, deviations=(change, histogram))
        if scaled.capacity >= clients:
            for part in parts:
                # This refuses noise of less than half a step, of which the sum is no Gaussian any more.
                noise_deviation(part.multiplier, _sensitivity(part, scaled), honest)
            return scaled
    remedy = "lower scale_bits" if prepared.scale_bits else "lower largest, or take fewer clients per round"
    raise ValueError(
        f"a sum of {clients} clients with numbers up to {prepared.largest_number:g} does not fit 32 bits: {remedy}"
    )


def _list_scale_bits(prepared: PreparedSecureSum, clients: int) -> Iterator[int]:
    """The bits after the binary point to try, the finest first."""
    if prepared.scale_bits is not None:
        yield prepared.scale_bits
        return
    finest = math.floor(math.log2(LARGEST_SUM / (clients * prepared.largest_number)))
    yield from range(min(finest, MOST_BITS), -1, -1)


def _sensitivity(part: NoisedPart, scaled: PreparedSecureSum) -> float:
    """How much a client changes a part of the integer sum at most, as a Euclidean norm."""
    return integer_sensitivity(part.norm * ROUNDING_SLACK, scaled.scale, part.dimension)
