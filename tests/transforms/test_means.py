"""The weighted and the robust means against numpy twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.transforms.robust_means import Krum, Median, TrimmedMean
from fedauc.transforms.weighted_mean import WeightedMean


def make_uploads(clients: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A model's change and a dual variable's, stacked over clients."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(clients, 6))), torch.from_numpy(rng.normal(size=clients))


def equal_weights(clients: int) -> Tensor:
    """Weights that sum to 1."""
    return torch.full((clients,), 1 / clients, dtype=torch.float64)


def test_the_running_sum_equals_the_stack() -> None:
    uploads, weights = make_uploads(4), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mean = WeightedMean()
    total: tuple[Tensor, ...] = ()
    for client in range(4):
        total = mean.add_upload(total, tuple(leaf[client] for leaf in uploads), float(weights[client]))
    stacked = mean.combine(uploads, weights)
    expected = np.average(uploads[0].numpy(), axis=0, weights=weights.numpy())
    np.testing.assert_allclose(stacked[0].numpy(), expected, rtol=1e-14)
    np.testing.assert_allclose(total[0].numpy(), expected, rtol=1e-14)
    np.testing.assert_allclose(total[1].numpy(), stacked[1].numpy(), rtol=1e-14)


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_median_is_numpys(clients: int) -> None:
    uploads = make_uploads(clients)
    result = Median().combine(uploads, equal_weights(clients))
    for leaf, median in zip(uploads, result, strict=True):
        np.testing.assert_allclose(median.numpy(), np.median(leaf.numpy(), axis=0), rtol=1e-14)


@pytest.mark.parametrize(("clients", "out"), [(5, 1), (9, 2), (3, 0)])
def test_the_trimmed_mean_leaves_out_both_ends(clients: int, out: int) -> None:
    uploads = make_uploads(clients)
    result = TrimmedMean(trim=0.25).combine(uploads, equal_weights(clients))
    for leaf, mean in zip(uploads, result, strict=True):
        ordered = np.sort(leaf.numpy(), axis=0)
        np.testing.assert_allclose(mean.numpy(), ordered[out : clients - out].mean(axis=0), rtol=1e-14)


def select_with_numpy(vectors: np.ndarray, wrong: int, selected: int) -> np.ndarray:
    """The positions that Krum selects, by a loop over clients."""
    scores = []
    for client, vector in enumerate(vectors):
        others = np.delete(vectors, client, axis=0)
        distances = np.sort(((others - vector) ** 2).sum(axis=1))
        scores.append(distances[: len(vectors) - wrong - 2].sum())
    return np.argsort(scores, kind="stable")[:selected]


@pytest.mark.parametrize("selected", [1, 3])
def test_krum_selects_as_its_numpy_twin(selected: int) -> None:
    uploads = make_uploads(9, seed=4)
    vectors = np.column_stack([uploads[0].numpy(), uploads[1].numpy()])
    chosen = select_with_numpy(vectors, wrong=2, selected=selected)
    result = Krum(wrong=2, selected=selected).combine(uploads, equal_weights(9))
    np.testing.assert_allclose(result[0].numpy(), uploads[0].numpy()[chosen].mean(axis=0), rtol=1e-14)


@pytest.mark.parametrize("mean", [Median(), TrimmedMean(trim=0.3), Krum(wrong=2)])
def test_two_wrong_clients_of_eight_do_not_move_a_robust_mean_far(mean: Median | TrimmedMean | Krum) -> None:
    """Honest changes lie within 0.5 of 1; the two wrong ones are at -1,000, which moves the weighted mean to -250."""
    honest = 1 + 0.1 * np.random.default_rng(0).normal(size=(6, 20)).clip(-5, 5)
    uploads = (torch.from_numpy(np.concatenate([honest, np.full((2, 20), -1000.0)])),)
    assert float((mean.combine(uploads, equal_weights(8))[0] - 1).abs().max()) < 0.5
    assert float(WeightedMean().combine(uploads, equal_weights(8))[0].max()) < -200


def test_a_cohort_that_is_too_small_is_refused_with_the_bound() -> None:
    with pytest.raises(ValueError, match="wrong is 2; 6 clients per round allow at most 1: lower wrong"):
        Krum(wrong=2).check_cohort_size(6)
    with pytest.raises(ValueError, match="mean is 'krum', which needs 3 clients per round; there are 2"):
        Krum(wrong=0).check_cohort_size(2)
    with pytest.raises(ValueError, match="mean is 'median', which needs 3 clients per round; there are 1"):
        Median().check_cohort_size(1)
    with pytest.raises(ValueError, match=r"trim is 0.1, which leaves out nobody of 6 clients .* raise trim to 0.167"):
        TrimmedMean(trim=0.1).check_cohort_size(6)
