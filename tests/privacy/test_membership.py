"""What shared pools of scores leak about membership: raw scores nearly everything, histograms next to nothing."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.metrics.delong import delong_interval
from fedauc.privacy.membership import attack_histogram_pool, attack_raw_pool, label_statistics


def draw_scores() -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Scores of 400 members and 400 other rows of one distribution."""
    generator = np.random.default_rng(0)
    return generator.normal(size=400), generator.normal(size=400), generator


@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_a_raw_pool_reveals_its_members(drift: float) -> None:
    """Also when the model, and with it the scores that the adversary computes, changed a little since."""
    members, others, generator = draw_scores()
    candidates = members + drift * generator.normal(size=400)
    interval = delong_interval(
        *label_statistics(attack_raw_pool(candidates, members), attack_raw_pool(others, members))
    )
    assert interval.estimate > 0.95
    assert interval.low > 0.9


def test_a_histogram_with_noise_hides_its_members() -> None:
    members, others, generator = draw_scores()
    edges = np.linspace(-4, 4, 33)
    centers = (edges[1:] + edges[:-1]) / 2
    masses = np.histogram(members, edges)[0] + generator.normal(scale=4.8, size=32)
    attacks = [attack_histogram_pool(scores, centers, masses) for scores in (members, others)]
    interval = delong_interval(*label_statistics(*attacks))
    # The error is 0.02; a member adds 1 to a mass of about 30.
    assert abs(interval.estimate - 0.5) < 0.08


def test_the_nearest_score_equals_the_smallest_of_all_distances() -> None:
    members, others, _ = draw_scores()
    distances = np.abs(others[:, None] - members[None, :]).min(1)
    np.testing.assert_allclose(attack_raw_pool(others, members), -distances)
    np.testing.assert_array_equal(attack_raw_pool(members, members), 0)


def test_the_bin_of_a_score_has_the_nearest_centre_in_any_order() -> None:
    generator = np.random.default_rng(1)
    centers, masses, scores = generator.normal(size=20), generator.normal(size=20), generator.normal(size=100)
    nearest = np.abs(scores[:, None] - centers[None, :]).argmin(1)
    np.testing.assert_array_equal(attack_histogram_pool(scores, centers, masses), masses[nearest])


def test_mistakes_have_one_line_errors() -> None:
    with pytest.raises(ValueError, match="pool has shape"):
        attack_raw_pool(np.zeros(3), np.zeros(0))
    with pytest.raises(ValueError, match="candidate_scores has values that are not finite"):
        attack_raw_pool(np.array([np.nan]), np.zeros(3))
    with pytest.raises(ValueError, match="give one mass per bin"):
        attack_histogram_pool(np.zeros(3), np.zeros(4), np.zeros(5))
