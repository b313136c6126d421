"""What a training run reveals about one client: (ε, δ) of everything that is released, and the noise for a budget.

A participation is a visit of a client: everything it uploads there has norm at most 1 (after scaling by its bound) and
is added to a sum over clients with Gaussian noise of standard deviation `noise_multiplier`. Neighbouring federations
differ in one client (or one example): it is there or not; for whole groups its contribution is replaced by zero. The
sums have a fixed denominator, so that the number of clients that took part is not released.

Formal guarantees:
    Let round r visit group r mod K. The groups are fixed in advance and do not depend on the data; every client of the
    group takes part independently with probability q (q = 1: the whole group). Let the noise be C⁻¹ z, with z ~ N(0,
    σ²) and C a lower-triangular matrix with at most K bands and columns of norm at most 1 (`banded_noise.py`; one band
    is independent noise). Then the outputs of all rounds together are as private as the adaptive composition of E
    Poisson-subsampled Gaussian mechanisms with sampling probability q and noise multiplier σ, where E is the number of
    rounds that visit the client's group.

    Proof: C x + z determines the outputs, so it suffices to bound it. A client's rounds lie K apart and a column of C
    has at most K non-zero rows, so that the client's columns are orthogonal and every row depends on at most one of its
    participations. The rows from one of its rounds to the next are, given everything released earlier, a Gaussian
    mechanism whose mean moves by a vector of norm at most 1 if the client takes part, which is a draw that is
    independent of the earlier ones. What is uploaded may depend on earlier outputs (Denisov et al., "Improved
    differential privacy for SGD via optimal private linear operators on adaptive streams", NeurIPS 2022) and on the
    client's own state, since the divergences that define (ε, δ) are jointly convex. The amplification by draws is that
    of Choquette-Choo et al., "(Amplified) banded matrix factorization", NeurIPS 2023. Releases that every client joins
    (class counts, standardization sums, evaluations) compose as Gaussian mechanisms without amplification.

    Not covered: draws of a fixed size without replacement, groups that are reshuffled between cycles, more than K
    bands, and denominators that depend on who takes part.

How ε is computed: Gaussian mechanisms of multipliers s_i compose exactly into one of (Σ s_i⁻²)^(-1/2), whose ε is known
in closed form (Balle and Wang, "Improving the Gaussian mechanism", ICML 2018); that is all for q = 1. For q < 1 the
privacy loss distribution of one subsampled participation is discretized so that ε is never understated (Doroshenko et
al., "Connect the dots", PETS 2022), raised to the power of the participations with one Fourier transform, and composed
with that Gaussian; the grid is chosen so that ε is overstated by about one part in 10,000.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedauc.fields import check_fields, describe, option
from fedauc.privacy import import_privacy_package
from fedauc.privacy.discrete_noise import convolution_gap

MOST_PARTICIPATIONS = 100_000
"""Where `largest_participations` stops counting: a budget that allows so many does not bind."""

SMALLEST_DELTA = 1e-12
"""Privacy loss distributions drop tails of 1e-15 and count them as lost; a δ near that would never be met."""

COARSEST_INTERVAL = 1.0
"""Losses in the thousands would need a coarser grid than this; there the bound without sampling is taken instead."""

FINEST_INTERVAL = 2.0**-18
"""Probabilities on the grid are differences that are divided by its step, so that a finer one would lose digits."""

EXPONENT_LIMIT = 600.0
"""Where exponentials would overflow soon."""

STEP = 1e-4
"""The relative precision of a calibrated noise multiplier."""


@dataclass(frozen=True, kw_only=True)
class PrivacyAccount:
    """Everything a run releases about a client, as noise multipliers; `epsilon` says what it costs so far.

    A call of `epsilon` takes half a millisecond for whole groups. With Poisson draws the first one builds the
    distribution of one participation, about 20 ms, and every further one raises it to a power, about 10 ms (a second
    for 100 cycles); calls with the same numbers are remembered.

    >>> account = PrivacyAccount(delta=1e-3, noise_multiplier=4.81, one_off=(("class counts", 20.0),))
    >>> round(account.epsilon(participations=100), 2)
    7.98
    """

    delta: float = field(metadata=describe("Probability with which the bound ε may fail.", above=0, below=1))
    noise_multiplier: float = field(
        metadata=describe(
            "Noise of a participation over its bound, jointly for everything a client uploads in a visit.",
            at_least=0,
            at_most=math.inf,
        )
    )
    sampling: float = option(
        1.0, "Probability with which a client of the visited group takes part; 1 for whole groups.", above=0, at_most=1
    )
    one_off: tuple[tuple[str, float], ...] = option(
        (), "Names and noise multipliers of Gaussian releases that are made once, before training."
    )
    evaluation_noise: float | None = option(
        None,
        "Noise multiplier of one evaluation, which every client joins; None where evaluations release nothing.",
        at_least=0,
        at_most=math.inf,
    )
    turn_interval: int = option(1, "Rounds from one turn of a client to its next one.", at_least=1)
    unit: Literal["client", "example"] = option("client", "What the guarantee protects: a client or one example.")
    accountant: Literal["exact", "rdp"] = option(
        "exact", "Exact for Gaussian noise; rdp (Rényi) for the discrete noise of clients, which it also covers."
    )
    sampler_error: float = option(
        0.0, "Total variation distance between all noise as drawn and as the proof assumes it.", at_least=0
    )

    def __post_init__(self) -> None:
        """Refuse numbers out of bounds, and names of one-off releases that are not unique."""
        check_fields(self)
        for name, noise in self.one_off:
            if not noise >= 0:
                raise ValueError(f"the noise of {name} is {noise!r}; it must be a number of at least 0: raise it")
        names = ["training", "evaluation", *(name for name, _ in self.one_off)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"one_off names {names[2:]}; give every part a name of its own, not training or evaluation"
            )
        if self.sampling < 1 and self.accountant == "rdp":
            reason = "who sees the sums of clients' noise sees who takes part as well"
            raise ValueError(f"sampling is {self.sampling!r}, but the accountant is 'rdp'; {reason}: use sampling 1")
        if self.sampling < 1 and self.delta < SMALLEST_DELTA:
            raise ValueError(
                f"delta is {self.delta!r}; with sampling it must be at least {SMALLEST_DELTA}: raise delta"
            )

    def epsilon(self, participations: int, evaluations: int = 0) -> float:
        """ε of everything that a client takes part in: the one-off releases, its participations, the evaluations."""
        others = combine_multipliers(*(noise for _, noise in self.one_off), self._noise_of_evaluations(evaluations))
        return self._compose(_check_count("participations", participations), others)

    def count_participations(self, rounds: int) -> int:
        """How often the clients that were visited most have had their turn after so many rounds."""
        return -(-_check_count("rounds", rounds) // self.turn_interval)

    def epsilon_by_part(self, participations: int, evaluations: int = 0) -> dict[str, float]:
        """What every part would cost alone: "training", the one-off releases by name, "evaluation".

        They do not add up to `epsilon`, which composes them at the same δ.
        """
        count = _check_count("participations", participations)
        training = self._compose(count, math.inf)
        parts = dict(self.one_off)
        if self.evaluation_noise is not None:
            parts["evaluation"] = self._noise_of_evaluations(evaluations)
        return {"training": training} | {name: _epsilon_of_gaussian(noise, self.delta) for name, noise in parts.items()}

    def largest_participations(self, epsilon: float, evaluations_per_participation: float = 0) -> int:
        """How many participations fit in a budget, with ⌈count · evaluations_per_participation⌉ evaluations.

        0 where not even one fits; at most `MOST_PARTICIPATIONS`.
        """
        _check_budget(epsilon)
        if not 0 <= evaluations_per_participation < math.inf:
            raise ValueError(
                f"evaluations_per_participation is {evaluations_per_participation!r}; "
                "it must be a finite number of at least 0: raise it"
            )

        def fits(count: int) -> bool:
            # The small number keeps 0.1 · 30 = 3.0000000000000004 from asking for a fourth evaluation.
            evaluations = math.ceil(count * evaluations_per_participation - 1e-9)
            return self.epsilon(count, evaluations) <= epsilon

        if not fits(0):
            return 0
        low, high = 0, 1
        while fits(high):
            if high == MOST_PARTICIPATIONS:
                return high
            low, high = high, min(2 * high, MOST_PARTICIPATIONS)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _compose(self, participations: int, others: float) -> float:
        """ε of so many participations and of a Gaussian release with the multiplier `others`."""
        if self.accountant == "exact":
            return _compute_epsilon(self.delta, self.noise_multiplier, self.sampling, participations, others)
        training = self.noise_multiplier / math.sqrt(participations) if participations else math.inf
        joint = combine_multipliers(training, others)
        epsilon = epsilon_of_gaussian_rdp(joint, 1, self.delta)
        # An error t of the sampler takes (1 + exp(ε)) t of δ, so that ε must hold for the rest of it.
        while self.sampler_error and epsilon < EXPONENT_LIMIT:
            rest = self.delta - (1 + math.exp(epsilon)) * self.sampler_error
            if rest <= 0:
                return math.inf
            needed = epsilon_of_gaussian_rdp(joint, 1, rest)
            if needed <= epsilon:
                return epsilon
            epsilon = needed * (1 + STEP**2)
        return math.inf if self.sampler_error else epsilon

    def _noise_of_evaluations(self, evaluations: int) -> float:
        if _check_count("evaluations", evaluations) == 0:
            return math.inf
        if self.evaluation_noise is None:
            raise ValueError(
                f"evaluations is {evaluations}; without evaluation_noise no evaluation may be released: "
                "set evaluation_noise, or count 0 evaluations"
            )
        return self.evaluation_noise / math.sqrt(evaluations)


def combine_multipliers(*multipliers: float) -> float:
    """The joint noise multiplier of Gaussian releases that see the same participation: (Σ s_i⁻²)^(-1/2).

    >>> combine_multipliers(3.0, 4.0)
    2.4
    """
    smallest = min(multipliers, default=math.inf)
    if smallest in (0.0, math.inf):
        return smallest
    # Relative to the smallest one, so that the squares neither overflow nor underflow.
    return smallest / math.sqrt(math.fsum((smallest / noise) ** 2 for noise in multipliers))


def calibrate_noise(
    epsilon: float,
    delta: float,
    participations: int,
    sampling: float = 1.0,
    one_off: tuple[tuple[str, float], ...] = (),
    evaluations: int = 0,
    evaluation_noise: float | None = None,
) -> float:
    """The smallest joint noise multiplier of a participation that keeps everything within (ε, δ).

    The result is at most a few parts in 10,000 above the smallest, and always on the side where `epsilon` holds. It is
    0 for an infinite budget. Whole groups take a millisecond, Poisson draws a fraction of a second.

    >>> round(calibrate_noise(8.0, 1e-3, participations=100), 2)
    4.8
    """
    _check_budget(epsilon)
    if participations < 1:
        raise ValueError(f"participations is {participations!r}; it must be a whole number of at least 1: raise it")
    account = PrivacyAccount(
        delta=delta,
        noise_multiplier=math.inf,
        sampling=sampling,
        one_off=one_off,
        evaluation_noise=evaluation_noise,
    )
    if epsilon == math.inf:
        return 0.0
    spent = account.epsilon(participations, evaluations)
    if spent >= epsilon:
        costs = account.epsilon_by_part(participations, evaluations)
        costliest = max(costs, key=lambda name: costs[name])
        raise ValueError(
            f"epsilon is {epsilon:g}; without any training the other releases cost {spent:.4g} already, "
            f"most of it {costliest} ({costs[costliest]:.4g} alone): raise epsilon or the noise of {costliest}"
        )

    def epsilon_of(noise: float) -> float:
        return replace(account, noise_multiplier=noise).epsilon(participations, evaluations)

    # Sampling only helps, so that the noise without it is near an upper end.
    noise = import_privacy_package("dp_accounting").get_sigma_gaussian(epsilon, delta) * math.sqrt(participations)
    return _find_smallest_noise(epsilon_of, epsilon, float(noise))


def epsilon_of_gaussian_rdp(noise_multiplier: float, count: int, delta: float) -> float:
    """ε of `count` Gaussian releases without amplification, by Rényi differential privacy.

    The discrete Gaussian satisfies the same bound on its Rényi divergences as the continuous one, α / (2 s²) at every
    order α (Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", NeurIPS 2020), so this holds
    for it as well; the exact ε of `PrivacyAccount` does not. A sum of clients' discrete Gaussians is not one itself:
    take its multiplier from `sum_discrete_noise`.
    """
    _check_delta(delta)
    if not noise_multiplier >= 0:
        raise ValueError(f"noise_multiplier is {noise_multiplier!r}; it must be a number of at least 0: raise it")
    if _check_count("count", count) == 0 or noise_multiplier == math.inf:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    dp_accounting = import_privacy_package("dp_accounting")
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / math.sqrt(count)))
    return float(accountant.get_epsilon(delta))


def calibrate_gaussian_rdp(epsilon: float, delta: float, count: int) -> float:
    """The smallest noise multiplier for which `epsilon_of_gaussian_rdp` is at most ε; 0 for an infinite budget."""
    _check_budget(epsilon)
    _check_delta(delta)
    if count < 1:
        raise ValueError(f"count is {count!r}; it must be a whole number of at least 1: raise it")
    if epsilon == math.inf:
        return 0.0
    exact = import_privacy_package("dp_accounting").get_sigma_gaussian(epsilon, delta) * math.sqrt(count)
    return _find_smallest_noise(lambda noise: epsilon_of_gaussian_rdp(noise, count, delta), epsilon, float(exact))


def sum_discrete_noise(scale: float, clients: int, sensitivity: float, dimension: int) -> float:
    """The noise multiplier, for `epsilon_of_gaussian_rdp`, of a sum of integer noise that every client draws itself.

    Each of the n clients adds discrete Gaussian noise of parameter σ = `scale` to every one of d integer coordinates;
    neighbouring sums differ by at most Δ = `sensitivity` in L2 norm. The sum is close to a discrete Gaussian of
    parameter √n σ: its concentrated-DP multiplier is 1 / min(Δ/(√n σ) + √d τ, √(Δ²/(n σ²) + 2 d τ)), where
    τ = 10 Σ_{k=1}^{n-1} exp(-2π² σ² k/(k+1)) (Kairouz, Liu and Steinke, "The distributed discrete Gaussian mechanism",
    ICML 2021, Proposition 14). `clients` counts those whose noise is certain to be in the sum.
    """
    if not (0.5 <= scale < math.inf and 0 < sensitivity < math.inf and clients >= 1 and dimension >= 1):
        raise ValueError(
            f"scale, clients, sensitivity and dimension are {scale!r}, {clients!r}, {sensitivity!r} and {dimension!r}; "
            "the bound needs a scale of at least 0.5 and positive numbers: use a finer grid"
        )
    gap = convolution_gap(scale, clients)
    ratio = sensitivity / (math.sqrt(clients) * scale)
    return 1 / min(ratio + math.sqrt(dimension) * gap, math.sqrt(ratio**2 + 2 * dimension * gap))


@functools.lru_cache(maxsize=4096)
def _compute_epsilon(delta: float, noise: float, sampling: float, participations: int, gaussian: float) -> float:
    """ε of `participations` sampled releases and of one Gaussian release of multiplier `gaussian`."""
    if gaussian == 0 or (noise == 0 and participations):
        return math.inf
    training = noise / math.sqrt(participations) if participations else math.inf
    # Sampling never costs, so that the closed form without it is exact for whole groups and a bound otherwise.
    bound = _epsilon_of_gaussian(combine_multipliers(training, gaussian), delta)
    if sampling == 1 or training == math.inf:
        return bound
    interval = _choose_interval(noise, sampling, participations, gaussian)
    if interval > COARSEST_INTERVAL:
        return bound
    losses = _discretize_losses(noise, sampling, interval).self_compose(participations)
    if gaussian < math.inf:
        losses = losses.compose(_discretize_losses(gaussian, 1.0, interval))
    return min(bound, float(losses.get_epsilon_for_delta(delta)))


def _epsilon_of_gaussian(noise: float, delta: float) -> float:
    """The exact ε of one Gaussian release."""
    return float(import_privacy_package("dp_accounting").get_epsilon_gaussian(noise, delta))


@functools.lru_cache(maxsize=8)
def _discretize_losses(noise: float, sampling: float, interval: float) -> Any:
    """The privacy loss distribution of one release, on multiples of `interval`, rounded so that ε is overstated."""
    distributions = import_privacy_package("dp_accounting.pld.privacy_loss_distribution")
    return distributions.from_gaussian_mechanism(
        noise, sampling_prob=sampling, value_discretization_interval=interval, use_connect_dots=True
    )


def _choose_interval(noise: float, sampling: float, participations: int, gaussian: float) -> float:
    """The grid's step: fine enough for about one part in 10,000, coarse enough for some 100,000 points.

    A step must be small beside the standard deviation of a participation's loss, near q √(exp(1/s²) - 1), because
    rounding adds to its variance; and not too small beside the largest losses, of a participation and of the total.
    It is a power of 2, so that a run that grows reuses the distribution of one participation. Any step gives a valid ε.
    """
    largest = 0.5 / noise**2 + 8 / noise
    chi_square = sampling**2 * math.expm1(min(1 / noise**2, EXPONENT_LIMIT))
    deviation = min(math.sqrt(chi_square), largest)
    mean = math.log1p(chi_square) if 1 / noise**2 < EXPONENT_LIMIT else 1 / noise**2
    total = participations * mean + 8 * math.sqrt(participations) * deviation + 0.5 / gaussian**2 + 8 / gaussian
    wanted = min(0.03 * deviation, 5e-4 * largest)
    interval = max(wanted, 4e-5 * _sample_loss(largest, sampling), 4e-6 * total, FINEST_INTERVAL)
    return float(2.0 ** math.floor(math.log2(interval)))


def _sample_loss(loss: float, sampling: float) -> float:
    """log(1 - q + q exp(loss)): what sampling with probability q leaves of a privacy loss."""
    return math.log1p(sampling * math.expm1(loss)) if loss < EXPONENT_LIMIT else loss + math.log(sampling)


def _find_smallest_noise(epsilon_of: Callable[[float], float], epsilon: float, guess: float) -> float:
    """The smallest noise with `epsilon_of(noise)` ≤ `epsilon`, for a falling function, rounded up by about `STEP`."""
    low = high = guess
    while epsilon_of(high) > epsilon:
        low, high = high, 2 * high
    while epsilon_of(low) <= epsilon:
        low, high = low / 2, low
    optimize = import_privacy_package("scipy.optimize")
    # Over the logarithm of the noise, where the gap is close to a smooth convex curve.
    root = optimize.brentq(
        # A little wider, because rounding of the logarithm could put an end on the wrong side.
        lambda logarithm: epsilon_of(math.exp(logarithm)) - epsilon,
        math.log(low) - 1e-9,
        math.log(high) + 1e-9,
        xtol=STEP,
    )
    noise = math.exp(root)
    while epsilon_of(noise) > epsilon:
        noise *= 1 + STEP
    return noise


def _check_budget(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon!r}; it must be a number above 0: raise epsilon")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; it must be a number above 0 and below 1: choose it in between")


def _check_count(name: str, count: int) -> int:
    if count < 0 or count != int(count):
        raise ValueError(f"{name} is {count!r}; it must be a whole number of at least 0: round {name} up")
    return int(count)
