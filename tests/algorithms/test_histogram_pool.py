"""Histogram pools: masses against numpy, the mean over bins against the mean over scores, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedauc.algorithms._histogram_pool import (
    HistogramShared,
    normalize_masses,
    project_onto_simplex,
    read_distribution,
    spread_over_bins,
)
from fedauc.algorithms.pairwise import Pairwise
from fedauc.interfaces import ScoreHistogram
from fedauc.objectives import find_objectives
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.kinds import Active, GapObjective, Passive
from fedauc.objectives.square import PairwiseSquare
from fedauc.testing.small_federation import run_rounds, small_recipe
from fedauc.trees import tree_leaves

GAP_OBJECTIVES = [kind() for kind in find_objectives().values() if issubclass(kind, GapObjective)]
SMOOTH = [objective for objective in GAP_OBJECTIVES if objective.name in ("square", "sigmoid", "pairwise-logistic")]
every_gap_objective = pytest.mark.parametrize("objective", GAP_OBJECTIVES, ids=lambda objective: objective.name)


def spread_with_numpy(scores: np.ndarray, weights: np.ndarray, low: float, high: float, bins: int) -> np.ndarray:
    """Masses by a loop over scores."""
    masses, width = np.zeros(bins), (high - low) / (bins - 1)
    for score, weight in zip(scores, weights, strict=True):
        position = min(max((score - low) / width, 0.0), bins - 1.0)
        left = min(int(position), bins - 2)
        masses[left] += weight * (1 - (position - left))
        masses[left + 1] += weight * (position - left)
    return masses


def make_histogram(
    positives: torch.Tensor, negatives: torch.Tensor, low: float, high: float, bins: int
) -> ScoreHistogram:
    ends = torch.tensor([low, high], dtype=torch.float64)
    masses = [
        spread_over_bins(scores, torch.full_like(scores, 1 / len(scores)), ends, bins)
        for scores in (positives, negatives)
    ]
    return ScoreHistogram(torch.stack(masses), ends)


def make_active(rng: np.random.Generator) -> Active:
    positives, negatives = (torch.from_numpy(rng.normal(size=count)) for count in (3, 5))
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    return Active(positives, negatives, weights, torch.full((5,), 0.2, dtype=torch.float64))


def test_masses_are_those_of_a_loop_over_scores() -> None:
    rng = np.random.default_rng(0)
    scores, weights = 3 * rng.normal(size=200), rng.random(200)
    expected = spread_with_numpy(scores, weights, -4.0, 5.0, 11)
    ends = torch.tensor([-4.0, 5.0], dtype=torch.float64)
    masses = spread_over_bins(torch.from_numpy(scores), torch.from_numpy(weights), ends, 11)
    np.testing.assert_allclose(masses.numpy(), expected, rtol=1e-12, atol=1e-14)
    assert float(masses.sum()) == pytest.approx(weights.sum(), rel=1e-12)


def test_a_stack_of_clients_gives_what_each_client_gives_alone() -> None:
    rng = np.random.default_rng(1)
    scores, weights = torch.from_numpy(rng.normal(size=(3, 8))), torch.from_numpy(rng.random((3, 8)))
    ends = torch.tensor([-2.0, 2.0], dtype=torch.float64).expand(3, 2)
    stacked = spread_over_bins(scores, weights, ends, 6)
    for client in range(3):
        assert torch.equal(stacked[client], spread_over_bins(scores[client], weights[client], ends[0], 6))


def test_spreading_keeps_the_mean_of_scores_inside_the_ends() -> None:
    rng = np.random.default_rng(2)
    scores = torch.from_numpy(rng.uniform(-3, 3, size=500))
    pool = make_histogram(scores, scores, -3.0, 3.0, 7)
    distribution = read_distribution(pool)
    assert float(distribution.positive_masses @ distribution.scores) == pytest.approx(float(scores.mean()), abs=1e-12)


@every_gap_objective
def test_scores_at_the_bins_give_the_raw_pools_slopes_and_loss(objective: GapObjective) -> None:
    rng = np.random.default_rng(3)
    positives, negatives = (torch.from_numpy(rng.integers(-8, 9, size=count) / 4) for count in (40, 60))
    active, passive = make_active(rng), Passive(positives, negatives)
    distribution = read_distribution(make_histogram(positives, negatives, -2.0, 2.0, 17))
    exact, binned = objective.active_slopes(active, passive), objective.active_slopes(active, distribution)
    torch.testing.assert_close(binned.positives, exact.positives, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(binned.negatives, exact.negatives, rtol=1e-10, atol=1e-12)
    loss = objective.monitored_loss(active, distribution)
    torch.testing.assert_close(loss, objective.monitored_loss(active, passive), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("objective", SMOOTH, ids=lambda objective: objective.name)
def test_the_error_falls_with_the_square_of_the_bin_width(objective: GapObjective) -> None:
    """Linear interpolation: four times as fine bins have a sixteenth of the error, for any smooth loss."""
    rng = np.random.default_rng(4)
    positives, negatives = (torch.from_numpy(rng.uniform(-3, 3, size=400)) for _ in range(2))
    active, passive = make_active(rng), Passive(positives, negatives)
    exact = objective.active_slopes(active, passive)
    errors = []
    for bins in (9, 33):
        binned = objective.active_slopes(
            active, read_distribution(make_histogram(positives, negatives, -3.0, 3.0, bins))
        )
        errors.append(float((binned.positives - exact.positives).abs().max()))
    width = 6 / 8
    # The third derivatives of sigmoid and logistic are at most 1/8 and 0.1; a slope is at most 1/3 of one of them.
    assert errors[0] <= width**2 / 8 / 3
    assert errors[1] <= errors[0] / 10 + 1e-12


def test_the_expectation_has_a_lower_variance_than_drawn_scores() -> None:
    """The slope of one active score over draws of 16 passive scores, against the mean over their distribution."""
    rng = np.random.default_rng(5)
    objective, pool = (
        GAP_OBJECTIVES[[o.name for o in GAP_OBJECTIVES].index("sigmoid")],
        torch.from_numpy(rng.normal(size=4000)),
    )
    active = make_active(rng)
    drawn = [
        objective.active_slopes(active, Passive(*(pool[rng.integers(0, 4000, 16)] for _ in range(2)))).positives
        for _ in range(300)
    ]
    expected = objective.active_slopes(active, Passive(pool, pool)).positives
    binned = objective.active_slopes(active, read_distribution(make_histogram(pool, pool, -5.0, 5.0, 24))).positives
    spread = torch.stack(drawn).std(0)
    assert bool(((binned - expected).abs() < 0.1 * spread).all())


def test_projection_gives_the_nearest_distribution() -> None:
    """Against a bisection for the shift t with sum of (x - t)₊ = 1, the optimality condition of the projection."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        vector = rng.normal(size=7)
        low, high = vector.min() - 1, vector.max()
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if np.maximum(vector - middle, 0).sum() > 1 else (low, middle)
        projected = project_onto_simplex(torch.from_numpy(vector))
        np.testing.assert_allclose(projected.numpy(), np.maximum(vector - low, 0), atol=1e-9)


def test_a_class_without_mass_keeps_its_old_distribution() -> None:
    total = torch.tensor([[0.0, 0.0, 0.0], [1.0, 3.0, 0.0]])
    old = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    expected = torch.tensor([[0.2, 0.3, 0.5], [0.25, 0.75, 0.0]])
    torch.testing.assert_close(normalize_masses(total, old), expected)


def test_noise_that_makes_masses_negative_leaves_a_distribution() -> None:
    total = torch.tensor([[5.0, -2.0, 3.0, -1.0], [-1.0, -1.0, -1.0, 1.0]])
    masses = normalize_masses(total, torch.full((2, 4), 0.25))
    assert bool((masses >= 0).all())
    torch.testing.assert_close(masses.sum(-1), torch.ones(2))
    # The second class has no mass in all, so nothing is known of it.
    assert masses[1].tolist() == [0.25] * 4


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
def test_every_engine_gives_the_loops_run(weighting: str) -> None:
    runs = [
        run_rounds(small_recipe("cycp-pairwise", pool="histogram", weighting=weighting, engine=engine, cycles=3))
        for engine in ("loop", "batched")
    ]
    for expected, finished in zip(*runs, strict=True):
        for left, right in zip(tree_leaves(expected.state.server), tree_leaves(finished.state.server), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-9, atol=1e-12)


def test_a_run_has_no_scoring_rounds_and_sends_no_scores() -> None:
    rounds = run_rounds(small_recipe("cycp-pairwise", pool="histogram", pool_bins=5))
    assert not any(finished.phase.scoring for finished in rounds)
    traffic = rounds[-1].traffic
    # 5 weights, 2 * 5 masses and 2 ends, in both directions.
    assert traffic.floats_up == traffic.floats_down == traffic.visits * (5 + 10 + 2)
    shared = rounds[-1].state.server.shared
    assert isinstance(shared, HistogramShared)
    torch.testing.assert_close(shared.pool.masses.sum(-1), torch.ones(2, dtype=torch.float64))


def test_pools_of_embeddings_have_no_histogram() -> None:
    with pytest.raises(ValueError, match=r"^pool is 'histogram', but the objective 'contrastive' compares embeddings"):
        Pairwise(objective=Contrastive(), pool="histogram")


def test_sigmoid_scores_have_a_histogram_between_0_and_1() -> None:
    rounds = run_rounds(small_recipe("cycp-pairwise", pool="histogram", objective=PairwiseSquare(score="sigmoid")))
    assert rounds[-1].state.server.shared.pool.ends.tolist() == [0.0, 1.0]
