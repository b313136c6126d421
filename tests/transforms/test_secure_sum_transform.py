"""Secure sums in simulation: integers that engines agree on, their range, the noise of clients, and its account."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.auditing import find_declared_noise
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Cohort, Model, ScoreHistogram, Upload
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.trace import Trace
from fedauc.privacy.accounting import PrivacyAccount, epsilon_of_gaussian_rdp
from fedauc.privacy.fixed_point import LARGEST_SUM
from fedauc.random_tensors import client_keys
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.robust_means import Median
from fedauc.transforms.secure_sum import OutOfRangeError, SecureSum
from fedauc.trees import tree_leaves
from fedauc.uploads import UploadCollector, UploadPipeline
from small_federations import linear_scorer, record_exchanges, run_rounds, same_bits, small_federation, small_recipe

METHODS: dict[str, dict[str, Any]] = {
    "cycp-fedavg": {},
    "cycp-minimax": {"prox": 0.5},
    "scaffold": {},
    "codasca": {},
    "cycp-pairwise": {"pool": "histogram"},
}
"""A model; with dual variables; with control variates; with both; with a histogram of scores."""

FULL: dict[str, Any] = {"participation": "full", "weighting": "paper"}
PRIVATE = ClientDP(noise_multiplier=2.0, clip=0.5)


def prepare(recipe: Recipe) -> tuple[PreparedSecureSum, PrivacyAccount | None]:
    """The transform of a run on the small federation, and its account."""
    training = assemble_training(recipe, linear_scorer(), small_federation()).training
    transform = training.uploads.transforms[-1]
    assert isinstance(transform, PreparedSecureSum)
    return transform, training.account


# ------------------------------------------------------------------------------------------------ integers and means


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_secure_sums_is_the_plain_run_up_to_rounding(method: str, engine: str) -> None:
    """One round: each of seven uploads is moved by half a step at most, and so is their mean."""
    settings = {**FULL, **METHODS[method], "cycles": 1, "engine": engine}
    plain, secure = (
        run_rounds(small_recipe(method, transforms=transforms, **settings))[0].state.server
        for transforms in ((), (SecureSum(),))
    )
    transform, _ = prepare(small_recipe(method, transforms=(SecureSum(),), **settings))
    assert not same_bits(plain.shared, secure.shared)
    for left, right in zip(tree_leaves(plain), tree_leaves(secure), strict=True):
        # A histogram pool is normalised: 7 clients' masses are divided by their sum, which is not below 1.
        torch.testing.assert_close(
            right, left, rtol=0, atol=(7 if "pairwise" in method else 1) * 0.51 / transform.scale
        )


@pytest.mark.parametrize("transforms", [(SecureSum(),), (PRIVATE, SecureSum())], ids=["plain", "private"])
@pytest.mark.parametrize(("method", "engine"), [*((method, "batched") for method in METHODS), ("codasca", "graphed")])
def test_engines_give_the_same_integers(method: str, engine: str, transforms: Any) -> None:
    results = [
        record_exchanges(small_recipe(method, engine=engine, transforms=transforms, **FULL, **METHODS[method]))
        for engine in ("loop", engine)
    ]
    (loop_rounds, loop), (batched_rounds, batched) = results
    assert loop[0].upload.mean
    for left, right in zip(loop, batched, strict=True):
        assert all(leaf.dtype == torch.int32 for leaf in tree_leaves(left.upload.mean))
        assert same_bits(left.upload.mean, right.upload.mean)
    assert loop_rounds[-1].traffic == batched_rounds[-1].traffic


def test_the_running_sum_and_the_stack_wrap_around_alike() -> None:
    """Numbers near the end of the ring, as masked ones are; numpy's uint32 is the reference."""
    pipeline = UploadPipeline((SecureSum(),))
    words = np.random.default_rng(0).integers(0, 1 << 32, size=(5, 9), dtype=np.uint32)
    vectors = torch.from_numpy(words.view(np.int32))
    expected = words.sum(axis=0, dtype=np.uint32).view(np.int32)
    shared = torch.zeros(9)
    collector = UploadCollector(pipeline, shared)
    for vector in vectors:
        collector.add_upload(Upload(vector), 0.2)
    stacked = pipeline.reduce_stack(Upload(vectors), shared, torch.full((5,), 0.2))
    assert collector.reduce_uploads().upload.mean.tolist() == expected.tolist() == stacked.upload.mean.tolist()
    assert stacked.size is not None
    assert stacked.size.bytes == 5 * 9 * 4


def test_a_number_out_of_range_is_refused_and_never_wrapped() -> None:
    transform, key = SecureSum(largest=2.0), torch.from_numpy(client_keys((0,), 0, "test"))[0]
    edge, _ = transform.client(Upload(torch.tensor([2.0, -2.0])), (), key)
    assert edge.mean.tolist() == [2 * transform.scale, -2 * transform.scale]
    for value in (2.001, -3.0, math.nan, math.inf):
        with pytest.raises(OutOfRangeError, match=r"a secure sum takes numbers up to 2: raise --transforms.secure-sum"):
            transform.client(Upload(torch.tensor([0.0, value])), (), key)
    with pytest.raises(OutOfRangeError, match="an upload holds"):
        run_rounds(small_recipe("cycp-fedavg", transforms=(SecureSum(largest=1e-4),), **FULL))


def test_the_scale_leaves_room_for_the_largest_cohort_and_no_more() -> None:
    """Seven clients with numbers up to 16: 2^24 steps per unit give sums up to 1.9e9, and 2^25 would not fit."""
    transform, _ = prepare(small_recipe("cycp-fedavg", transforms=(SecureSum(),), **FULL))
    assert transform.scale == 2.0**24
    assert 7 * 16 * transform.scale <= LARGEST_SUM < 2 * 7 * 16 * transform.scale
    assert transform.capacity >= 7
    with pytest.raises(
        ValueError, match="a sum of 7 clients with numbers up to 16 does not fit 32 bits: lower scale_b"
    ):
        prepare(small_recipe("cycp-fedavg", transforms=(SecureSum(scale_bits=25),), **FULL))


def test_a_round_with_too_few_clients_is_skipped() -> None:
    """Of seven clients more than two thirds, five, must come; in round 1 only four do."""
    rows = tuple(
        (number, client) for number in range(3) for client in (0, 1, 3, 4, 5, 6, 7) if number != 1 or client > 3
    )
    trace = Trace(rows=rows, schedule=Cyclic(groups=1, assignment="random"))
    first, second, third = run_rounds(
        small_recipe("cycp-fedavg", transforms=(SecureSum(),), participation=trace, cycles=3)
    )
    assert len(first.cohort.clients) == len(third.cohort.clients) == 7
    assert second.cohort == Cohort(1, (), (), (0, 1, 3, 4, 5, 6, 7), 7.0)
    assert same_bits(first.state.server.shared, second.state.server.shared)


def test_draws_of_too_few_clients_are_skipped() -> None:
    """Four of seven are expected, so that noise and threshold are planned for three; larger draws need two thirds."""
    schedule = CyclicPoisson(rate=0.6, groups=1, assignment="random")
    settings: dict[str, Any] = {"participation": schedule, "weighting": "paper", "delta": 1e-3, "cycles": 30}
    recipe = small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **settings)
    drawn = [len(schedule.bind(small_federation().roster, recipe.seed).cohort(number).clients) for number in range(30)]
    assert prepare(recipe)[0].survivors == 3
    assert 0 < min(drawn) < 3
    rounds = run_rounds(recipe)
    assert [len(finished.cohort.clients) for finished in rounds] == [size if size >= 3 else 0 for size in drawn]
    assert all(finished.cohort.expected_size == pytest.approx(4.2) for finished in rounds)


def test_what_a_secure_sum_cannot_do_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"a round has 2 clients; secure-sum needs 3, .*: make fewer groups"):
        prepare(small_recipe("cycp-fedavg", transforms=(SecureSum(),)))
    with pytest.raises(ValueError, match=r"shares the raw scores of each client .*; use --algorithm.pool histogram"):
        prepare(small_recipe("cycp-pairwise", transforms=(SecureSum(),), **FULL))
    with pytest.raises(ValueError, match="mean is 'median', but 'secure-sum' shows the server no single upload"):
        small_recipe("cycp-fedavg", transforms=(SecureSum(),), mean=Median(), **FULL)
    with pytest.raises(ValueError, match="'secure-sum' before 'client-dp'"):
        small_recipe("cycp-fedavg", transforms=(SecureSum(), PRIVATE), **FULL)
    with pytest.raises(ValueError, match="'quantize' and 'secure-sum'"):
        UploadPipeline((Quantize(), SecureSum()))
    with pytest.raises(ValueError, match="runs in one process only: start without torchrun"):
        UploadPipeline((SecureSum(),)).on_each_rank()
    with pytest.raises(ValueError, match=r"clip_quantile is 0.5; the integers of a secure sum need a norm that stays"):
        prepare(small_recipe("cycp-fedavg", transforms=(replace(PRIVATE, clip_quantile=0.5), SecureSum()), **FULL))
    with pytest.raises(ValueError, match=r"largest is 0.4; after client-dp it must be at least 0.5"):
        prepare(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum(largest=0.4)), **FULL))
    with pytest.raises(ValueError, match="colluding is 5; it must be below 5"):
        prepare(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum(colluding=5)), **FULL))


# -------------------------------------------------------------------------------------------------- noise of clients


def test_a_budget_adds_clipping_before_the_secure_sum() -> None:
    recipe = small_recipe("cycp-fedavg", transforms=(SecureSum(),), epsilon=3.0, delta=1e-3, **FULL)
    assert [transform.name for transform in recipe.transforms] == ["client-dp", "secure-sum"]
    assert Config.from_json(Config(recipe=recipe).to_json()).recipe == recipe


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 20.0])
def test_the_account_meets_the_budget_by_renyi_accounting(epsilon: float) -> None:
    settings = {**FULL, "cycles": 4, "delta": 1e-3, "epsilon": epsilon}
    transform, account = prepare(small_recipe("cycp-pairwise", transforms=(SecureSum(),), pool="histogram", **settings))
    assert account is not None
    assert account.accountant == "rdp"
    assert 0.99 * epsilon < account.epsilon(4) <= epsilon
    # Two parts with a share of .1 and .9 of the budget: each is a Gaussian release, and both see one participation.
    norms = (transform.scale * ClientDP.clip + math.sqrt(5) / 2, transform.scale * math.sqrt(2) + math.sqrt(48) / 2)
    # Of the five clients that a sum has at least, one knows its own noise.
    parts = [deviation * math.sqrt(4) / norm for deviation, norm in zip(transform.deviations, norms, strict=True)]
    assert parts[1] / parts[0] == pytest.approx(3.0, rel=1e-5)
    joint = 1 / math.sqrt(sum(part**-2 for part in parts))
    assert account.noise_multiplier == pytest.approx(joint, rel=1e-5)
    assert account.epsilon(4) == pytest.approx(epsilon_of_gaussian_rdp(joint, 4, 1e-3), rel=1e-3)


def test_draws_of_clients_do_not_amplify_secure_sums() -> None:
    """The server sees who takes part; and a draw of too few is skipped, so that one client may decide for all."""
    settings: dict[str, Any] = {
        "participation": CyclicPoisson(rate=0.9, groups=1, assignment="random"),
        "weighting": "paper",
        "delta": 1e-3,
    }
    by_clients = small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **settings)
    by_server = small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum(noise="server")), **settings)
    assert prepare(by_server)[1].sampling == 1.0  # type: ignore[union-attr]
    transform, account = prepare(by_clients)
    assert account is not None
    assert (account.sampling, account.accountant) == (1.0, "rdp")
    # Of 7 clients with probability .9, six are expected; more than two thirds of them are five.
    assert transform.survivors == 5


def test_the_noise_of_the_least_survivors_is_what_the_multiplier_asks_for() -> None:
    """Of five survivors one knows its own noise: that of the other four together has deviation σ · sensitivity."""
    clip, dimension, draws = 0.5, 4000, 40
    transform, _ = prepare(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **FULL))
    assert transform.survivors == 5
    sensitivity = clip * transform.scale + math.sqrt(5) / 2
    assert transform.deviations[0] == pytest.approx(2.0 * sensitivity / math.sqrt(4), rel=1e-5)
    assert transform.deviations[1] == 0
    keys = torch.from_numpy(client_keys(range(4 * draws), 0, "test"))
    upload = Upload(Model(torch.zeros(4 * draws, dimension), torch.zeros(4 * draws, 0)))
    noised, _ = transform.client(upload, (), keys)
    sums = noised.mean.weights.double().reshape(draws, 4, dimension).sum(1).numpy()
    # The variance of a Gaussian's sample variance is 2 / n of its square.
    assert abs(sums.var() / (2.0 * sensitivity) ** 2 - 1) < 5 * math.sqrt(2 / sums.size)
    assert abs(sums.mean()) < 5 * 2.0 * sensitivity / math.sqrt(sums.size)
    plain, _ = replace(transform, deviations=(0.0, 0.0)).client(upload, (), keys)
    assert not plain.mean.weights.any()


def test_clients_rounds_and_secrets_have_their_own_noise_and_the_ends_of_histograms_none() -> None:
    transform = PreparedSecureSum.of(SecureSum(), deviations=(1000.0, 50.0))
    histogram = ScoreHistogram(torch.zeros(2, 2, 500), torch.zeros(2, 2))
    upload = Upload((torch.zeros(2, 600), histogram))
    keys = torch.from_numpy(client_keys((0, 1), 0, "test", 0))
    sent, _ = transform.client(upload, (), keys)
    weights, masses, ends = tree_leaves(sent.mean)
    assert not ends.any()
    assert weights.double().std() == pytest.approx(1000, rel=0.1)
    assert masses.double().std() == pytest.approx(50, rel=0.1)
    assert not torch.equal(weights[0], weights[1])
    alone, _ = transform.client(
        Upload((torch.zeros(600), ScoreHistogram(*(leaf[1] for leaf in histogram)))), (), keys[1]
    )
    assert same_bits(alone.mean, (weights[1], ScoreHistogram(masses[1], ends[1])))
    secret, _ = replace(transform, secret=bytes(32)).client(upload, (), keys)
    later, _ = transform.client(upload, (), torch.from_numpy(client_keys((0, 1), 0, "test", 1)))
    assert not torch.equal(tree_leaves(secret.mean)[0], weights)
    assert not torch.equal(tree_leaves(later.mean)[0], weights)


def test_the_server_adds_no_noise_to_that_of_clients() -> None:
    """Without noise in the integers, the sum that the server decodes is the sum of the clipped uploads."""
    rounds, exchanges = record_exchanges(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **FULL))
    transform, _ = prepare(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **FULL))
    change = rounds[1].state.server.shared.weights - rounds[0].state.server.shared.weights
    decoded = exchanges[1].upload.mean.weights.double() / transform.scale / 7
    torch.testing.assert_close(change, decoded, rtol=0, atol=1e-12)


def test_a_trusted_server_adds_its_noise_to_the_decoded_sum() -> None:
    """The noise is a thousandth larger than without secure sums, whose rounding may enlarge a clipped upload by that.

    Rounding moves the mean by half a step at most.
    """
    assert PRIVATE.noise_multiplier == 2.0
    plain, secure = (
        run_rounds(small_recipe("cycp-minimax", transforms=transforms, cycles=1, **FULL))[0].state.server.shared
        for transforms in ((replace(PRIVATE, noise_multiplier=2.002),), (PRIVATE, SecureSum(noise="server")))
    )
    for left, right in zip(tree_leaves(plain), tree_leaves(secure), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-7)


def test_what_noise_of_clients_does_not_cover_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bands is 2, but clients add the noise; .*: use bands 1, or"):
        prepare(small_recipe("cycp-fedavg", transforms=(replace(PRIVATE, bands=2), SecureSum()), **FULL))
    with pytest.raises(
        ValueError, match=r"weighting is 'clients', which needs the class counts .*: use --weighting pap"
    ):
        prepare(small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), participation="full"))
    evaluated = small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), private_evaluation=True, **FULL)
    with pytest.raises(ValueError, match="asks for private_evaluation, whose noise the server would add"):
        prepare(evaluated)
    weak = (replace(PRIVATE, noise_multiplier=0.2), SecureSum(scale_bits=0))
    with pytest.raises(ValueError, match=r"deviation is 0.* raise the scale"):
        prepare(small_recipe("cycp-fedavg", transforms=weak, **FULL))
    coarse = (ClientDP(clip=1.0), SecureSum(scale_bits=0))
    with pytest.raises(ValueError, match=r"noise of so few integer steps costs .*: raise scale_bits"):
        prepare(small_recipe("cycp-fedavg", transforms=coarse, epsilon=8.0, delta=1e-3, **FULL))
    # 48 masses of which each may move by half a step: √48 / 2 / 2^11 is more than a thousandth of √2.
    coarse = (ClientDP(noise_multiplier=1.0, clip=50.0), SecureSum(scale_bits=11, noise="server"))
    with pytest.raises(ValueError, match=r"scale_bits is 11; rounding could enlarge an upload of norm 1.41421 by 0.00"):
        prepare(small_recipe("cycp-pairwise", transforms=coarse, pool="histogram", **FULL))
    with pytest.raises(ValueError, match=r"epsilon is 40; .*: lower epsilon, or raise delta"):
        prepare(small_recipe("cycp-fedavg", transforms=(SecureSum(),), epsilon=40.0, **FULL))
    with pytest.raises(ValueError, match=r"sampling is 0.5, but the accountant is 'rdp'"):
        PrivacyAccount(delta=1e-5, noise_multiplier=1.0, sampling=0.5, accountant="rdp")


@pytest.mark.parametrize("noise", ["clients", "server"])
def test_no_rounded_upload_is_larger_than_the_noise_is_for(noise: Literal["clients", "server"]) -> None:
    """The worst upload: clipped to the norm, with every number half a step from an integer."""
    clip = ClientDP(noise_multiplier=2.0, clip=0.01)
    recipe = small_recipe("cycp-pairwise", transforms=(clip, SecureSum(noise=noise)), pool="histogram", **FULL)
    training = assemble_training(recipe, linear_scorer(), small_federation()).training
    client_dp, secure = training.uploads.transforms
    assert isinstance(secure, PreparedSecureSum)
    for norm, dimension, part in ((0.01, 5, 0), (math.sqrt(2), 48, 1)):
        steps = math.floor(norm / math.sqrt(dimension) * secure.scale - 0.5)
        upload = Upload((torch.full((dimension,), (steps + 0.5 + 1e-6) / secure.scale, dtype=torch.float64),))
        rounded, _ = replace(secure, deviations=(0.0, 0.0)).client(upload, (), torch.tensor(0))
        largest = float(rounded.mean[0].double().norm())
        assert largest > norm * secure.scale * (1 - 1e-3)
        if noise == "clients":
            multiplier = clip.divide_noise(has_histogram=True)[part]
            # Four of five survivors hide the fifth.
            assert secure.deviations[part] * math.sqrt(4) >= multiplier * largest
        else:
            assert isinstance(client_dp, NoisedClientDP)
            assert largest <= client_dp.slack * norm * secure.scale
            assert client_dp.slack == 1.001


def test_an_audit_of_secure_sums_is_refused_with_the_remedy() -> None:
    recipe = small_recipe("cycp-fedavg", transforms=(PRIVATE, SecureSum()), **FULL)
    training = assemble_training(recipe, linear_scorer(), small_federation()).training
    with pytest.raises(ValueError, match="integers have no room for canaries: audit the recipe without it"):
        find_declared_noise(training)


def test_errors_of_the_sampler_are_paid_from_delta() -> None:
    """δ = (1 + exp(ε)) t + rest: with the ε that the account names, the rest is what Rényi accounting needs."""
    exact = PrivacyAccount(delta=1e-5, noise_multiplier=2.0, accountant="rdp")
    rough = replace(exact, sampler_error=1e-9)
    epsilon = rough.epsilon(4)
    assert epsilon > exact.epsilon(4) * (1 + 1e-6)
    rest = 1e-5 - (1 + math.exp(epsilon)) * 1e-9
    assert epsilon_of_gaussian_rdp(1.0, 1, rest) == pytest.approx(epsilon, rel=1e-6)
    assert math.isinf(replace(exact, sampler_error=1e-6).epsilon(4))
    assert rough.epsilon(0) == 0
