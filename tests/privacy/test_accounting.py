"""Accounting: ε and noise against dp-accounting's own accountants, the Gaussian's closed form, and known values."""

from __future__ import annotations

import itertools
import math
import sys
import time

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from fedauc.privacy import accounting, import_privacy_package
from fedauc.privacy.accounting import (
    PrivacyAccount,
    calibrate_gaussian_rdp,
    calibrate_noise,
    combine_multipliers,
    epsilon_of_gaussian_rdp,
    sum_discrete_noise,
)

KNOWN_WHOLE_GROUPS = {8.0: 4.80, 2.0: 14.45, 1.0: 25.75}
"""Noise for 100 participations of whole groups at δ = 1e-3, by ε."""

KNOWN_POISSON = {8.0: 0.937, 2.0: 2.249, 1.0: 3.942}
"""Noise for 100 Poisson draws with q = .1 at δ = 1e-5, by ε, from a search with an absolute tolerance of .001."""


def gaussian_delta(noise: float, epsilon: float) -> float:
    """δ of a Gaussian release (Balle and Wang 2018, theorem 8)."""
    upper, lower = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
    return float(stats.norm.cdf(upper) - math.exp(epsilon) * stats.norm.cdf(lower))


def gaussian_epsilon(noise: float, delta: float) -> float:
    return float(optimize.brentq(lambda epsilon: gaussian_delta(noise, epsilon) - delta, 0, 100, xtol=1e-13))


def reference_epsilon(events: list[tuple[dp_accounting.DpEvent, int]], delta: float) -> float:
    """dp-accounting's own composition, on its default grid of 1e-4."""
    accountant = dp_accounting.pld.PLDAccountant()
    for event, count in events:
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def poisson(noise: float, sampling: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(noise))


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(4.8, 100, 1e-3), (14.45, 100, 1e-3), (1.0, 1, 1e-5), (30.0, 7, 1e-6)]
)
def test_whole_groups_cost_the_closed_form(noise: float, count: int, delta: float) -> None:
    epsilon = PrivacyAccount(delta=delta, noise_multiplier=noise).epsilon(count)
    assert epsilon == pytest.approx(gaussian_epsilon(noise / math.sqrt(count), delta), rel=1e-9)
    reference = reference_epsilon([(dp_accounting.GaussianDpEvent(noise), count)], delta)
    assert epsilon == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize(
    ("noise", "sampling", "count", "delta"),
    [
        (0.937, 0.1, 100, 1e-5),
        (2.249, 0.1, 100, 1e-5),
        (3.942, 0.1, 100, 1e-5),
        (1.0, 0.01, 5000, 1e-6),
        (1.5, 0.9, 10, 1e-5),
        (0.8, 0.02, 1, 1e-5),
    ],
)
def test_poisson_draws_cost_what_dp_accounting_says(noise: float, sampling: float, count: int, delta: float) -> None:
    epsilon = PrivacyAccount(delta=delta, noise_multiplier=noise, sampling=sampling).epsilon(count)
    assert epsilon == pytest.approx(reference_epsilon([(poisson(noise, sampling), count)], delta), rel=2e-4)
    rdp = dp_accounting.rdp.RdpAccountant().compose(poisson(noise, sampling), count).get_epsilon(delta)
    assert epsilon <= rdp


def test_one_participation_is_the_integral_of_its_density() -> None:
    """δ(ε) = ∫ max(0, p - exp(ε) p′) of the mixture (1-q) N(0, s²) + q N(1, s²) and N(0, s²), in both directions."""
    noise, sampling, delta = 0.8, 0.3, 1e-4
    epsilon = PrivacyAccount(delta=delta, noise_multiplier=noise, sampling=sampling).epsilon(1)
    grid = np.linspace(-12, 13, 2_000_001)
    without = stats.norm.pdf(grid, scale=noise)
    joined = (1 - sampling) * without + sampling * stats.norm.pdf(grid, loc=1, scale=noise)
    deltas = [
        np.trapezoid(np.maximum(0, first - math.exp(epsilon) * second), grid)
        for first, second in ((joined, without), (without, joined))
    ]
    assert max(deltas) == pytest.approx(delta, rel=1e-3)


def test_all_parts_compose_into_one_epsilon() -> None:
    account = PrivacyAccount(
        delta=1e-5,
        noise_multiplier=1.2,
        sampling=0.1,
        one_off=(("class counts", 10.0), ("standardization", 8.0)),
        evaluation_noise=15.0,
    )
    gaussians = [(dp_accounting.GaussianDpEvent(noise), count) for noise, count in ((10.0, 1), (8.0, 1), (15.0, 4))]
    expected = reference_epsilon([(poisson(1.2, 0.1), 20), *gaussians], 1e-5)
    assert account.epsilon(20, 4) == pytest.approx(expected, rel=2e-4)
    parts = account.epsilon_by_part(20, 4)
    assert list(parts) == ["training", "class counts", "standardization", "evaluation"]
    assert parts["class counts"] == pytest.approx(gaussian_epsilon(10.0, 1e-5), rel=1e-9)
    assert parts["evaluation"] == pytest.approx(gaussian_epsilon(7.5, 1e-5), rel=1e-9)
    assert parts["training"] == pytest.approx(reference_epsilon([(poisson(1.2, 0.1), 20)], 1e-5), rel=2e-4)
    assert max(parts.values()) < account.epsilon(20, 4)


def test_whole_groups_compose_with_everything_exactly() -> None:
    account = PrivacyAccount(delta=1e-5, noise_multiplier=9.0, one_off=(("counts", 12.0),), evaluation_noise=20.0)
    joint = (16 / 81 + 1 / 144 + 5 / 400) ** -0.5
    assert account.epsilon(16, 5) == pytest.approx(gaussian_epsilon(joint, 1e-5), rel=1e-9)


@pytest.mark.parametrize("sampling", [1.0, 0.1])
def test_extremes(sampling: float) -> None:
    def make(noise: float, one_off: float = math.inf) -> PrivacyAccount:
        return PrivacyAccount(delta=1e-5, noise_multiplier=noise, sampling=sampling, one_off=(("counts", one_off),))

    assert make(1.0).epsilon(0) == 0.0
    assert make(0.0).epsilon(0) == 0.0
    assert make(0.0).epsilon(1) == math.inf
    assert make(math.inf).epsilon(50) == 0.0
    assert make(1.0, 0.0).epsilon(0) == math.inf
    assert make(math.inf, 4.0).epsilon(50) == pytest.approx(gaussian_epsilon(4.0, 1e-5), rel=1e-9)
    assert make(0.0).epsilon_by_part(1) == {"training": math.inf, "counts": 0.0}


def test_hardly_any_noise_gives_a_finite_number_at_once() -> None:
    """Where the grid would need millions of points, the bound without sampling is taken."""
    start = time.process_time()
    for noise, sampling, count in [(0.05, 0.5, 20), (1e-3, 0.5, 1000), (0.3, 0.1, 10**6)]:
        sampled = PrivacyAccount(delta=1e-5, noise_multiplier=noise, sampling=sampling).epsilon(count)
        assert 0 < sampled <= PrivacyAccount(delta=1e-5, noise_multiplier=noise).epsilon(count) < math.inf
    assert time.process_time() - start < 5


def test_epsilon_is_monotone() -> None:
    def epsilon(noise: float = 1.3, sampling: float = 0.1, count: int = 40, delta: float = 1e-5) -> float:
        return PrivacyAccount(delta=delta, noise_multiplier=noise, sampling=sampling).epsilon(count)

    for values in (
        [epsilon(count=count) for count in (0, 1, 2, 3, 10, 40, 41, 400)],
        [epsilon(noise=noise) for noise in (8.0, 2.0, 1.3, 1.29, 0.7)],
        [epsilon(sampling=sampling) for sampling in (0.01, 0.1, 0.11, 0.5, 0.99, 1.0)],
        [epsilon(delta=delta) for delta in (1e-2, 1e-5, 1e-8)],
    ):
        assert all(earlier < later for earlier, later in itertools.pairwise(values)), values


def test_a_hundred_cycles_take_a_few_seconds() -> None:
    account = PrivacyAccount(
        delta=1e-5, noise_multiplier=0.937, sampling=0.1, one_off=(("counts", 30.0),), evaluation_noise=60.0
    )
    start = time.process_time()
    history = [account.epsilon(cycle, cycle // 10) for cycle in range(1, 101)]
    assert time.process_time() - start < 4
    assert history == sorted(history)
    start = time.process_time()
    assert [account.epsilon(cycle, cycle // 10) for cycle in range(1, 101)] == history
    assert time.process_time() - start < 0.2, "what is known is not computed again"


@pytest.mark.parametrize(("epsilon", "noise"), KNOWN_WHOLE_GROUPS.items())
def test_noise_of_whole_groups_is_the_known_one(epsilon: float, noise: float) -> None:
    calibrated = calibrate_noise(epsilon, 1e-3, 100, 1.0)
    assert round(calibrated, 2) == noise
    assert gaussian_delta(calibrated / 10, epsilon) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("epsilon", "noise"), KNOWN_POISSON.items())
def test_noise_of_poisson_draws_is_at_most_the_known_one(epsilon: float, noise: float) -> None:
    """The known values are what dp-accounting's search returns; the smallest noise lies within its tolerance below."""
    searched = dp_accounting.calibrate_dp_mechanism(
        lambda: dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3),
        lambda value: dp_accounting.SelfComposedDpEvent(poisson(value, 0.1), 100),
        epsilon,
        1e-5,
        tol=1e-3,
    )
    assert round(searched, 3) == noise
    calibrated = calibrate_noise(epsilon, 1e-5, 100, 0.1)
    assert searched - 0.0011 <= calibrated <= searched
    assert reference_epsilon([(poisson(calibrated, 0.1), 100)], 1e-5) <= epsilon
    assert reference_epsilon([(poisson(calibrated * (1 - 1e-3), 0.1), 100)], 1e-5) > epsilon


@pytest.mark.parametrize("sampling", [1.0, 0.05])
@pytest.mark.parametrize("epsilon", [0.3, 3.0, 30.0])
def test_calibrated_noise_keeps_the_budget_and_hardly_less_would(epsilon: float, sampling: float) -> None:
    parts = {"one_off": (("counts", 40.0),), "evaluation_noise": 90.0}
    noise = calibrate_noise(epsilon, 1e-5, 50, sampling, evaluations=3, **parts)  # type: ignore[arg-type]

    def spend(multiplier: float) -> float:
        account = PrivacyAccount(delta=1e-5, noise_multiplier=multiplier, sampling=sampling, **parts)  # type: ignore[arg-type]
        return account.epsilon(50, 3)

    assert spend(noise) <= epsilon < spend(noise * (1 - 1e-3))
    assert noise > calibrate_noise(epsilon, 1e-5, 50, sampling)


def test_an_infinite_budget_needs_no_noise() -> None:
    assert calibrate_noise(math.inf, 1e-5, 10, 0.1) == 0.0
    assert calibrate_gaussian_rdp(math.inf, 1e-5, 10) == 0.0


@pytest.mark.parametrize("sampling", [1.0, 0.1])
def test_largest_participations_is_the_last_that_fits(sampling: float) -> None:
    account = PrivacyAccount(delta=1e-5, noise_multiplier=2.0, sampling=sampling, evaluation_noise=20.0)
    for epsilon, rate in [(5.0, 0.0), (5.0, 0.1), (2.5, 1.0)]:
        largest = account.largest_participations(epsilon, rate)
        assert largest > 0
        spend = [account.epsilon(count, math.ceil(round(count * rate, 9))) for count in (largest, largest + 1)]
        assert spend[0] <= epsilon < spend[1]


def test_largest_participations_at_the_ends() -> None:
    account = PrivacyAccount(delta=1e-5, noise_multiplier=1.0, one_off=(("counts", 1.0),))
    assert account.largest_participations(1.0) == 0
    assert account.largest_participations(math.inf) == accounting.MOST_PARTICIPATIONS
    quiet = PrivacyAccount(delta=1e-5, noise_multiplier=math.inf)
    assert quiet.largest_participations(1.0) == accounting.MOST_PARTICIPATIONS
    # 0.1 · 30 is a little above 3 in floating point, which is no reason for a fourth evaluation.
    loud = PrivacyAccount(delta=1e-5, noise_multiplier=10.0, evaluation_noise=3.0)
    assert loud.largest_participations(loud.epsilon(30, 3), 0.1) == 30


def test_joint_multiplier_is_that_of_the_scaled_vector() -> None:
    """Two releases of a vector of norm 1, with noise s₁ and s₂, are one release of (x/s₁, x/s₂) with unit noise."""
    assert combine_multipliers(2.0, 3.0, 6.0) == pytest.approx(1 / np.linalg.norm([1 / 2, 1 / 3, 1 / 6]))
    assert combine_multipliers() == math.inf
    assert combine_multipliers(5.0) == combine_multipliers(5.0, math.inf) == 5.0
    assert combine_multipliers(0.0, 5.0) == 0.0
    assert combine_multipliers(1e-200, 1e-200) == pytest.approx(1e-200 / math.sqrt(2))


@pytest.mark.parametrize(("noise", "count", "delta"), [(4.8, 100, 1e-3), (14.45, 100, 1e-5), (1.0, 1, 1e-6)])
def test_rdp_bounds_the_exact_epsilon_from_above(noise: float, count: int, delta: float) -> None:
    """By composing `count` events one by one; the conversion loses a little."""
    rdp = epsilon_of_gaussian_rdp(noise, count, delta)
    accountant = dp_accounting.rdp.RdpAccountant()
    for _ in range(count):
        accountant.compose(dp_accounting.GaussianDpEvent(noise))
    assert rdp == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    exact = gaussian_epsilon(noise / math.sqrt(count), delta)
    assert exact <= rdp <= 1.25 * exact


def test_rdp_calibration_keeps_the_budget() -> None:
    for epsilon, delta, count in [(8.0, 1e-3, 100), (1.0, 1e-6, 30), (0.2, 1e-5, 1)]:
        noise = calibrate_gaussian_rdp(epsilon, delta, count)
        assert epsilon_of_gaussian_rdp(noise, count, delta) <= epsilon
        assert epsilon_of_gaussian_rdp(noise * (1 - 1e-3), count, delta) > epsilon
        assert noise >= calibrate_noise(epsilon, delta, count) * (1 - 1e-9)


def test_rdp_extremes() -> None:
    assert epsilon_of_gaussian_rdp(0.0, 1, 1e-5) == math.inf
    assert epsilon_of_gaussian_rdp(0.0, 0, 1e-5) == 0.0
    assert epsilon_of_gaussian_rdp(math.inf, 9, 1e-5) == 0.0


@pytest.mark.parametrize(("scale", "clients"), [(0.5, 2), (0.6, 5), (1.0, 4), (2.0, 3)])
def test_sums_of_discrete_noise_stay_below_their_divergence(scale: float, clients: int) -> None:
    """Rényi divergences of the sum and the shifted sum, summed up over the integers, at several orders."""
    grid = np.arange(-60, 61)
    single = np.exp(-(grid**2) / (2 * scale**2))
    total = np.array([1.0])
    for _ in range(clients):
        total = np.convolve(total, single / single.sum())
    for shift in (1, 2):
        multiplier = sum_discrete_noise(scale, clients, float(shift), dimension=1)
        moved, still = total[:-shift], total[shift:]
        valid = (moved > 1e-250) & (still > 1e-250)
        for order in (1.5, 2.0, 8.0, 20.0):
            logs = order * np.log(moved[valid]) + (1 - order) * np.log(still[valid])
            divergence = np.logaddexp.reduce(logs) / (order - 1)
            assert divergence <= order / (2 * multiplier**2) + 1e-12
            # Without the correction, the sum of narrow noise would break the bound of a Gaussian of its width.
            if scale == 0.5 and shift == 1 and order == 1.5:
                assert divergence > order / (2 * clients * scale**2)


def test_wide_discrete_noise_loses_nothing() -> None:
    assert sum_discrete_noise(3.0, 100, 10.0, 10**6) == pytest.approx(3.0, rel=1e-6)
    assert sum_discrete_noise(3.0, 1, 2.0, 50) == pytest.approx(1.5, rel=1e-12)
    with pytest.raises(ValueError, match=r"a scale of at least 0\.5"):
        sum_discrete_noise(0.3, 5, 1.0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be a number above 0"),
        ({"epsilon": math.nan}, "epsilon is nan; it must be a number above 0"),
        ({"delta": 0.0}, "delta is 0.0; it must be a number above 0 and below 1"),
        ({"delta": 1.0}, "delta is 1.0; it must be a number above 0 and below 1"),
        ({"delta": 1e-14, "sampling": 0.5}, "delta is 1e-14; with sampling it must be at least 1e-12"),
        ({"participations": 0}, "participations is 0; it must be a whole number of at least 1"),
        ({"sampling": 0.0}, "sampling is 0.0; it must be a number above 0 and at most 1"),
        ({"one_off": (("counts", -1.0),)}, "the noise of counts is -1.0"),
        ({"one_off": (("counts", 5.0), ("counts", 6.0))}, "give every part a name of its own"),
        ({"one_off": (("training", 5.0),)}, "give every part a name of its own"),
        ({"evaluations": 3}, "without evaluation_noise no evaluation may be released"),
        (
            {"one_off": (("class counts", 1.0), ("sums", 9.0))},
            r"epsilon is 2; .* cost 4\.4\d+ already, most of it class counts \(4\.37\d* alone\): raise epsilon",
        ),
        ({"evaluations": 9, "evaluation_noise": 3.0}, "most of it evaluation"),
    ],
)
def test_impossible_budgets_are_refused_in_one_line(options: dict[str, object], message: str) -> None:
    arguments = {"epsilon": 2.0, "delta": 1e-5, "participations": 10, "sampling": 1.0} | options
    with pytest.raises(ValueError, match=message) as error:
        calibrate_noise(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_counts_are_whole_numbers() -> None:
    account = PrivacyAccount(delta=1e-5, noise_multiplier=1.0)
    assert account.epsilon(np.int64(3)) == account.epsilon(3)  # type: ignore[arg-type]
    for count in (-1, 2.5):
        with pytest.raises(ValueError, match=r"participations is .*; it must be a whole number of at least 0"):
            account.epsilon(count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit is 'person'; use 'client' or 'example'"):
        PrivacyAccount(delta=1e-5, noise_multiplier=1.0, unit="person")  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r"privacy needs dp-accounting, .*: run pip install dp-accounting"):
        import_privacy_package("dp_accounting")
