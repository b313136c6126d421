"""The audit of a mechanism whose privacy is known: limits that hold, planted faults that show, no false alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, nct, norm

from canary_runs import FIVE_BANDS, ONE_BAND, Mechanism, observe_run
from fedauc.privacy.audit import (
    AuditResult,
    audit_canaries,
    check_noise,
    clopper_pearson_epsilon,
    epsilon_of_gdp,
    estimate_gdp,
    gdp_of_epsilon,
)

DELTA = 1e-5
BANDS = pytest.mark.parametrize("coefficients", [ONE_BAND, FIVE_BANDS], ids=["one band", "five bands"])


def audit_run(seed: int, mechanism: Mechanism) -> AuditResult:
    return audit_canaries(observe_run(seed, mechanism), mechanism.mu, epsilon_of_gdp(mechanism.mu, DELTA), DELTA)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0, 6.0])
def test_epsilon_solves_the_equation_of_gdp_and_has_an_inverse(mu: float, delta: float) -> None:
    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta)

    epsilon = epsilon_of_gdp(mu, delta)
    assert epsilon == pytest.approx(brentq(excess, 0, 200), rel=1e-6)
    assert gdp_of_epsilon(epsilon, delta) == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "sigma"), [(8, 4.80), (2, 14.45), (1, 25.75)])
def test_mu_agrees_with_calibrated_noise_of_one_hundred_rounds(epsilon: float, sigma: float) -> None:
    """σ as an accountant of privacy loss distributions calibrates it, at δ = 1e-3 and 100 rounds: μ = 10 / σ."""
    assert 10 / gdp_of_epsilon(epsilon, 1e-3) == pytest.approx(sigma, abs=0.006)


def test_epsilon_at_the_ends() -> None:
    assert epsilon_of_gdp(0, DELTA) == 0
    assert epsilon_of_gdp(1e-6, DELTA) == 0
    assert epsilon_of_gdp(math.inf, DELTA) == math.inf
    assert gdp_of_epsilon(math.inf, DELTA) == math.inf
    # δ = 2Φ(μ/2) - 1 at ε = 0.
    assert gdp_of_epsilon(0, 0.1) == pytest.approx(2 * norm.ppf(0.55))
    # Far beyond the largest exponent: y = ε/μ - μ/2 tends to the normal quantile of δ.
    assert epsilon_of_gdp(100, DELTA) == pytest.approx(5000 + 100 * norm.isf(DELTA), rel=2e-3)


@pytest.mark.parametrize(("count", "mu"), [(40, 0.0), (200, 1.0), (200, 8.0), (1000, 3.0)])
def test_limits_of_mu_agree_with_the_noncentral_t_distribution(count: int, mu: float) -> None:
    generator = np.random.default_rng(0)
    half = count // 2
    estimate = estimate_gdp(generator.normal(size=half) + mu, generator.normal(size=half))
    statistic, scale = estimate.mu * math.sqrt(half / 2), math.sqrt(half / 2)
    assert nct.sf(statistic, count - 2, estimate.low * scale) == pytest.approx(0.05, abs=0.003)
    assert nct.cdf(statistic, count - 2, estimate.high * scale) == pytest.approx(0.05, abs=0.003)


@BANDS
def test_intervals_cover_the_true_mu_and_bounds_stay_below_the_true_epsilon(coefficients: Sequence[float]) -> None:
    results = [audit_run(seed, Mechanism(coefficients)) for seed in range(100, 150)]
    # Each limit errs in 5 % of the runs: more than 8 of 50 has probability 2e-4.
    assert sum(result.mu_low > 1 for result in results) <= 8
    assert sum(result.mu_high < 1 for result in results) <= 8
    # The estimate has deviation 0.14 in a run, so that the mean of 50 lies within four errors, 0.08, of the truth.
    # The other canaries lower it by about 2 %.
    assert np.mean([result.mu for result in results]) == pytest.approx(0.98, abs=0.08)
    assert all(result.epsilon_clopper_pearson <= result.proven_epsilon for result in results)
    assert np.median([result.epsilon_clopper_pearson for result in results]) > 0.1
    assert all(result.epsilon_low < result.epsilon for result in results)


@BANDS
def test_a_correct_mechanism_is_never_flagged(coefficients: Sequence[float]) -> None:
    for seed in range(20):
        result = audit_run(seed, Mechanism(coefficients, mu=2.0))
        assert (result.verdict, result.reasons) == ("consistent", ())
        assert result.noise.deviation == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("client_norm", [20, 100, 500])
@BANDS
def test_the_signal_of_clients_is_not_a_fault_of_the_noise(coefficients: Sequence[float], client_norm: float) -> None:
    """A sum of clients that points the same way in every round is fully correlated over rounds, but adds variance."""
    for seed in range(4):
        result = audit_run(seed, Mechanism(coefficients, client_norm=client_norm))
        assert (result.verdict, result.reasons) == ("consistent", ())


@BANDS
def test_false_alarms_of_the_noise_are_as_rare_as_the_level(coefficients: Sequence[float]) -> None:
    alarms = sum(bool(check_noise(observe_run(seed, Mechanism(coefficients)), 0.05).problems) for seed in range(60))
    # More than 9 of 60 at 5 % has probability 1e-3.
    assert alarms <= 9


@BANDS
def test_a_missing_clip_is_caught(coefficients: Sequence[float]) -> None:
    """Canaries upload ten times the clip norm."""
    for seed in range(3):
        result = audit_run(seed, Mechanism(coefficients, clips=False))
        assert result.verdict == "violated"
        assert result.mu_low > result.proven_mu
        assert result.epsilon_low > result.proven_epsilon
        assert "the clip norm allows" in result.reasons[-1]
        assert result.noise.problems == ()


@BANDS
def test_a_missing_clip_is_caught_behind_a_large_signal_of_clients(coefficients: Sequence[float]) -> None:
    result = audit_run(0, Mechanism(coefficients, clips=False, client_norm=100))
    assert result.verdict == "violated"


@BANDS
def test_noise_that_is_drawn_once_and_reused_is_caught(coefficients: Sequence[float]) -> None:
    for seed in range(3):
        result = audit_run(seed, Mechanism(coefficients, noise="one draw reused"))
        assert result.verdict == "violated"
        assert "is repeated or has other bands" in result.reasons[0]
        assert result.noise.largest_autocorrelation > 0.9


@BANDS
def test_noise_that_is_added_once_instead_of_per_round_is_caught(coefficients: Sequence[float]) -> None:
    for seed in range(3):
        result = audit_run(seed, Mechanism(coefficients, noise="added once"))
        assert result.verdict == "violated"
        assert "the noise is too small" in result.reasons[0]
        assert result.mu_low > result.proven_mu


def test_one_round_without_noise_is_caught() -> None:
    result = audit_run(0, Mechanism(noise="last round missing"))
    assert result.verdict == "violated"
    assert "the noise of round 59 is too small" in result.reasons[0]


@pytest.mark.parametrize(
    ("declared", "real"),
    [(ONE_BAND, FIVE_BANDS), (FIVE_BANDS, ONE_BAND), (FIVE_BANDS, FIVE_BANDS[:2]), (FIVE_BANDS[:2], FIVE_BANDS)],
    ids=["one, really five", "five, really one", "five, really two", "two, really five"],
)
def test_other_bands_than_declared_are_caught(declared: Sequence[float], real: Sequence[float]) -> None:
    for seed in range(3):
        result = audit_run(seed, Mechanism(declared, real))
        assert result.verdict == "violated"
        assert "has other bands than declared" in " ".join(result.reasons)


def test_draws_are_audited_twice() -> None:
    """μ without amplification from attended rounds, and a lower ε from all turns, which knows no draws."""
    mechanism = Mechanism(probability=0.5, mu=2.0)
    statistics = observe_run(0, mechanism)
    full = epsilon_of_gdp(2.0, DELTA)
    result = audit_canaries(statistics, statistics.declared_mu, full, DELTA)
    assert result.verdict == "consistent"
    assert result.epsilon < epsilon_of_gdp(result.mu, DELTA) < full
    # Canaries that always attend break a promise of draws, although noise and clip are right.
    always = observe_run(0, Mechanism(mu=2.0))
    promised = audit_canaries(always, always.declared_mu, 0.5, DELTA)
    assert promised.verdict == "violated"
    assert "epsilon above" in promised.reasons[0]


def test_clopper_pearson_of_separated_scores_has_a_closed_form() -> None:
    """100 in, 100 outside, all separated: ranks 0, 1, 2, 4, 8, 16, 32 share the error as 14 bounds."""
    error = 0.05 / 14
    lower, upper = error ** (1 / 100), 1 - error ** (1 / 100)
    epsilon = clopper_pearson_epsilon(np.arange(100) + 1000.0, np.arange(100.0), 1e-3)
    assert epsilon == pytest.approx(math.log((lower - 1e-3) / upper))


def test_clopper_pearson_below_one_outlier_counts_it_as_a_false_positive() -> None:
    """All canaries in the run score between the two largest of 100 outside, so that the best threshold has rank 1."""
    error = 0.05 / 14
    # At this rate, one false positive of 100 or none has probability `error`.
    rate = brentq(lambda rate: binom.cdf(1, 100, rate) - error, 1e-6, 0.5)
    epsilon = clopper_pearson_epsilon(np.full(100, 98.5), np.arange(100.0), 1e-3)
    assert epsilon == pytest.approx(math.log((error ** (1 / 100) - 1e-3) / rate))


def test_clopper_pearson_is_valid_and_grows_with_the_number_of_canaries() -> None:
    generator = np.random.default_rng(1)
    pairs = generator.normal(size=(200, 2, 40))
    null = [clopper_pearson_epsilon(first, second, 1e-6) for first, second in pairs]
    # The level is 5 %: more than 20 of 200 has probability 1e-3.
    assert sum(epsilon > 0 for epsilon in null) <= 20
    few, many = (
        clopper_pearson_epsilon(generator.normal(size=count) + 2, generator.normal(size=count), 1e-5)
        for count in (50, 20_000)
    )
    assert few < many < epsilon_of_gdp(2.0, 1e-5)
    assert many > 4


def test_scores_without_variance() -> None:
    assert estimate_gdp(np.ones(3), np.zeros(3)).low == math.inf
    assert estimate_gdp(np.zeros(3), np.zeros(3)).mu == 0


def test_mistakes_have_one_line_errors() -> None:
    with pytest.raises(ValueError, match="delta is 0"):
        epsilon_of_gdp(1.0, 0.0)
    with pytest.raises(ValueError, match="mu is -1"):
        epsilon_of_gdp(-1.0, DELTA)
    with pytest.raises(ValueError, match="epsilon is nan"):
        gdp_of_epsilon(math.nan, DELTA)
    with pytest.raises(ValueError, match="canaries in the run: 1 have a score"):
        estimate_gdp(np.zeros(1), np.zeros(5))
    with pytest.raises(ValueError, match="not finite"):
        clopper_pearson_epsilon(np.zeros(5), np.full(5, np.nan), DELTA)
    with pytest.raises(ValueError, match="proven_mu is nan"):
        audit_canaries(observe_run(0, Mechanism()), math.nan, 1.0, DELTA)
