"""Differential privacy of a run: what its guarantee covers, how much noise it needs, and what it has spent.

`prepare_privacy` is called once, before training. It refuses what the proof does not cover, calibrates the noise to the
budget, and opens the account. From then on ε is a function of the rounds that are done, so that a resumed run neither
forgets what was spent nor spends it twice: its rounds repeat with the same noise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from fedauc.algorithms.logit_adjusted import LogitAdjustedFedAvg
from fedauc.algorithms.pairwise import Pairwise
from fedauc.class_totals import ClassTotalsEstimate
from fedauc.experiments.private_evaluation import PlannedReleases, count_evaluations
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Algorithm, Participation, Schedule, Setting, UploadTransform, Wrapper
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.full import Full
from fedauc.participation.trace import Trace
from fedauc.participation.uniform import Uniform
from fedauc.privacy.accounting import PrivacyAccount, calibrate_gaussian_rdp, calibrate_noise
from fedauc.privacy.banded_noise import optimize_bands
from fedauc.privacy.example_accounting import example_account
from fedauc.privacy.statistics import noised_class_totals
from fedauc.random_tensors import KeyedNoise, NoiseSource, SecretNoise
from fedauc.stages import Plan
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.secure_sum import SecureSum
from fedauc.transforms.weighted_mean import WeightedMean
from fedauc.uploads import UploadPipeline
from fedauc.wrappers.example_dp import ExampleDP

COUNTS, STANDARDIZATION = "class counts", "standardisation"
"""The names of the releases before training in the account."""


class PrivateParts(NamedTuple):
    """What a private run is made of: its uploads, its account, and the setting that its clients work with."""

    uploads: UploadPipeline
    account: PrivacyAccount
    setting: Setting


def prepare_privacy(
    recipe: Recipe,
    algorithm: Algorithm,
    schedule: Schedule,
    plan: Plan,
    setting: Setting,
    has_buffers: bool,
    secret: bytes | None = None,
    releases: PlannedReleases | None = None,
) -> PrivateParts | None:
    """The parts of a run with `client-dp`; None for a run without.

    `releases` is what the caller releases besides. Who gives none must not be asked for private evaluation or private
    standardisation: then the account would promise what nobody does.
    """
    transform = find_client_dp(recipe)
    if transform is None:
        return None
    check_guarantee(recipe, algorithm, setting.client_count, has_buffers)
    cycles = plan.total_rounds // schedule.cycle_length
    at_clients = has_client_noise(recipe)
    if at_clients:
        check_client_noise(recipe)
    sampling = find_sampling(recipe)
    bands = transform.bands or (1 if at_clients else schedule.cycle_length)
    if bands > schedule.cycle_length:
        raise ValueError(
            f"bands is {bands}, but a cycle has {schedule.cycle_length} rounds; a client's noise would overlap with "
            f"that of its next turn: use at most {schedule.cycle_length}"
        )
    check_releases(recipe, transform, releases)
    single = single_noise(recipe, transform, cycles, sampling)
    one_off = _plan_one_off(recipe, transform, single)
    evaluations, evaluation_noise = 0, None
    if recipe.private_evaluation:
        assert releases is not None
        evaluations = count_evaluations(plan, releases.evaluate_every)
        # All evaluations together have the share, so that each has the part 1 / evaluations of it.
        evaluation_noise = single * math.sqrt(evaluations / transform.evaluation_share)
    noise_multiplier = transform.noise_multiplier
    if noise_multiplier is None:
        assert recipe.epsilon is not None
        if at_clients:
            # `prepare_secure_sum` adds what the errors of the sampler cost.
            noise_multiplier = calibrate_gaussian_rdp(recipe.epsilon, recipe.delta, cycles)
        else:
            noise_multiplier = calibrate_noise(
                recipe.epsilon, recipe.delta, cycles, sampling, one_off, evaluations, evaluation_noise
            )
    clip = math.inf if recipe.epsilon == math.inf else transform.clip
    transform = replace(transform, noise_multiplier=noise_multiplier, bands=bands, clip=clip)
    noised: ClientDP = transform
    if not at_clients:
        coefficients = tuple(optimize_bands(plan.total_rounds, bands).tolist())
        noised = NoisedClientDP.of(transform, coefficients, _has_histogram(algorithm))
    account = PrivacyAccount(
        delta=recipe.delta,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        one_off=one_off,
        evaluation_noise=evaluation_noise,
        turn_interval=schedule.cycle_length,
        accountant="rdp" if at_clients else "exact",
    )
    _check_stop(recipe, account)
    transforms = tuple(noised if isinstance(member, ClientDP) else member for member in recipe.transforms)
    uploads = replace(recipe.uploads, transforms=transforms, secret=secret)
    totals = _release_class_totals(setting, transform, dict(one_off), make_one_off_noise(recipe.seed, secret, COUNTS))
    return PrivateParts(uploads, account, replace(setting, totals=totals))


def find_client_dp(recipe: Recipe) -> ClientDP | None:
    """The transform that makes a recipe private for clients, if it has one."""
    return next((transform for transform in recipe.transforms if isinstance(transform, ClientDP)), None)


def has_client_noise(recipe: Recipe) -> bool:
    """Whether clients add the noise of a private run themselves, so that the server need not be trusted."""
    sums = [transform for transform in recipe.transforms if isinstance(transform, SecureSum)]
    return find_client_dp(recipe) is not None and any(transform.noise == "clients" for transform in sums)


def find_sampling(recipe: Recipe) -> float:
    """The probability with which a client takes part in its turn, where that amplifies the privacy of a run; or 1.

    A server that sees the sums of clients' noise also sees who takes part, so that draws do not amplify. Nor do they
    where a trusted server sums securely: a draw of too few clients is skipped, so that whether one client was drawn
    may decide whether the uploads of the others count.
    """
    participation = recipe.participation
    sums_securely = any(isinstance(member, SecureSum) for member in recipe.transforms)
    return participation.rate if isinstance(participation, CyclicPoisson) and not sums_securely else 1.0


def visits_once_per_cycle(participation: Participation) -> bool:
    """Whether no client is visited twice in a cycle; under other participations it may be visited in every round."""
    if isinstance(participation, Trace) and participation.schedule is not None:
        participation = participation.schedule
    # The classes themselves: one that extends them may draw clients in another way.
    return type(participation) in (Cyclic, CyclicPoisson, Full)


def check_guarantee(recipe: Recipe, algorithm: Algorithm, clients: int, has_buffers: bool) -> None:
    """Refuse a recipe that the proof of `fedauc.privacy.accounting` does not cover, and say why."""
    _check_participation(recipe.participation)
    if recipe.dtype not in ("float32", "float64"):
        raise ValueError(
            f"dtype is {recipe.dtype!r}, whose rounding can enlarge a clipped upload by up to 1 %; use float32 or "
            "float64"
        )
    if algorithm.scoring_pass:
        pool, remedy = describe_raw_pool(algorithm)
        raise ValueError(
            f"{recipe.method} shares the raw scores of rows ({pool}), which noise on the model does not protect; use "
            f"{remedy}"
        )
    if type(recipe.mean) is not WeightedMean:
        raise ValueError(
            f"mean is {recipe.mean.name!r}; the effect of one client on it has no bound that is known: use weighted"
        )
    # A secure sum changes numbers by rounding alone, which `prepare_secure_sum` counts.
    names = [transform.name for transform in recipe.transforms if not isinstance(transform, SecureSum)]
    later = names[names.index(ClientDP.name) + 1 :]
    if later:
        raise ValueError(
            f"transforms lists {later[0]!r} after {ClientDP.name!r}, where it could enlarge what was clipped: leave "
            f"{later[0]!r} out"
        )
    earlier = [transform for transform in recipe.transforms if not isinstance(transform, ClientDP | SecureSum)]
    decoding = [transform.name for transform in earlier if type(transform).decode is not UploadTransform.decode]
    if decoding:
        raise ValueError(
            f"transforms lists {decoding[0]!r}, which changes uploads again at the server, after {ClientDP.name!r} has "
            f"clipped them: leave {decoding[0]!r} out"
        )
    if has_buffers:
        raise ValueError(
            "the model has buffers, such as BatchNorm statistics, whose changes would fill the clipping norm; use a "
            "model with GroupNorm or LayerNorm"
        )
    if not recipe.delta < 1 / clients:
        raise ValueError(
            f"delta is {recipe.delta:g}; with {clients} clients it must be below 1/{clients} = {1 / clients:.2g}, or "
            "publishing a client at random would count as private: lower delta"
        )


def describe_raw_pool(algorithm: Algorithm) -> tuple[str, str]:
    """The pool of an algorithm whose clients share scores of single rows, and what to use instead."""
    remedy = "--algorithm.pool histogram, or a minimax method or FedAvg"
    if isinstance(algorithm, Pairwise):
        return f"pool is {algorithm.pool!r}", remedy
    return f"{algorithm.name} has no histogram pool", f"cycp-pairwise with {remedy}"


def refuse_personal_models(algorithm: Algorithm) -> None:
    """Refuse an algorithm, with its wrappers around it, whose clients keep a part of the model."""
    if algorithm.has_personal_models:
        raise ValueError(
            "clients keep a part of the model, such as a personal head, and metrics of their models would show it "
            "without noise; leave out what keeps it, or epsilon"
        )


def check_client_noise(recipe: Recipe) -> None:
    """Refuse what needs a server that knows the noise, or exact class counts."""
    transform = find_client_dp(recipe)
    assert transform is not None
    remedy = "or --transforms.secure-sum.noise server for a server that is trusted"
    if transform.bands is not None and transform.bands > 1:
        raise ValueError(
            f"bands is {transform.bands}, but clients add the noise; noise that is correlated over rounds would have "
            f"to be known to whoever adds it: use bands 1, {remedy}"
        )
    if recipe.weighting != "paper":
        raise ValueError(
            f"weighting is {recipe.weighting!r}, which needs the class counts of all clients, but clients hide theirs "
            f"from the server: use --weighting paper, {remedy}"
        )
    if isinstance(recipe.algorithm, LogitAdjustedFedAvg):
        raise ValueError(
            f"{recipe.method} adjusts scores by each client's class counts, but clients hide theirs from the server: "
            f"use cycp-fedavg, {remedy}"
        )
    asks_server = ["private_evaluation"] if recipe.private_evaluation else []
    asks_server += ["private standardization"] if transform.standardization == "private" else []
    if asks_server:
        raise ValueError(
            f"the recipe asks for {asks_server[0]}, whose noise the server would add, but clients add their own noise "
            f"because the server is not trusted: leave it out, {remedy}"
        )


def _check_participation(participation: Participation) -> None:
    """Refuse schedules whose turns the proof does not cover."""
    remedy = "use the participation 'cyclic-poisson', or 'cyclic' with whole groups"
    if isinstance(participation, Trace) and participation.schedule is not None:
        participation = participation.schedule
    # The classes themselves: one that extends them may draw clients in another way.
    if type(participation) in (CyclicPoisson, Full):
        return
    if type(participation) is Cyclic:
        if participation.order != "fixed":
            raise ValueError(
                "order is 'reshuffled'; a client's turns could follow each other within a cycle length, which the "
                "proof for correlated noise excludes: use order 'fixed'"
            )
        if participation.per_round is not None:
            raise ValueError(
                f"per_round is {participation.per_round}; draws of a fixed size make clients depend on each other, and "
                f"no amplification is proven for them: {remedy}"
            )
        return
    reason = "a client's turns can have any distance"
    if isinstance(participation, Uniform):
        reason = "draws of a fixed size make clients depend on each other, and no amplification is proven for them"
    name = getattr(participation, "name", type(participation).__name__)
    raise ValueError(f"participation is {name!r}; {reason}: {remedy}")


def check_releases(recipe: Recipe, transform: ClientDP, releases: PlannedReleases | None) -> None:
    """Refuse private evaluation and standardisation where the caller does neither."""
    if recipe.private_evaluation and (releases is None or releases.held_out_parts == 0):
        raise ValueError(
            "private_evaluation is true, but here nobody evaluates on the clients' held-out rows: leave it out"
        )
    if transform.standardization == "private" and (releases is None or not releases.standardizes):
        raise ValueError(
            "standardization is 'private', but rows that are given as arrays, or at the sites of a federation, are "
            "used as they are; give a dataset with columns of numbers, or use standardization 'public'"
        )


def _check_stop(recipe: Recipe, account: PrivacyAccount) -> None:
    """Refuse a limit that the first round and its evaluation would exceed."""
    if recipe.stop_at_epsilon is None:
        return
    needed = account.epsilon(1, int(account.evaluation_noise is not None))
    if needed > recipe.stop_at_epsilon:
        raise ValueError(
            f"stop_at_epsilon is {recipe.stop_at_epsilon:g}, but the first round spends {needed:.4g}: raise it, or "
            "lower epsilon"
        )


def single_noise(recipe: Recipe, transform: ClientDP, cycles: int, sampling: float) -> float:
    """The multiplier s_1 of a single Gaussian release that would cost the whole budget; 0 for an infinite one.

    A Gaussian with multiplier s costs μ² = s^-2 of the budget μ² of Gaussian differential privacy; (ε, δ) itself is
    that of a single Gaussian with multiplier s_1, so that a release with a share of it has s_1 / √share.
    """
    budget = recipe.epsilon
    if budget is None:
        assert transform.noise_multiplier is not None
        account = PrivacyAccount(delta=recipe.delta, noise_multiplier=transform.noise_multiplier, sampling=sampling)
        budget = account.epsilon(cycles)
    return calibrate_noise(budget, recipe.delta, 1)


def standardization_noise(recipe: Recipe) -> float:
    """The noise multiplier of the moments by which columns are standardised, for a recipe with a budget."""
    transform = find_client_dp(recipe)
    assert transform is not None
    assert recipe.epsilon is not None
    return calibrate_noise(recipe.epsilon, recipe.delta, 1) / math.sqrt(transform.standardization_share)


def _plan_one_off(recipe: Recipe, transform: ClientDP, single: float) -> tuple[tuple[str, float], ...]:
    """The releases before training with their noise multipliers, which take a small share of the budget."""
    if single == 0:
        return ()
    releases = []
    if recipe.weighting != "paper":
        releases.append((COUNTS, single / math.sqrt(transform.statistics_share)))
    if transform.standardization == "private":
        releases.append((STANDARDIZATION, standardization_noise(recipe)))
    return tuple(releases)


def _release_class_totals(
    setting: Setting, transform: ClientDP, one_off: dict[str, float], noise: NoiseSource
) -> ClassTotalsEstimate | None:
    """The noised class totals that the weighting needs; None where it needs none, or nothing is protected."""
    if COUNTS not in one_off:
        return None
    return noised_class_totals(
        setting.census,
        setting.weighting,
        one_off[COUNTS],
        transform.max_rows,
        lambda count: noise.draw_normal(0, count).numpy(),
    )


def make_one_off_noise(seed: int, secret: bytes | None, name: str) -> NoiseSource:
    """The noise of a release before training, by its name."""
    return KeyedNoise(seed, name) if secret is None else SecretNoise(secret, name)


def _has_histogram(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, Pairwise) and algorithm.pool == "histogram"


# ------------------------------------------------------------------------------------------------- privacy of examples


class PrivateSteps(NamedTuple):
    """The wrappers of a run with `example-dp`, with the noise that its budget needs, and its account."""

    wrappers: tuple[Wrapper, ...]
    account: PrivacyAccount


def prepare_example_privacy(recipe: Recipe, schedule: Schedule, plan: Plan, setting: Setting) -> PrivateSteps | None:
    """The parts of a run whose clients protect each of their rows with `example-dp`; None for a run without.

    Every visit counts, without amplification by sampling: batches have a fixed size, and the server knows who is drawn.
    """
    wrapper = next((member for member in recipe.wrappers if isinstance(member, ExampleDP)), None)
    if wrapper is None:
        return None
    turn_interval = schedule.cycle_length if visits_once_per_cycle(recipe.participation) else 1
    rows = int((setting.census.positives + setting.census.negatives).sum())
    if not recipe.delta < 1 / rows:
        raise ValueError(
            f"delta is {recipe.delta:g}; with {rows} rows it must be below 1/{rows} = {1 / rows:.2g}: lower delta"
        )
    kind = recipe.algorithm.objective.batch_kind
    # With noise 1; a visit's multiplier is proportional to the noise.
    visits = [
        example_account(setting.census, recipe.batch, stage.local_steps, kind, 1.0).worst_multiplier
        for stage in plan.stages
    ]
    noise = wrapper.noise_multiplier
    if recipe.epsilon is not None:
        noise = calibrate_noise(recipe.epsilon, recipe.delta, plan.total_rounds // turn_interval) / min(visits)
    account = PrivacyAccount(
        delta=recipe.delta, noise_multiplier=noise * min(visits), turn_interval=turn_interval, unit="example"
    )
    _check_stop(recipe, account)
    changed = replace(wrapper, noise_multiplier=noise)
    wrappers = tuple(changed if member is wrapper else member for member in recipe.wrappers)
    return PrivateSteps(wrappers, account)
