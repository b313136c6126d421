"""The matched filter of canaries against dense algebra, and its distribution under the null."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import kstest

from canary_runs import (
    CLIP_NORM,
    DIMENSION,
    FIVE_BANDS,
    GROUPS,
    ONE_BAND,
    ROUNDS,
    Mechanism,
    band_matrix,
    observe_run,
    release_rounds,
)
from fedauc.privacy import canaries as module
from fedauc.privacy.canaries import UPLOAD_FACTOR, Canaries, CanaryFilter, CanaryStatistics, combine_statistics

# Seven bands reach into the next turn of a group of five, so that the templates of its turns overlap.
SEVEN_BANDS = (*FIVE_BANDS, 0.246, 0.226)


def observe_releases(canaries: Canaries, mechanism: Mechanism, releases: np.ndarray) -> CanaryStatistics:
    canary_filter = CanaryFilter(canaries, mechanism.coefficients, mechanism.noise_multiplier(), CLIP_NORM)
    for release in releases:
        canary_filter.observe_round(release)
    return canary_filter.summarize_statistics()


@pytest.mark.parametrize("probability", [1.0, 0.5])
@pytest.mark.parametrize("coefficients", [ONE_BAND, FIVE_BANDS, SEVEN_BANDS], ids=len)
def test_scores_equal_the_dense_matched_filter(coefficients: Sequence[float], probability: float) -> None:
    canaries = Canaries(3, 30, 100, GROUPS, probability)
    mechanism = Mechanism(coefficients, probability=probability)
    releases = release_rounds(3, mechanism, canaries)
    statistics = observe_releases(canaries, mechanism, releases)
    matrix = band_matrix(coefficients)
    deviation = mechanism.noise_multiplier() * CLIP_NORM
    directions, is_in = canaries.draw_directions(0, 30).astype(float), canaries.flip_coins()
    projections = matrix @ releases @ directions.T / deviation
    attended = np.stack([canaries.draw_attendance(round) for round in range(ROUNDS)])
    turns = np.stack([canaries.find_turns(round) for round in range(ROUNDS)])
    for presence, in_scores, out_scores in (
        (attended, statistics.in_scores, statistics.out_scores),
        (turns, statistics.in_scores_all_turns, statistics.out_scores_all_turns),
    ):
        templates = matrix @ presence
        scores = (templates * projections).sum(0) / np.linalg.norm(templates, axis=0)
        np.testing.assert_allclose(in_scores, scores[is_in], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(out_scores, scores[~is_in], rtol=1e-4, atol=1e-5)
    largest = np.linalg.norm(matrix @ attended, axis=0).max() / mechanism.noise_multiplier()
    assert statistics.declared_mu == pytest.approx(largest)
    null = statistics.null_projections
    outside = projections[:, ~is_in]
    np.testing.assert_allclose(null.variances, (outside**2).mean(1), rtol=1e-4)
    products = [(outside[lag:] * outside[:-lag]).sum() / outside.size for lag in range(1, len(coefficients) + 1)]
    np.testing.assert_allclose(null.autocovariances, products, atol=1e-5)


def test_full_attendance_has_the_wanted_mu_and_only_attended_rounds_count_under_draws() -> None:
    assert observe_run(0, Mechanism(FIVE_BANDS, mu=1.5)).declared_mu == pytest.approx(1.5)
    drawn = observe_run(0, Mechanism(probability=0.3))
    assert drawn.declared_mu < 1
    assert drawn.in_scores.mean() > drawn.in_scores_all_turns.mean() > drawn.out_scores_all_turns.mean()
    # A turn is attended with probability 0.3, so that the mean score over all turns is 0.3 μ.
    assert drawn.in_scores_all_turns.mean() == pytest.approx(0.3, abs=0.3)


def test_directions_drawn_in_blocks_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    canaries, mechanism = Canaries(1, 23, 130, GROUPS), Mechanism(FIVE_BANDS)
    releases = release_rounds(1, mechanism, canaries)
    at_once = observe_releases(canaries, mechanism, releases)
    monkeypatch.setattr(module, "BLOCK_VALUES", 5 * 130)
    in_blocks = observe_releases(canaries, mechanism, releases)
    np.testing.assert_allclose(in_blocks.in_scores, at_once.in_scores, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_blocks.out_scores, at_once.out_scores, rtol=1e-4, atol=1e-5)


def test_directions_are_keyed_unit_vectors_that_are_almost_orthogonal() -> None:
    canaries = Canaries(5, 60, 1999, 4)
    directions = canaries.draw_directions(0, 60)
    np.testing.assert_array_equal(directions[7:9], canaries.draw_directions(7, 9))
    assert not np.array_equal(directions[7], Canaries(6, 60, 1999, 4).draw_directions(7, 8)[0])
    products = directions.astype(float) @ directions.T
    np.testing.assert_allclose(np.diag(products), 1, rtol=1e-5)
    off_diagonal = products[~np.eye(60, dtype=bool)]
    # 1770 different products: their mean square is 1/d up to about 3 %.
    assert (off_diagonal**2).mean() * 1999 == pytest.approx(1, abs=0.15)
    assert np.linalg.norm(canaries.make_upload(3, 0.5)) == pytest.approx(0.5 * UPLOAD_FACTOR, rel=1e-4)


def test_coins_are_fair_and_draws_have_their_probability() -> None:
    canaries = Canaries(2, 4000, 10, 4, 0.25)
    # Four standard deviations of a mean of 4000 coins.
    assert canaries.flip_coins().mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))
    attended = np.stack([canaries.draw_attendance(round) for round in range(8)])
    turns = np.stack([canaries.find_turns(round) for round in range(8)])
    assert not (attended & ~turns).any()
    assert attended[turns].mean() == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 8000))
    np.testing.assert_array_equal(turns.sum(0), 2)
    assert np.array_equal(Canaries(2, 10, 10, 4).draw_attendance(3), Canaries(2, 10, 10, 4).find_turns(3))


@pytest.mark.parametrize("coefficients", [ONE_BAND, FIVE_BANDS], ids=len)
def test_null_scores_are_standard_normal(coefficients: Sequence[float]) -> None:
    """Three runs with a small μ, so that canaries in the run add no visible variance."""
    runs = [observe_run(seed, Mechanism(coefficients, mu=0.1)) for seed in range(3)]
    assert kstest(np.concatenate([run.out_scores for run in runs]), "norm").pvalue > 1e-3
    assert kstest(np.concatenate([run.in_scores - 0.1 for run in runs]), "norm").pvalue > 1e-3


def test_mistakes_have_one_line_errors() -> None:
    canaries = Canaries(0, 4, 6, 2)
    with pytest.raises(ValueError, match="probability of a canary is 0"):
        Canaries(0, 4, 6, 2, 0.0)
    with pytest.raises(ValueError, match="groups of the canaries is 0"):
        Canaries(0, 4, 6, 0)
    with pytest.raises(ValueError, match="noise_multiplier is 0"):
        CanaryFilter(canaries, [1.0], 0.0, 1.0)
    with pytest.raises(ValueError, match="first must not be 0"):
        CanaryFilter(canaries, [], 1.0, 1.0)
    canary_filter = CanaryFilter(canaries, [1.0], 1.0, 1.0)
    with pytest.raises(ValueError, match="round 0 has shape"):
        canary_filter.observe_round(np.zeros(5))
    with pytest.raises(ValueError, match="not finite"):
        canary_filter.observe_round(np.full(6, np.nan))
    with pytest.raises(ValueError, match="attended has shape"):
        canary_filter.observe_round(np.zeros(6), np.ones(3, dtype=bool))


def test_orthogonal_directions_are_orthonormal_and_keyed() -> None:
    canaries = Canaries(3, 30, 40, 4, orthogonal=True)
    directions = canaries.draw_directions(0, 30)
    np.testing.assert_allclose(directions @ directions.T, np.eye(30), atol=1e-6)
    assert np.array_equal(canaries.draw_directions(5, 7), directions[5:7])
    assert not np.allclose(Canaries(4, 30, 40, 4, orthogonal=True).draw_directions(0, 30), directions)
    # A uniformly random frame has mean zero and variance 1/d in every entry.
    frames = np.stack([Canaries(seed, 3, 5, 1, orthogonal=True).draw_directions(0, 3) for seed in range(2000)])
    np.testing.assert_allclose(frames.mean(0), 0, atol=5 * np.sqrt(0.2 / 2000))
    np.testing.assert_allclose((frames**2).mean(0), 0.2, atol=5 * np.sqrt(0.1 / 2000))
    with pytest.raises(ValueError, match="count of the canaries is 41; at most 40"):
        Canaries(0, 41, 40, 1, orthogonal=True)


def test_combined_statistics_are_those_of_all_canaries_side_by_side() -> None:
    first, second = (observe_run(seed, Mechanism()) for seed in (1, 2))
    combined = combine_statistics([first, second])
    assert combined.in_scores.tolist() == [*first.in_scores, *second.in_scores]
    assert combined.out_scores_all_turns.tolist() == [*first.out_scores_all_turns, *second.out_scores_all_turns]
    counts = [part.null_projections.canaries for part in (first, second)]
    assert combined.null_projections.canaries == sum(counts)
    assert combined.null_projections.dimension == 2 * DIMENSION
    squares = [part.null_projections.variances * count for part, count in zip((first, second), counts, strict=True)]
    np.testing.assert_allclose(combined.null_projections.variances, sum(squares) / sum(counts))
    products = [
        part.null_projections.autocovariances * count for part, count in zip((first, second), counts, strict=True)
    ]
    np.testing.assert_allclose(combined.null_projections.autocovariances, sum(products) / sum(counts))
    with pytest.raises(ValueError, match="repeats is empty"):
        combine_statistics([])
