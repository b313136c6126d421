"""Client-level privacy: clipping and noise against numpy, what one client can change, and whole runs."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedauc.algorithms import find_methods
from fedauc.algorithms._histogram_pool import HistogramShared
from fedauc.algorithms.compositional import CompositionalPairwise
from fedauc.experiments.assembly import assemble_training
from fedauc.interfaces import BatchSize, Cohort, Model, Phase, ScoreHistogram, ServerRound, Upload
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.privacy.banded_noise import materialize_matrix, optimize_bands
from fedauc.random_tensors import KeyedNoise, SecretNoise
from fedauc.testing._expectations import same_bits
from fedauc.testing.small_federation import (
    assemble_small,
    linear_scorer,
    record_exchanges,
    run_rounds,
    small_federation,
    small_recipe,
)
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms.client_dp import ClientDP, ClippedUpload, ServerState
from fedauc.trees import tree_leaves, tree_stack

NO_KEY = torch.zeros((), dtype=torch.int64)
METHODS = sorted(name for name, method in find_methods().items() if method.algorithm is not CompositionalPairwise)
"""All but those that share scores with estimates: they are refused (tests/algorithms/test_compositional.py)."""


def make_upload(scale: float, seed: int = 0, masses: float = 1.0) -> Upload:
    """A model's change, and a histogram whose classes have so much mass."""
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(scale * rng.normal(size=7))
    shares = rng.dirichlet(np.ones(4), size=2)
    histogram = ScoreHistogram(torch.from_numpy(masses * shares), torch.zeros(2, dtype=torch.float64))
    return Upload(mean=HistogramShared(Model(weights, torch.zeros(0, dtype=torch.float64)), histogram))


def make_round(round: int, size: float, ends_cycle: bool = True, seed: int = 0) -> ServerRound:
    phase = Phase(round, 0, 0, 0.1, 4, BatchSize(2, 2), ends_cycle=ends_cycle)
    return ServerRound(Cohort(round, (), (), (), size), phase, KeyedNoise(seed, "test", round))


def release_noise(transform: NoisedClientDP, rounds: int, size: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """What the server adds to the change and to the histogram when nobody comes: `[rounds, 7]` and `[rounds, 8]`."""
    zeros = make_upload(0.0, masses=0.0).mean
    state, changes, masses = transform.initial_server_state(zeros), [], []
    for round in range(rounds):
        mean, state = transform.server(transform.zero_mean(zeros), state, make_round(round, size))
        changes.append(mean.model.weights.numpy())
        masses.append(mean.pool.masses.numpy().ravel())
    return np.stack(changes), np.stack(masses)


# ------------------------------------------------------------------------------------------------- at the client


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_change_is_scaled_to_the_norm_and_histograms_to_mass_1(scale: float) -> None:
    upload = make_upload(scale, masses=3.0)
    clipped, _ = ClientDP(clip=0.5, noise_multiplier=1.0).client(upload, (), NO_KEY)
    weights, masses = upload.mean.model.weights.numpy(), upload.mean.pool.masses.numpy()
    expected = weights * min(1, 0.5 / np.linalg.norm(weights))
    np.testing.assert_allclose(clipped.mean.model.weights.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(clipped.mean.pool.masses.numpy(), masses / 3, rtol=1e-12)


def test_a_histogram_of_less_mass_stays_as_it_is() -> None:
    upload = make_upload(0.0, masses=0.4)
    clipped, _ = ClientDP(noise_multiplier=1.0).client(upload, (), NO_KEY)
    assert torch.equal(clipped.mean.pool.masses, upload.mean.pool.masses)


def test_no_upload_has_a_larger_norm_than_the_noise_is_for() -> None:
    """The change has norm at most C; the histogram at most √2, which one score per class reaches."""
    transform = ClientDP(clip=0.5, noise_multiplier=1.0)
    for seed in range(20):
        clipped, _ = transform.client(make_upload(10.0 * seed, seed, masses=1 + seed), (), NO_KEY)
        assert float(clipped.mean.model.weights.norm()) <= 0.5 * (1 + 1e-12)
        assert float(clipped.mean.pool.masses.norm()) <= np.sqrt(2) * (1 + 1e-12)
    # An algorithm of a user may upload anything: masses of both signs that sum to 0, and ends of its own.
    model, _ = make_upload(0.0).mean
    signed = ScoreHistogram(torch.tensor([[5.0, -5.0], [0.0, 0.0]], dtype=torch.float64), torch.tensor([-7.0, 7.0]))
    clipped, _ = transform.client(Upload(mean=HistogramShared(model, signed)), (), NO_KEY)
    assert clipped.mean.pool.masses.tolist() == [[0.5, -0.5], [0.0, 0.0]]
    assert not clipped.mean.pool.ends.any()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e200])
@pytest.mark.parametrize("part", ["model", "pool"])
def test_an_upload_that_is_not_finite_counts_as_zero(value: float, part: str) -> None:
    """One client of a stack of two: the other one keeps its upload. The square of 1e200 is not finite either."""
    upload = Upload(mean=tree_stack([make_upload(0.01, seed).mean for seed in (0, 1)]))
    leaf = upload.mean.model.weights if part == "model" else upload.mean.pool.masses
    leaf.view(2, -1)[0, 3] = value
    clipped, _ = ClientDP(clip=0.5, noise_multiplier=1.0).client(upload, (), torch.zeros(2, dtype=torch.int64))
    if part == "pool" and value == 1e200:
        # A mass of any finite size is cut to 1.
        assert float(clipped.mean.pool.masses[0].sum()) <= 2 * (1 + 1e-12)
        return
    assert not any(leaf[0].any() for leaf in tree_leaves(clipped.mean))
    assert clipped.mean.model.weights[1].any()
    assert clipped.mean.pool.masses[1].any()


def test_clients_say_whether_they_were_within_the_norm_that_was_announced() -> None:
    transform = ClientDP(noise_multiplier=1.0, clip_quantile=0.5)
    upload = make_upload(1.0)
    norm = float(upload.mean.model.weights.norm())
    for limit, expected in ((norm * 1.01, 0.5), (norm * 0.99, -0.5)):
        sent, _ = transform.client(upload, (), NO_KEY, torch.tensor(limit))
        assert isinstance(sent.mean, ClippedUpload)
        assert float(sent.mean.within_norm) == expected
        assert float(sent.mean.upload.model.weights.norm()) == pytest.approx(min(norm, limit))


# ------------------------------------------------------------------------------------------------- at the server


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_noise_times_the_band_matrix_is_independent_noise_of_the_declared_scale(bands: int) -> None:
    """C y / (σ C_clip / M) = z: exactly the standard normal numbers of the source, whatever the bands."""
    rounds, sigma, clip, size = 12, 1.7, 0.3, 10.0
    coefficients = tuple(optimize_bands(rounds, bands).tolist())
    transform = NoisedClientDP(
        clip=clip, noise_multiplier=sigma, bands=bands, coefficients=coefficients, has_histogram=True
    )
    noise, _ = release_noise(transform, rounds, size)
    model_sigma = sigma / np.sqrt(1 - transform.pool_share)
    whitened = materialize_matrix(np.array(coefficients), rounds) @ noise / (model_sigma * clip / size)
    fresh = [KeyedNoise(0, "test", round).draw_normal(0, 7).numpy() for round in range(rounds)]
    np.testing.assert_allclose(whitened, np.stack(fresh), atol=1e-10)


@pytest.mark.parametrize("secret", [False, True])
def test_the_noise_is_normal_with_the_declared_deviation(secret: bool) -> None:
    source = SecretNoise(b"k" * 32, "test") if secret else KeyedNoise(0, "test")
    numbers = source.draw_normal(0, 20_001)
    assert numbers.dtype == torch.float64
    assert len(numbers) == 20_001
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-3
    assert torch.equal(numbers, source.draw_normal(0, 20_001))
    other = source.draw_normal(1, 20_001)
    assert abs(np.corrcoef(numbers.numpy(), other.numpy())[0, 1]) < 0.03


def test_another_secret_gives_other_noise() -> None:
    first, second = (SecretNoise(secret * 32, "test").draw_normal(0, 100) for secret in (b"a", b"b"))
    assert abs(np.corrcoef(first.numpy(), second.numpy())[0, 1]) < 0.5


def test_the_parts_of_an_upload_share_the_noise_budget() -> None:
    transform = ClientDP(noise_multiplier=2.0, clip_quantile=0.5)
    parts = transform.divide_noise(has_histogram=True)
    assert sum(part**-2 for part in parts) ** -0.5 == pytest.approx(2.0, rel=1e-12)
    assert replace(transform, clip_quantile=None).divide_noise(has_histogram=False) == (2.0, 0.0, 0.0)


def test_histograms_get_their_noise_once_per_cycle() -> None:
    transform = NoisedClientDP(noise_multiplier=2.0, has_histogram=True, pool_share=0.25)
    zeros = make_upload(0.0, masses=0.0).mean
    state = transform.initial_server_state(zeros)
    mean, _ = transform.server(zeros, state, make_round(0, 5.0, ends_cycle=False))
    assert not mean.pool.masses.any()
    _, masses = release_noise(replace(transform, bands=1), rounds=400, size=5.0)
    # σ / √share = 4, times √2 for the norm of a histogram, over 5 clients; 3,200 numbers have an error of 1.3 %.
    assert masses.std() == pytest.approx(4 * np.sqrt(2) / 5, rel=0.06)
    assert stats.kstest(masses.ravel() / (4 * np.sqrt(2) / 5), "norm").pvalue > 1e-3


def test_the_clipping_norm_adapts_to_the_quantile() -> None:
    """Clients with norms 1 to 9 and the quantile 1/2: the norm settles near 5."""
    transform = NoisedClientDP(clip=0.1, noise_multiplier=0.01, clip_quantile=0.5, bands=1)
    direction = torch.full((7,), 7**-0.5, dtype=torch.float64)
    zeros = (torch.zeros(7, dtype=torch.float64),)
    state = transform.initial_server_state(zeros)
    for round in range(150):
        assert isinstance(state, ServerState)
        sent = [transform.client(Upload(mean=(norm * direction,)), (), NO_KEY, state.clip)[0] for norm in range(1, 10)]
        mean = ClippedUpload(
            (torch.stack([upload.mean.upload[0] for upload in sent]).mean(0),),
            torch.stack([upload.mean.within_norm for upload in sent]).mean(),
        )
        _, state = transform.server(mean, state, make_round(round, 9.0))
    assert 4.4 < float(state.clip) < 5.6


# ---------------------------------------------------------------------------------------------------- whole runs


def private_settings(method: str, **changes: Any) -> dict[str, Any]:
    """Settings with which a method can be private: drawn by coins, and without raw scores."""
    pairwise = method in ("cycp-pairwise", "rs-pairwise", "fedxl1")
    participation = CyclicPoisson(rate=0.7, groups=3, assignment="random")
    return {"participation": participation, **({"pool": "histogram"} if pairwise else {}), **changes}


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_are_private_on_both_engines_and_resume_to_the_bit(method: str) -> None:
    transforms = (ClientDP(clip=0.2, noise_multiplier=0.3, clip_quantile=0.6),)
    settings = private_settings(method, transforms=transforms, cycles=3)
    loop, batched = (run_rounds(small_recipe(method, engine=engine, **settings)) for engine in ("loop", "batched"))
    for expected, finished in zip(loop, batched, strict=True):
        for left, right in zip(tree_leaves(expected.state[1:]), tree_leaves(finished.state[1:]), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-10)
    training, _, _ = assemble_small(small_recipe(method, engine="loop", **settings))
    assert training.account is not None
    assert training.spent_epsilon(9) == training.account.epsilon(3)
    assert training.spent_epsilon(1) == training.spent_epsilon(3) == training.account.epsilon(1)
    if method not in ("scaffold", "a-scaffold", "codasca", "focus"):
        # Clients of the others keep nothing, so that a state is enough to go on from.
        rest = list(training.rounds(loop[3].state))
        assert same_bits(rest[-1].state[1:], loop[-1].state[1:])


OTHER_ENGINES = ["graphed", pytest.param("compiled", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("engine", OTHER_ENGINES)
@pytest.mark.parametrize("method", ["cycp-pairwise", "cycp-minimax", "a-scaffold"])
def test_other_engines_give_the_loops_private_run(method: str, engine: str) -> None:
    """On a CPU the graphed engine runs its captured steps one by one. The norm adapts, so that clients are told it."""
    transforms = (ClientDP(clip=0.2, noise_multiplier=0.3, clip_quantile=0.6),)
    settings = private_settings(method, transforms=transforms, cycles=2)
    loop, other = (run_rounds(small_recipe(method, engine=name, **settings)) for name in ("loop", engine))
    for expected, finished in zip(loop, other, strict=True):
        for left, right in zip(tree_leaves(expected.state[1:]), tree_leaves(finished.state[1:]), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_budget_gives_the_plain_runs_bits(method: str) -> None:
    settings = private_settings(method)
    plain = run_rounds(small_recipe(method, **settings))
    private = run_rounds(small_recipe(method, epsilon=float("inf"), **settings))
    for expected, finished in zip(plain, private, strict=True):
        assert same_bits(finished.state.server, expected.state.server)


def test_an_infinite_budget_needs_no_adaptive_norm() -> None:
    settings = private_settings("cycp-fedavg")
    adaptive = small_recipe("cycp-fedavg", epsilon=float("inf"), transforms=(ClientDP(clip_quantile=0.5),), **settings)
    plain = run_rounds(small_recipe("cycp-fedavg", **settings))
    assert same_bits(run_rounds(adaptive)[-1].state.server, plain[-1].state.server)


def test_shares_that_leave_nothing_for_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pool_share is 0\.6 and clip_share is 0\.4; together they must be below 1"):
        ClientDP(pool_share=0.6, clip_share=0.4)


def test_noise_from_a_secret_names_the_package_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ValueError, match="needs cryptography, which is not installed: run pip install cryptography"):
        SecretNoise(b"k" * 32, "test").draw_normal(0, 3)


def test_whole_groups_with_an_infinite_budget_give_the_plain_runs_bits() -> None:
    for method in ("cycp-fedavg", "cycp-minimax", "a-scaffold"):
        plain, private = (run_rounds(small_recipe(method, **settings)) for settings in ({}, {"epsilon": float("inf")}))
        assert same_bits(private[-1].state.server, plain[-1].state.server)


def test_a_round_without_clients_still_releases_noise() -> None:
    """With rate 0.01 most cohorts are empty, and the model moves by noise all the same."""
    participation = CyclicPoisson(rate=0.01, groups=3, assignment="random")
    transforms = (ClientDP(clip=0.2, noise_multiplier=1.0),)
    recipe = small_recipe("cycp-fedavg", participation=participation, transforms=transforms)
    rounds = run_rounds(recipe)
    empty = [finished for finished in rounds if not finished.cohort.clients]
    assert empty
    weights = [finished.state.server.shared.weights for finished in rounds]
    assert all(not torch.equal(first, second) for first, second in itertools.pairwise(weights))


@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise", "codasca"])
def test_removing_a_client_changes_the_sum_of_a_round_by_at_most_the_norm(method: str) -> None:
    """Brute force over the clients of the first round: the sum with and without each of them, before the noise."""
    clip = 0.05
    settings: dict[str, Any] = {"participation": "full", "weighting": "paper", "cycles": 1}
    if method == "cycp-pairwise":
        settings["pool"] = "histogram"
    recipe = small_recipe(method, transforms=(ClientDP(clip=clip, noise_multiplier=1.0),), **settings)
    everyone = small_federation()
    with_all = record_exchanges(recipe, clients=everyone)[1][0]
    for client in with_all.cohort.clients:
        rows = np.isin(np.repeat(np.arange(len(everyone)), np.diff(everyone.offsets)), [client])
        keep = everyone.rows[~rows]
        owners = np.repeat(np.arange(len(everyone)), np.diff(everyone.offsets))[~rows]
        fewer = type(everyone).from_assignment(
            everyone.inputs.numpy()[keep], everyone.labels.numpy()[keep], owners, np.arange(len(everyone))
        )
        without = record_exchanges(recipe, clients=fewer)[1][0]
        assert client not in without.cohort.clients
        differences = []
        for left, right in zip(tree_leaves(with_all.upload.mean), tree_leaves(without.upload.mean), strict=True):
            differences.append(left * with_all.cohort.divisor - right * without.cohort.divisor)
        model = torch.cat([leaf.flatten() for leaf in differences if leaf.shape != (2, 24)])
        assert float(model.norm()) <= clip * (1 + 1e-9)


def test_a_secret_changes_the_noise_and_the_draws_but_nothing_else() -> None:
    recipe = small_recipe("cycp-fedavg", transforms=(ClientDP(noise_multiplier=1.0),))
    parts = [
        assemble_training(recipe, linear_scorer(), small_federation(), secret=secret)
        for secret in (b"a" * 32, b"b" * 32, b"a" * 32)
    ]
    first, second, again = (list(training.rounds(start))[-1].state.server for training, _, start in parts)
    assert same_bits(first, again)
    assert not same_bits(first, second)
