"""Example-level privacy: clipping and noise against numpy twins, sensitivity by brute force, and what is refused."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn

from cli_helpers import fedauc
from fedauc.algorithms import find_algorithms, find_methods
from fedauc.algorithms.fedavg import FedAvg
from fedauc.algorithms.minimax import MinimaxAlgorithm
from fedauc.algorithms.pairwise import Pairwise
from fedauc.engines import engines
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.federation.server import FederatedRun
from fedauc.interfaces import Algorithm, Batch, Download, Model, Network, Wrapper
from fedauc.network import ModuleNetwork
from fedauc.participation.cyclic import Cyclic
from fedauc.random_tensors import client_keys
from fedauc.testing import check_wrapper
from fedauc.transforms.client_dp import ClientDP
from fedauc.trees import Tree, tree_leaves
from fedauc.wrappers import example_dp, wrap_algorithm
from fedauc.wrappers._wrapped import WrappedAlgorithm
from fedauc.wrappers.example_dp import ExampleDP, check_example_privacy
from fedauc.wrappers.momentum import Momentum
from federation.memory_grid import make_agreement, make_exchange, make_grid
from small_federations import (
    FEATURES,
    assemble_small,
    linear_scorer,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)
from wrappers.example_dp_twins import (
    Gradient,
    PrivateSettings,
    Step,
    linear_gradient,
    make_step_key,
    run_fedavg_visit,
    run_minimax_visit,
    two_layer_gradient,
)

METHODS = ["cycp-fedavg", "a-fedavg", "scaffold", "a-scaffold", "cycp-minimax", "codasca", "focus"]
SETTINGS = PrivateSettings(clip=0.4, sigma=0.8, dual_clip=0.7)
"""About half of the rows of the small federation are clipped."""


def make_wrapper(settings: PrivateSettings = SETTINGS) -> ExampleDP:
    return ExampleDP(clip=settings.clip, noise_multiplier=settings.sigma, dual_clip=settings.dual_clip)


def two_layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()


class Scorer(NamedTuple):
    """A module and its gradient in numpy."""

    module: nn.Module
    gradient: Gradient


SCORERS = {"linear": Scorer(linear_scorer(), linear_gradient), "mlp": Scorer(two_layers(), two_layer_gradient)}
ENGINES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in sorted(set(engines()) - {"auto"})
]
ignore_jit = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


# ------------------------------------------------------------------------------------------------------ numpy twins


def flatten_shared(shared: Tree) -> np.ndarray:
    return torch.cat([leaf.reshape(-1).double() for leaf in tree_leaves(shared)]).numpy()


def list_steps(draws: Draws, download: Download, client: int, seed: int) -> list[Step]:
    clients, (rows, weights) = small_federation(), draws.draw_visit(client, download.phase)
    return [
        Step(
            clients.inputs[index].numpy(),
            clients.labels[index].numpy(),
            weights,
            make_step_key(seed, download.phase.round, client, step),
        )
        for step, index in enumerate(rows)
    ]


@ignore_jit
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
@pytest.mark.parametrize("method", ["cycp-fedavg", "cycp-minimax"])
def test_uploads_are_those_of_the_numpy_twin(method: str, scorer: Scorer, engine: str) -> None:
    recipe = small_recipe(method, engine=engine, local_steps=3, wrappers=(make_wrapper(),))
    run_visit = run_fedavg_visit if method == "cycp-fedavg" else run_minimax_visit
    training = assemble_small(recipe, scorer.module).training
    draws = Draws(small_federation(), training.setting, recipe.algorithm.objective.batch_kind)
    _, exchanges = record_exchanges(recipe, scorer.module)
    for download, cohort, upload in exchanges:
        start, rate = flatten_shared(download.shared), float(download.phase.learning_rate)
        expected = np.zeros_like(start)
        for client, share in zip(cohort.clients, cohort.weights, strict=True):
            steps = list_steps(draws, download, client, recipe.seed)
            expected += share * run_visit(start, steps, rate, scorer.gradient, SETTINGS)
        np.testing.assert_allclose(flatten_shared(upload.mean), expected, rtol=1e-9, atol=1e-12)
    assert len(exchanges) == 6


@ignore_jit
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_every_engine_gives_the_result_of_the_loop(method: str, engine: str) -> None:
    """Also with momentum inside and a personal head outside, and with client states."""
    wrappers = (Momentum(beta=0.5), make_wrapper(), "personal-head")
    outcomes = []
    for name in ("loop", engine):
        training, _, start = assemble_small(small_recipe(method, engine=name, wrappers=wrappers), two_layers())
        *_, last = training.rounds(start)
        outcomes.append((last.state.server.shared, training.engine.client_states()))
    (expected, expected_states), (shared, states) = outcomes
    torch.testing.assert_close(shared, expected, rtol=1e-9, atol=1e-12)
    assert states.keys() == expected_states.keys()
    for client, state in states.items():
        torch.testing.assert_close(state, expected_states[client], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["cycp-fedavg", "codasca"])
def test_large_models_run_row_by_row_to_the_same_result(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe(method, engine="batched", wrappers=(make_wrapper(),))
    at_once = run_rounds(recipe, two_layers())[-1].state.server.shared
    monkeypatch.setattr(example_dp, "NUMBERS_AT_ONCE", 0)
    row_by_row = run_rounds(recipe, two_layers())[-1].state.server.shared
    torch.testing.assert_close(row_by_row, at_once, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", [1e9, math.inf])
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", METHODS)
def test_without_clipping_and_noise_it_is_the_plain_run(method: str, engine: str, bound: float) -> None:
    wrapper = ExampleDP(clip=bound, dual_clip=bound, noise_multiplier=0)
    recipe = small_recipe(method, engine=engine, weighting="pooled")
    *_, plain = run_rounds(recipe, two_layers())
    *_, private = run_rounds(replace(recipe, wrappers=(wrapper,)), two_layers())
    torch.testing.assert_close(private.state.server.shared, plain.state.server.shared, rtol=1e-10, atol=1e-12)


class ScaledConvolution(nn.Module):
    """Images with a layer that has no batched kernel, so that the stack runs through vmap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution, self.last = nn.Conv2d(1, 2, 2), nn.Linear(2, 1)

    def forward(self, rows: Tensor) -> Tensor:
        images = torch.nn.functional.gelu(self.convolution(rows.view(-1, 1, 2, 2)))
        scores: Tensor = self.last(images.flatten(1))
        return scores


def test_any_module_runs_on_both_engines() -> None:
    plain, *private = (
        run_rounds(
            small_recipe("scaffold", engine=engine, weighting="pooled", wrappers=wrappers), ScaledConvolution().double()
        )[-1]
        for engine, wrappers in (
            ("loop", ()),
            ("loop", (ExampleDP(clip=1e9, noise_multiplier=0),)),
            ("batched", (ExampleDP(clip=1e9, noise_multiplier=0),)),
        )
    )
    for done in private:
        torch.testing.assert_close(done.state.server.shared, plain.state.server.shared, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------------------------------- one step: sensitivity


class SubtractsMean(nn.Module):
    """A module that mixes the rows of a batch, without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear_scorer()

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.inner(rows - rows.mean(0, keepdim=True) + rows[:1] ** 2)
        return scores


def take_step(algorithm: Algorithm, wrapper: Wrapper, module: nn.Module, batch: Batch) -> np.ndarray:
    """What one local step with learning rate 1 adds to the shared state."""
    network = ModuleNetwork(module)
    wrapped = wrap_algorithm(algorithm, (wrapper,), network.parameter_lengths, network.buffer_names)
    training = assemble_small(small_recipe("cycp-fedavg")).training
    server = wrapped.init(training.setting, network.initial_model())
    phase = training.plan.phase(0)._replace(learning_rate=1.0, local_steps=1)
    download = Download(phase, server.shared)
    local, _ = wrapped.step(network, download, wrapped.begin(download, ()), batch)
    upload, _ = wrapped.finish(download, (), local, ())
    return flatten_shared(upload.mean)


def make_batch(size: float = 1.0) -> Batch:
    """Two positives and three negatives; the first row occurs twice."""
    rng = np.random.default_rng(3)
    inputs, labels = size * rng.normal(size=(5, FEATURES)), np.array([1.0, 1, 0, 0, 0])
    inputs[1] = inputs[0]
    weights = np.array([0.5, 0.5, 1 / 3, 1 / 3, 1 / 3])
    key = torch.from_numpy(client_keys([0], "test"))[0]
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(weights), key=key)


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("module", [linear_scorer(), two_layers(), SubtractsMean()], ids=["linear", "mlp", "mixing"])
@pytest.mark.parametrize("algorithm", [FedAvg(), MinimaxAlgorithm()], ids=["fedavg", "minimax"])
def test_removing_a_row_changes_a_step_by_its_occurrences_times_the_bound(
    algorithm: Algorithm, module: nn.Module, size: float
) -> None:
    """Every row in turn, with contribution zero and with other values in its place (then twice the bound)."""
    batch, rng, lengths = make_batch(size), np.random.default_rng(4), []
    clip, dual_clip = 0.4, 0.3
    wrapper = ExampleDP(clip=clip, dual_clip=dual_clip, noise_multiplier=0)
    step = take_step(algorithm, wrapper, module, batch)
    has_duals = isinstance(algorithm, MinimaxAlgorithm)
    for copies in ([0, 1], [2], [3], [4]):
        weights, inputs = batch.weights.clone(), batch.inputs.clone()
        weights[copies] = 0
        inputs[copies] = torch.from_numpy(size * rng.normal(size=FEATURES))
        changed = (batch._replace(weights=weights), batch._replace(weights=weights, inputs=inputs))
        for neighbour, factor in (*((other, 1) for other in changed), (batch._replace(inputs=inputs), 2)):
            difference = take_step(algorithm, wrapper, module, neighbour) - step
            allowed = factor * len(copies) / 5 * (1 + 1e-9)
            split = len(difference) - 3 * has_duals
            assert np.linalg.norm(difference[:split]) <= allowed * clip
            assert np.linalg.norm(difference[split:]) <= allowed * dual_clip
            lengths.append(float(np.linalg.norm(difference[:split])) / (len(copies) * clip / 5))
    if size == 100.0 and algorithm.name == "fedavg" and type(module) is nn.Linear:
        # Rows that long are clipped, unless their slope vanishes, so that the bound is reached.
        assert max(lengths[0::3]) > 0.999


def test_rows_with_weight_zero_or_without_a_finite_gradient_add_nothing() -> None:
    batch, wrapper = make_batch(), ExampleDP(clip=0.4, noise_multiplier=0)
    for algorithm, value in itertools.product((FedAvg(), MinimaxAlgorithm()), (math.nan, math.inf, 1e200)):
        weights, inputs = batch.weights.clone(), batch.inputs.clone()
        weights[2], inputs[2, 0] = 0, value
        removed = take_step(algorithm, wrapper, linear_scorer(), batch._replace(weights=weights))
        for broken in (batch._replace(inputs=inputs), batch._replace(inputs=inputs, weights=weights)):
            step = take_step(algorithm, wrapper, linear_scorer(), broken)
            # The score of an infinite output is 0 or 1, which the duals may use.
            compared = slice(None) if math.isnan(value) else slice(FEATURES + 1)
            np.testing.assert_allclose(step[compared], removed[compared], rtol=1e-12, atol=1e-15)


def test_sums_of_half_precision_gradients_are_those_of_float32() -> None:
    """1000 rows of norm 0.4 / 1000 in one direction add up to 0.4; a sum in bfloat16 stops growing before that."""
    rows, module = 1000, nn.Linear(FEATURES, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    ones = torch.ones(rows, dtype=torch.bfloat16)
    batch = Batch(300 * ones[:, None].expand(rows, FEATURES), ones, ones / rows, key=torch.tensor(1))
    step = take_step(FedAvg(), ExampleDP(clip=0.4, noise_multiplier=0), module.bfloat16(), batch)
    assert np.linalg.norm(step) == pytest.approx(0.4, rel=0.005)


# --------------------------------------------------------------------------------------------------------- the noise


@pytest.mark.parametrize("algorithm", [FedAvg(), MinimaxAlgorithm()], ids=["fedavg", "minimax"])
def test_the_noise_is_gaussian_and_as_large_as_the_bound_says(algorithm: Algorithm) -> None:
    """A Kolmogorov-Smirnov test over keys; duals and weights of minimax have √2 times the multiplier."""
    batch, clip, dual_clip, sigma = make_batch(), 0.4, 0.3, 2.0
    exact = take_step(algorithm, ExampleDP(clip=clip, dual_clip=dual_clip, noise_multiplier=0), linear_scorer(), batch)
    private = ExampleDP(clip=clip, dual_clip=dual_clip, noise_multiplier=sigma)
    noise = np.stack(
        [
            take_step(algorithm, private, linear_scorer(), batch._replace(key=key)) - exact
            for key in torch.from_numpy(client_keys(range(300), "noise"))
        ]
    )
    multiplier = sigma * (math.sqrt(2) if isinstance(algorithm, MinimaxAlgorithm) else 1)
    normal = noise / (multiplier * clip / 5)
    normal[:, FEATURES + 1 :] *= clip / dual_clip
    assert kstest(normal.ravel(), "norm").pvalue > 0.01
    correlations = np.corrcoef(normal, rowvar=False) - np.eye(normal.shape[1])
    # 300 samples: five standard errors.
    assert np.abs(correlations).max() < 5 / math.sqrt(300)


def test_every_client_step_and_round_has_its_own_noise() -> None:
    setting = assemble_small(small_recipe("cycp-fedavg")).training.setting
    draws = Draws(small_federation(), setting, "rows", needs_keys=True)
    phase = assemble_small(small_recipe("cycp-fedavg")).training.plan.phase(0)._replace(local_steps=5)
    drawn = [draws.draw_cohort((0, 4, 6), phase._replace(round=number)).keys for number in range(4)]
    assert len(np.unique(np.stack([keys for keys in drawn if keys is not None]))) == 4 * 3 * 5
    alone = draws.draw_cohort((4,), phase).keys
    assert alone is not None
    assert drawn[0] is not None
    np.testing.assert_array_equal(alone[0], drawn[0][1])
    assert Draws(small_federation(), setting, "rows").draw_cohort((4,), phase).keys is None
    draws.noise_seed = 12345
    secret = draws.draw_cohort((4,), phase)
    assert secret.keys is not None
    assert not np.isin(secret.keys, alone).any()
    np.testing.assert_array_equal(secret.rows, Draws(small_federation(), setting, "rows").draw_cohort((4,), phase).rows)


class TakesTwoGradients(FedAvg):
    """Would release two gradients with one noise."""

    uploads_gradients_only: ClassVar[bool] = True

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        first, second = (network.forward_pass(local, batch.inputs) for _ in range(2))
        gradient = first.pullback(batch.weights) - second.pullback(batch.labels)
        return local._replace(weights=local.weights - gradient), ()


def test_a_second_gradient_in_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 2 gradients in one local step"):
        take_step(TakesTwoGradients(), make_wrapper(), linear_scorer(), make_batch())


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", sorted(find_methods()))
def test_methods_that_upload_scores_are_refused(method: str) -> None:
    recipe = small_recipe(method, wrappers=(make_wrapper(),))
    if recipe.algorithm.scoring_pass:
        name = recipe.algorithm.name
        message = f"the algorithm '{name}' uploads the scores of single rows, which noise on gradients does not hide"
        with pytest.raises(ValueError, match=message):
            assemble_small(recipe)
    elif method == "cycp-fedavg-logit-adjusted":
        # Its steps depend on how many rows of each class the client has, not on gradients alone.
        with pytest.raises(ValueError, match="does not declare uploads_gradients_only"):
            assemble_small(recipe)
    elif method == "cycp-local-pairs":
        # The gradient of a row depends on the other rows of its batch.
        with pytest.raises(ValueError, match="does not declare uploads_gradients_only"):
            assemble_small(recipe)
    else:
        assemble_small(recipe)


def test_every_algorithm_has_been_judged() -> None:
    declared = {name for name, kind in find_algorithms().items() if kind.uploads_gradients_only}
    assert declared == {"a-fedavg", "a-scaffold", "codasca", "fedavg", "focus", "minimax", "scaffold"}
    assert {find_methods()[method].algorithm.name for method in METHODS} == declared


class Subclass(FedAvg):
    """Might upload anything."""


@dataclass(frozen=True, kw_only=True)
class LookingWrapper(Wrapper):
    """Might look at the rows."""

    name: ClassVar[str] = "looking"


@pytest.mark.parametrize(
    ("algorithm", "wrappers", "buffers", "message"),
    [
        (Subclass(), (ExampleDP(),), (), "the algorithm 'fedavg' does not declare uploads_gradients_only: use"),
        (Pairwise(), (ExampleDP(),), (), "the algorithm 'pairwise' uploads the scores of single rows, which noise on"),
        (FedAvg(), (ExampleDP(), LookingWrapper()), (), "'example-dp' beside 'looking', which may use the rows"),
        (FedAvg(), (LookingWrapper(), ExampleDP()), (), "'example-dp' beside 'looking', which may use the rows"),
        (FedAvg(), (ExampleDP(), ExampleDP(clip=2.0)), (), "wrappers lists 'example-dp' twice"),
        (FedAvg(), (ExampleDP(),), ("norm.running_mean",), "the model has the buffer 'norm.running_mean'; with such"),
    ],
    ids=["subclass", "raw scores", "outer", "inner", "twice", "buffers"],
)
def test_refusals_give_the_reason_in_one_line(
    algorithm: Algorithm, wrappers: tuple[Wrapper, ...], buffers: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        wrap_algorithm(algorithm, wrappers, {"weight": 4}, buffers)
    assert "\n" not in str(refusal.value)


def test_the_check_takes_an_algorithm_that_is_wrapped_already() -> None:
    check_example_privacy(wrap_algorithm(FedAvg(), (Momentum(), ExampleDP()), {"weight": 4}))


@dataclass(frozen=True, kw_only=True)
class RefusesAll(Wrapper):
    """Takes no algorithm."""

    name: ClassVar[str] = "refuses-all"

    def check_algorithm(self, algorithm: Algorithm, buffers: Collection[str]) -> None:
        raise ValueError("no")


def test_the_exported_suite_expects_that_some_algorithm_is_taken() -> None:
    with pytest.raises(AssertionError, match="the wrapper refuses every one of cycp-fedavg, a-scaffold"):
        check_wrapper(RefusesAll())


def test_a_model_with_batch_statistics_is_refused() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    with pytest.raises(ValueError, match=r"the model has the buffer '1.running_mean'; with such statistics"):
        assemble_small(small_recipe("cycp-fedavg", wrappers=(make_wrapper(),)), module)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": math.inf}, "clip is inf; noise of multiplier 1 needs a finite bound: lower clip"),
        ({"dual_clip": math.inf}, "dual_clip is inf; noise of multiplier 1 needs a finite bound"),
        ({"clip": 0.0}, "clip is 0.0; it must be a number above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0; it must be a finite number of at least 0"),
    ],
)
def test_bounds_of_the_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExampleDP(**changes)


# ------------------------------------------------------------------------------------- federation and command line


def run_federation(recipe_wrapper: ExampleDP, folder: Path) -> tuple[Tree, Recipe, nn.Module]:
    agreement = make_agreement("scaffold", {"evaluation": "none"}, wrappers=(recipe_wrapper,))
    run = FederatedRun.create(agreement, make_exchange(make_grid(folder / "sites"), agreement), folder / "run")
    run.train_to_end()
    recipe = replace(agreement.recipe, engine="loop")
    return run.loop.state.server, recipe, agreement.model.build((FEATURES,), recipe.seed)


def test_the_noise_of_a_site_does_not_follow_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site draws a new secret in every visit; with the run's seed as secret, it would be the simulation."""
    server, recipe, module = run_federation(make_wrapper(), tmp_path / "secret")
    *_, simulated = run_rounds(recipe, module)
    assert not torch.allclose(server.shared.model.weights, simulated.state.server.shared.model.weights)
    again, *_ = run_federation(make_wrapper(), tmp_path / "again")
    assert not torch.allclose(server.shared.model.weights, again.shared.model.weights)
    drawn: list[int] = []

    def draw_seed(bits: int) -> int:
        drawn.append(bits)
        return recipe.seed

    monkeypatch.setattr(secrets, "randbits", draw_seed)
    known, *_ = run_federation(make_wrapper(), tmp_path / "known")
    assert same_bits(known, simulated.state.server)
    assert set(drawn) == {128}
    assert len(drawn) >= 6


def test_the_command_line_sets_its_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--data", "synthetic", "--data.clients", "6", "--cycles", "1", "--local-steps", "2"]
    private = ["--wrappers", "example-dp", "--wrappers.example-dp.clip", "0.5"]
    out = ["--out", str(tmp_path / "run")]
    assert fedauc(capsys, "run", "--method", "cycp-minimax", *options, *private, *out).code == 0
    refused = fedauc(capsys, "run", "--method", "cycp-pairwise", *options, *private, "--out", str(tmp_path / "no"))
    assert refused.code != 0
    assert "uploads the scores of single rows" in refused.err


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["auto", "graphed"])
def test_a_gpu_gives_the_result_of_the_loop(method: str, engine: str) -> None:
    """`auto` captures a short run without compiling, and `graphed` compiles it; in float64 only sums differ."""
    on_cpu, on_gpu = (
        run_rounds(small_recipe(method, engine=name, device=device, wrappers=(make_wrapper(),)), two_layers())[-1]
        for name, device in (("loop", "cpu"), (engine, "cuda"))
    )
    leaves = (tree_leaves(done.state.server.shared) for done in (on_cpu, on_gpu))
    for expected, found in zip(*leaves, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------------------- score histograms


def emit_masses(noise_multiplier: float, seed: int = 3, steps: int = 3) -> list[Tensor]:
    """The histograms `[2, bins]` that the cohorts of a pairwise run upload, each the weighted mean of its clients."""
    wrapper = ExampleDP(clip=1e6, noise_multiplier=noise_multiplier)
    recipe = small_recipe("cycp-pairwise", pool="histogram", pool_bins=50, wrappers=(wrapper,), local_steps=steps)
    _, exchanges = record_exchanges(replace(recipe, seed=seed, learning_rate=1e-300))
    return [upload.mean.pool.masses for _, _, upload in exchanges]


def test_histograms_get_noise_in_units_of_the_largest_weight_of_a_row() -> None:
    """With a learning rate of 0 the scores stay, so that the noise is the difference to a run without it."""
    sigma, steps = 0.7, 3
    plain, noised = emit_masses(0.0), emit_masses(sigma)
    recipe = small_recipe("cycp-pairwise", pool="histogram", local_steps=steps)
    training = assemble_small(recipe).training
    draws = Draws(small_federation(), training.setting, "classes")
    normalized = []
    for round, (exact, released) in enumerate(zip(plain, noised, strict=True)):
        phase, cohort = training.plan.phase(round), training.schedule.cohort(round)
        weights = np.stack([draws.draw_visit(client, phase).weights for client in cohort.clients])
        by_class = np.stack([weights[:, :2].max(1), weights[:, 2:].max(1)], axis=1)
        # Independent over steps and clients: a client's mean over steps, then the cohort's weighted mean.
        variance = 2 * sigma**2 * (np.square(by_class) * np.square(cohort.weights)[:, None]).sum(0) / steps
        normalized.append((released - exact).numpy() / np.sqrt(variance)[:, None])
    assert kstest(np.stack(normalized).ravel(), "norm").pvalue > 1e-3


def test_pairwise_runs_are_private_for_examples_on_both_engines() -> None:
    settings = {"pool": "histogram", "wrappers": (make_wrapper(),), "cycles": 3}
    loop, batched = (
        run_rounds(small_recipe("cycp-pairwise", engine=engine, **settings)) for engine in ("loop", "batched")
    )
    for expected, finished in zip(loop, batched, strict=True):
        for left, right in zip(tree_leaves(expected.state.server), tree_leaves(finished.state.server), strict=True):
            torch.testing.assert_close(right, left, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------------------- budgets


def test_a_budget_sets_the_noise_for_the_worst_row() -> None:
    """Client 5 has one negative, which fills the 3 places of a batch in both steps: it counts 3² + 3² in a visit."""
    recipe = small_recipe("cycp-minimax", wrappers=(ExampleDP(),), epsilon=4.0, delta=1e-3)
    training = assemble_small(recipe).training
    account, algorithm = training.account, training.algorithm
    assert account is not None
    assert account.unit == "example"
    assert 3.98 < account.epsilon(2) <= 4.0
    assert isinstance(algorithm, WrappedAlgorithm)
    assert isinstance(algorithm.wrapper, ExampleDP)
    assert algorithm.wrapper.noise_multiplier == pytest.approx(account.noise_multiplier * math.sqrt(18), rel=1e-12)
    assert not [transform for transform in recipe.transforms if transform.name == "client-dp"]


def test_a_client_that_may_be_visited_in_every_round_counts_every_round() -> None:
    recipe = small_recipe("cycp-fedavg", wrappers=(ExampleDP(),), participation="uniform", epsilon=4.0, delta=1e-3)
    training = assemble_small(recipe).training
    assert training.account is not None
    assert training.account.turn_interval == 1
    assert 3.98 < training.spent_epsilon(training.plan.total_rounds) <= 4.0  # type: ignore[operator]


def test_a_delta_above_one_over_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"delta is 0\.05; with 42 rows it must be below 1/42"):
        assemble_small(small_recipe("cycp-fedavg", wrappers=(ExampleDP(),), epsilon=4.0, delta=0.05))


def test_one_run_has_one_unit_of_privacy() -> None:
    with pytest.raises(ValueError, match="the recipe has both 'client-dp' and 'example-dp'"):
        small_recipe("cycp-fedavg", wrappers=(ExampleDP(),), transforms=(ClientDP(noise_multiplier=1.0),))


def test_a_secret_of_the_run_changes_the_noise_of_local_steps() -> None:
    """With given groups, so that the schedule does not depend on the secret."""
    participation = Cyclic(given=((0, 1), (3, 4), (5, 6, 7)))
    recipe = small_recipe("cycp-fedavg", wrappers=(make_wrapper(),), participation=participation)
    servers = []
    for secret in (None, b"a" * 32, b"b" * 32, b"a" * 32):
        training, _, start = assemble_training(recipe, two_layers(), small_federation(), secret)
        servers.append(list(training.rounds(start))[-1].state.server)
    assert same_bits(servers[1], servers[3])
    assert not same_bits(servers[0], servers[1])
    assert not same_bits(servers[1], servers[2])


def test_a_row_without_a_finite_score_does_not_stop_the_pool() -> None:
    clients = small_federation()
    clients.inputs[clients.rows[0]] = 3e300
    recipe = small_recipe("cycp-pairwise", pool="histogram", wrappers=(make_wrapper(),), cycles=3)
    pool = run_rounds(recipe, two_layers(), clients)[-1].state.server.shared.pool
    assert bool(torch.isfinite(pool.masses).all())
    assert int((pool.masses > 0).sum()) > 10
