"""From the scores of canaries to an estimate and a lower bound of the privacy loss, and to a verdict.

Two tests complement each other. The scores of canaries in the run against those outside tell how well an adversary
guesses membership (`estimate_gdp`, `clopper_pearson_epsilon`), which bounds ε and μ from below. The projections on
canaries outside the run must look like the declared noise (`check_noise`), which finds missing, repeated or wrongly
correlated noise even where it does not yet help this adversary.

The estimates are reported with 95 % limits. A verdict of "violated" takes more: a correct mechanism attains its bound,
so that one audit in twenty would be beyond a 95 % limit by chance. Tests of the verdict therefore reject at
ALARM_LEVEL, corrected for their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedauc.privacy import import_privacy_package

if TYPE_CHECKING:
    from fedauc.privacy.canaries import CanaryStatistics

ALARM_LEVEL = 1e-4
"""The probability that the verdict on a correct mechanism is "violated", of either part of the audit."""

CONFIDENCE_LEVEL = 0.95


class GdpEstimate(NamedTuple):
    """An estimate of μ, its one-sided lower and upper confidence limits, and its standard error."""

    mu: float
    low: float
    high: float
    error: float


class NoiseCheck(NamedTuple):
    """How the releases look on canaries outside the run, in units of the declared noise, and what is wrong with it.

    `deviation` is over all rounds, `smallest_deviation` that of the quietest round; both are about 1 under the declared
    noise, and larger with the signal of clients. `largest_autocorrelation` is the one furthest from 0, at lag `lag`.
    """

    deviation: float
    smallest_deviation: float
    largest_autocorrelation: float
    lag: int
    problems: tuple[str, ...]


class AuditResult(NamedTuple):
    """What an audit found, beside what is proven.

    μ belongs to an adversary who knows which canaries were drawn, ε to one who does not: without Poisson draws they are
    the same adversary. `epsilon_low` and `mu_low`, `mu_high` are one-sided 95 % limits from the Gaussian estimate;
    `epsilon_clopper_pearson` is a 95 % lower limit that assumes no distribution.
    """

    canaries_in: int
    canaries_out: int
    delta: float
    mu: float
    mu_low: float
    mu_high: float
    proven_mu: float
    epsilon: float
    epsilon_low: float
    epsilon_clopper_pearson: float
    proven_epsilon: float
    noise: NoiseCheck
    verdict: Literal["consistent", "violated"]
    reasons: tuple[str, ...]


def epsilon_of_gdp(mu: float, delta: float) -> float:
    """The ε at which μ-Gaussian differential privacy is (ε, δ)-differentially private; 0 where δ alone suffices.

    Solves δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) (Balle and Wang, Improving the Gaussian mechanism, ICML 2018; Dong,
    Roth and Su, Gaussian differential privacy, 2022).

    >>> round(epsilon_of_gdp(1.0, 1e-5), 3)
    4.377
    """
    _check_delta(delta)
    if math.isnan(mu) or mu < 0:
        raise ValueError(f"mu is {mu}; it must be at least 0")
    if mu == 0 or _delta_of_gdp(0.0, mu) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    # There Φ(μ/2 - ε/μ) is at most exp(-log(1/δ)) / 2, so that the upper end lies beyond the solution.
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return _find_root(lambda epsilon: _delta_of_gdp(epsilon, mu) - delta, 0.0, upper)


def gdp_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian differential privacy implies (ε, δ): the inverse of `epsilon_of_gdp`.

    >>> round(gdp_of_epsilon(4.377, 1e-5), 3)
    1.0
    """
    _check_delta(delta)
    if math.isnan(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon is {epsilon}; it must be at least 0")
    if math.isinf(epsilon):
        return math.inf
    # δ of (0, μ) is below 0.4 μ, so that μ = δ is too small for every ε.
    lower = upper = delta
    while _delta_of_gdp(epsilon, upper) <= delta:
        upper *= 2
    return _find_root(lambda mu: _delta_of_gdp(epsilon, mu) - delta, lower, upper)


def estimate_gdp(in_scores: np.ndarray, out_scores: np.ndarray, level: float = CONFIDENCE_LEVEL) -> GdpEstimate:
    """Estimate μ from scores `[m]` in the run and `[n]` outside, as if they were normal with one variance.

    μ = (mean in - mean out) / s with s the pooled deviation. The limits are one-sided at `level`, by the delta method:
    the variance of μ is 1/m + 1/n + μ²/(2(m + n - 2)), the large-sample form of the noncentral t distribution. μ is the
    power of this adversary, so that the lower limit bounds the μ of the mechanism; the upper one bounds this
    adversary's only.
    """
    m, n = _check_scores(in_scores, out_scores)
    difference = float(np.mean(in_scores) - np.mean(out_scores))
    squares = float(np.var(in_scores)) * m + float(np.var(out_scores)) * n
    if squares == 0:
        # Scores without any variance: the adversary either knows everything or nothing.
        separated = math.inf if difference > 0 else 0.0
        return GdpEstimate(separated, separated, separated, 0.0)
    mu = difference / math.sqrt(squares / (m + n - 2))
    error = math.sqrt(1 / m + 1 / n + mu * mu / (2 * (m + n - 2)))
    width = NormalDist().inv_cdf(level) * error
    return GdpEstimate(mu, mu - width, mu + width, error)


def clopper_pearson_epsilon(
    in_scores: np.ndarray, out_scores: np.ndarray, delta: float, level: float = CONFIDENCE_LEVEL
) -> float:
    """A lower limit of ε at confidence `level` that assumes no distribution of the scores; 0 when nothing is shown.

    The adversary says "in" above a threshold. (ε, δ) bounds its true-positive rate by e^ε times its false-positive rate
    plus δ, so ε ≥ log((TPR - δ) / FPR). The thresholds are order statistics of the scores outside: with k of n above,
    the FPR is Beta(k + 1, n - k), exactly. The TPR at a threshold is binomial (Clopper and Pearson 1934). The ranks
    k = 0, 1, 2, 4, 8 … are fixed before the scores are seen, and the error is shared equally among all bounds.

    With m and n scores it cannot exceed about log(n / log(1/error)): many canaries are needed to show a large ε.
    """
    m, n = _check_scores(in_scores, out_scores)
    _check_delta(delta)
    beta = import_privacy_package("scipy.stats").beta
    ranks = [0, *(1 << power for power in range(n.bit_length()) if 1 << power <= n // 2)]
    error = (1 - level) / (2 * len(ranks))
    thresholds = np.sort(out_scores)[::-1]
    epsilon = 0.0
    for rank in ranks:
        hits = int(np.sum(in_scores > thresholds[rank]))
        true_positive_rate = float(beta.ppf(error, hits, m - hits + 1)) if hits else 0.0
        false_positive_rate = float(beta.ppf(1 - error, rank + 1, n - rank))
        if true_positive_rate > delta:
            epsilon = max(epsilon, math.log((true_positive_rate - delta) / false_positive_rate))
    return epsilon


def check_noise(statistics: CanaryStatistics, level: float = ALARM_LEVEL) -> NoiseCheck:
    """Test that the null projections and the null scores look like the declared noise, or like more than it.

    - *Too little noise*: mean squares over all rounds, in each round, and of the null scores against the lower tail of
      χ². n correlated projections (variance of a correlation 1/d) count as n / (1 + (n-1)/d) independent ones.
      Clients add to a mean square, so they never cause an alarm, and too much noise looks like clients.
    - *Correlation over rounds*, which repeated noise or other bands leave behind after whitening. Clients are
      correlated over rounds as well. Their autocovariance is at most their mean square (Cauchy-Schwarz), which is the
      excess s of the variance over 1: an alarm needs |autocovariance| - s > 0. Under noise alone that difference
      has variance at most 3 per projection (1 + 2). A signal whose autocovariance is s - g adds at most 8 g to that
      variance, from its products with noise, but lowers the mean by g; the sum is largest at g = 0 unless projections
      are few, for which the error has a floor. Correlations below s stay hidden: where the clients' signal is large,
      subtract their known sum from the releases first.

    Each of the four families of tests rejects at level/4, divided by its number of rounds or lags.
    """
    variances, autocovariances, canaries, dimension = statistics.null_projections
    _check_scores(statistics.in_scores, statistics.out_scores)
    stats = import_privacy_package("scipy.stats")
    rounds, share = len(variances), level / 4
    overlap = 1 + (canaries - 1) / dimension
    variance, quietest = float(variances.mean()), int(np.argmin(variances))
    problems = []

    def is_too_small(mean_square: float, count: float, tests: int) -> bool:
        return float(stats.chi2.cdf(mean_square * count / overlap, count / overlap)) * tests < share

    if is_too_small(variance, canaries * rounds, 1):
        problems.append(f"the noise is too small: its deviation is {math.sqrt(variance):.3f} of the declared one")
    elif is_too_small(float(variances[quietest]), canaries, rounds):
        problems.append(
            f"the noise of round {quietest} is too small: its deviation is {math.sqrt(variances[quietest]):.3f} "
            "of the declared one"
        )
    mean_square = float(np.mean(statistics.out_scores**2))
    if is_too_small(mean_square, len(statistics.out_scores), 1):
        problems.append(f"scores outside the run have deviation {math.sqrt(mean_square):.3f}; the noise alone gives 1")
    signal, largest_overlap = max(0.0, variance - 1), (1 + math.sqrt(canaries / dimension)) ** 2
    quantile, projections = NormalDist().inv_cdf(1 - share / (2 * len(autocovariances))), canaries * rounds
    error = math.sqrt(max(3 * overlap, (4 * largest_overlap * quantile) ** 2 / projections) / projections)
    worst = int(np.argmax(np.abs(autocovariances)))
    if abs(autocovariances[worst]) - signal > quantile * error:
        problems.append(
            f"whitened rounds {worst + 1} apart have correlation {autocovariances[worst] / variance:.3f}, more "
            "than clients explain: the noise is repeated or has other bands than declared"
        )
    return NoiseCheck(
        math.sqrt(variance),
        math.sqrt(variances[quietest]),
        float(autocovariances[worst] / variance) if variance else 0.0,
        worst + 1,
        tuple(problems),
    )


def audit_canaries(
    statistics: CanaryStatistics,
    proven_mu: float,
    proven_epsilon: float,
    delta: float,
    level: float = ALARM_LEVEL,
) -> AuditResult:
    """Compare what the canaries show with what is proven.

    `proven_mu` is for an adversary who knows the draws: with Poisson draws the μ without amplification, for which
    `statistics.declared_mu` may stand. `proven_epsilon` may be amplified; it is compared with scores over all turns.
    The verdict is "violated" when the noise fails `check_noise`, or when at error `level` in all (a third for each)

    - the lower limit of μ exceeds the proven μ,
    - the lower limit of ε from scores over all turns exceeds the proven ε, or
    - the difference of the mean scores, which are in units of the declared noise and therefore do not depend on its
      real size, exceeds the proven μ: a canary moved the sum by more than the clip norm.
    """
    in_scores, out_scores = statistics.in_scores, statistics.out_scores
    m, n = _check_scores(in_scores, out_scores)
    _check_delta(delta)
    for name, value in (("proven_mu", proven_mu), ("proven_epsilon", proven_epsilon)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    estimate = estimate_gdp(in_scores, out_scores)
    all_turns = estimate_gdp(statistics.in_scores_all_turns, statistics.out_scores_all_turns)
    noise = check_noise(statistics, level)
    quantile = NormalDist().inv_cdf(1 - level / 3)
    reasons = list(noise.problems)
    if (strict_mu := estimate.mu - quantile * estimate.error) > proven_mu:
        reasons.append(f"canaries are recognised with mu above {strict_mu:.3g}; proven is at most {proven_mu:.3g}")
    strict_epsilon = epsilon_of_gdp(max(0.0, all_turns.mu - quantile * all_turns.error), delta)
    if strict_epsilon > proven_epsilon:
        reasons.append(f"canaries show an epsilon above {strict_epsilon:.3g}; proven is at most {proven_epsilon:.3g}")
    difference = float(in_scores.mean() - out_scores.mean())
    difference -= quantile * math.sqrt(float(in_scores.var(ddof=1)) / m + float(out_scores.var(ddof=1)) / n)
    if difference > proven_mu:
        reasons.append(
            f"canaries move the sum by more than {difference:.3g} deviations of the declared noise; "
            f"the clip norm allows {proven_mu:.3g}"
        )
    return AuditResult(
        canaries_in=m,
        canaries_out=n,
        delta=delta,
        mu=estimate.mu,
        mu_low=estimate.low,
        mu_high=estimate.high,
        proven_mu=proven_mu,
        epsilon=epsilon_of_gdp(max(0.0, all_turns.mu), delta),
        epsilon_low=epsilon_of_gdp(max(0.0, all_turns.low), delta),
        epsilon_clopper_pearson=clopper_pearson_epsilon(
            statistics.in_scores_all_turns, statistics.out_scores_all_turns, delta
        ),
        proven_epsilon=proven_epsilon,
        noise=noise,
        verdict="violated" if reasons else "consistent",
        reasons=tuple(reasons),
    )


def _delta_of_gdp(epsilon: float, mu: float) -> float:
    if math.isinf(mu):
        return 1.0
    log_ndtr = import_privacy_package("scipy.special").log_ndtr
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    # e^ε alone overflows for ε above 709; the product does not.
    return math.exp(first) - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))


def _find_root(function: Callable[[float], float], lower: float, upper: float) -> float:
    return float(import_privacy_package("scipy.optimize").brentq(function, lower, upper, xtol=1e-14, rtol=1e-12))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must lie strictly between 0 and 1: use for example 1e-5")


def _check_scores(in_scores: np.ndarray, out_scores: np.ndarray) -> tuple[int, int]:
    """The numbers of scores: at least two on each side, all finite."""
    for name, scores in (("in the run", in_scores), ("outside the run", out_scores)):
        if len(scores) < 2:
            raise ValueError(
                f"canaries {name}: {len(scores)} have a score; an audit needs at least 2: use more canaries"
            )
        if not np.isfinite(scores).all():
            raise ValueError(f"canaries {name} have scores that are not finite; an audit needs finite releases")
    return len(in_scores), len(out_scores)
