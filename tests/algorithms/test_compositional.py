"""Partial AUC, average precision and NDCG: equations against numpy twins, limits, rounds, states and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedauc.algorithms import find_methods
from fedauc.algorithms._pool import draw_passive_scores
from fedauc.algorithms.compositional import CompositionalPairwise
from fedauc.engines.draws import Draws
from fedauc.interfaces import Phase, Setting, Wrapper
from fedauc.metrics import parse_metric
from fedauc.objectives.average_precision import AveragePrecisionLoss
from fedauc.objectives.compositional import Anchors, ClassCounts, CompositionalObjective, PassiveAnchors
from fedauc.objectives.kinds import Active, Passive
from fedauc.objectives.ndcg import NDCGLoss
from fedauc.objectives.partial_auc import PartialAUCLoss
from fedauc.objectives.partial_auc_cvar import PartialAUCTopLoss
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.two_way_partial_auc import TwoWayPartialAUCLoss
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.testing.objective import estimate_anchors, random_anchors, random_normal
from fedauc.training import Round
from fedauc.transforms.secure_sum import SecureSum
from fedauc.trees import Tree
from fedauc.wrappers.fedprox import FedProx
from fedauc.wrappers.momentum import Momentum
from fedauc.wrappers.personal_head import PersonalHead
from small_federations import (
    FEATURES,
    NEGATIVES,
    POSITIVES,
    assemble_small,
    linear_scorer,
    record_exchanges,
    run_rounds,
    small_federation,
    small_recipe,
)

Array = np.ndarray

METHODS = sorted(name for name, method in find_methods().items() if method.algorithm is CompositionalPairwise)

# ------------------------------------------------------------------------------------------- the twins: numpy only


class Twin(NamedTuple):
    """An objective of the losses of one anchor's pairs, with positives p and with negatives n.

    `estimate(p, n)` gives its estimates, `average(old, fresh, rate)` updates them, `weights(p, n, u, summary)` gives
    the weights of pairs with positives and with negatives, `summarize(us, n₊, n₋)` what clients are told, and
    `refresh_rate(rate, active, passive)` how fast so many active negatives update a passive positive.
    """

    estimate: Callable[[Array, Array], Array]
    average: Callable[[Array, Array, float], Array]
    weights: Callable[[Array, Array, Array, Any], tuple[Array, Array]]
    summarize: Callable[[Array, int, int], Any] = lambda us, positives, negatives: 0.0
    compares_positives: bool = False
    refresh_rate: Callable[[float, int, int], float] = lambda rate, active, passive: rate * active / (active + passive)


def plain_average(old: Array, fresh: Array, rate: float) -> Array:
    return (1 - rate) * old + rate * fresh


def log_average(old: Array, fresh: Array, rate: float) -> Array:
    return np.asarray(np.log((1 - rate) * np.exp(old) + rate * np.exp(fresh)))


def kl_twin(temperature: float, outer: float | None = None) -> Twin:
    def weights(p: Array, n: Array, u: Array, summary: float) -> tuple[Array, Array]:
        inner = np.exp(n / temperature) / np.exp(u[0])
        # exp(u)^(λ/μ) over its mean, which is exp(summary).
        return 0 * p, inner if outer is None else inner * np.exp(u[0]) ** (temperature / outer) / np.exp(summary)

    def summarize(us: Array, positives: int, negatives: int) -> float:
        return 0.0 if outer is None else float(np.log(np.mean(np.exp(us[:, 0]) ** (temperature / outer))))

    def estimate(p: Array, n: Array) -> Array:
        return np.array([np.log(np.mean(np.exp(n / temperature)))])

    return Twin(estimate, log_average, weights, summarize, refresh_rate=lambda rate, active, passive: rate)


def cvar_twin(share: float) -> Twin:
    def estimate(p: Array, n: Array) -> Array:
        return np.array([np.sort(n)[::-1][int(np.ceil(share * len(n))) - 1]])

    return Twin(estimate, plain_average, lambda p, n, u, summary: (0 * p, (n >= u[0]) / share))


def precision_twin() -> Twin:
    def weights(p: Array, n: Array, u: Array, ratio: float) -> tuple[Array, Array]:
        total = u[0] + ratio * u[1]
        return np.full_like(p, -ratio * u[1] / total**2), np.full_like(n, ratio * u[0] / total**2)

    return Twin(lambda p, n: np.array([p.mean(), n.mean()]), plain_average, weights, lambda us, p, n: n / p, True)


def ndcg_twin(top: int = 0, steepness: float = 2.0, smallest: float = 10.0) -> Twin:
    def discount(rank: complex) -> complex:
        share = 1 / (1 + (rank / (top + 0.5)) ** steepness) if top else 1.0
        return complex(share * np.log(2) / np.log(1 + rank))

    def weights(p: Array, n: Array, u: Array, counts: tuple[int, int]) -> tuple[Array, Array]:
        positives, negatives = counts
        # A positive is compared with itself: ψ(0) = 1/2 counts as 1.
        rank = max(0.5 + positives * u[0] + negatives * u[1], smallest)
        # The derivative of an analytic function by a step along the imaginary axis, without any rounding error.
        slope = discount(rank + 1e-30j).imag / 1e-30
        best = sum(1 / np.log2(1 + r) for r in range(1, (min(positives, top) if top else positives) + 1))
        scale = -positives / best * slope
        return np.full_like(p, scale * positives), np.full_like(n, scale * negatives)

    return Twin(lambda p, n: np.array([p.mean(), n.mean()]), plain_average, weights, lambda us, p, n: (p, n), True)


CASES: dict[str, tuple[CompositionalObjective, Twin]] = {
    "partial-auc": (PartialAUCLoss(temperature=0.3), kl_twin(0.3)),
    # A third of the 3 negatives of a step: a whole number.
    "partial-auc-cvar": (PartialAUCTopLoss(max_fpr=1 / 3), cvar_twin(1 / 3)),
    "two-way-partial-auc": (
        TwoWayPartialAUCLoss(temperature=0.3, positive_temperature=0.7),
        kl_twin(0.3, outer=0.7),
    ),
    "average-precision": (AveragePrecisionLoss(), precision_twin()),
    "ndcg": (NDCGLoss(), ndcg_twin()),
    "ndcg, ranks from 1": (NDCGLoss(smallest_rank=1.0), ndcg_twin(smallest=1.0)),
    "ndcg, top 8": (NDCGLoss(top=8, steepness=3.0), ndcg_twin(8, 3.0, smallest=4.0)),
}
every_case = pytest.mark.parametrize("case", CASES)


def psi(t: Array | float) -> Array:
    return np.asarray(1 / (1 + np.exp(t)))


def psi_slope(t: Array | float) -> Array:
    return np.asarray(-psi(t) * psi(-np.asarray(t)))


def estimate_twin(twin: Twin, score: float, positives: Array, negatives: Array) -> Array:
    return twin.estimate(psi(score - positives), psi(score - negatives))


def slope_twin(twin: Twin, gaps: tuple[Array, Array], u: Array, summary: Any) -> tuple[Array, Array]:
    """c ψ' of an anchor's pairs with positives and with negatives."""
    first, second = twin.weights(psi(gaps[0]), psi(gaps[1]), u, summary)
    return first * psi_slope(gaps[0]), second * psi_slope(gaps[1])


class TwinStep(NamedTuple):
    """What a local step finds: active scores, passive scores of the visit with estimates, class weights, a summary."""

    positives: Array
    negatives: Array
    passive_positives: Array
    passive_estimates: Array
    passive_negatives: Array
    scales: tuple[float, float]
    summary: Any


def slopes_twin(twin: Twin, step: TwinStep, estimates: Array, rate: float) -> tuple[Array, Array]:
    """G1 and G2 with respect to the active scores, pair by pair."""
    count, rows = len(step.positives), len(step.negatives)
    on_positives, on_negatives = np.zeros(count), np.zeros(rows)
    for i, score in enumerate(step.positives):
        gaps = (score - step.passive_positives, score - step.passive_negatives)
        with_positives, with_negatives = slope_twin(twin, gaps, estimates[i], step.summary)
        on_positives[i] += with_negatives.mean() + (with_positives.mean() if twin.compares_positives else 0)
    # A class that the client does not hold is replaced by as many passive scores of that class.
    partners = (
        step.positives if step.scales[0] else step.passive_positives[:count],
        step.negatives if step.scales[1] else step.passive_negatives[:rows],
    )
    total = len(step.passive_positives)
    for score, old in zip(step.passive_positives, step.passive_estimates, strict=True):
        refreshed = twin.average(old, estimate_twin(twin, score, *partners), rate)
        gaps = (score - step.positives, score - step.negatives)
        with_positives, with_negatives = slope_twin(twin, gaps, refreshed, step.summary)
        on_negatives -= with_negatives / total
        if twin.compares_positives:
            on_positives -= with_positives / total
    return step.scales[0] / count * on_positives, step.scales[1] / rows * on_negatives


# ----------------------------------------------------------------------------------------- one step against its twin


@every_case
@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("absent", ["none", "positives", "negatives"])
def test_estimates_and_slopes_agree_with_their_twins(case: str, rate: float, absent: str) -> None:
    objective, twin = CASES[case]
    positives, negatives, passive, partners = (random_normal(n, seed=n) for n in (2, 3, 4, 6))
    old = estimate_anchors(objective, random_normal(2, seed=7), random_normal(6, seed=8)).estimates
    given = estimate_anchors(objective, passive, random_normal(6, seed=9))
    summary = objective.summarize_pool(given.estimates, ClassCounts(5, 20))
    # The first positive has an estimate already, the second has none.
    anchors = Anchors(positives, old, torch.tensor([1.0, 0.0], dtype=torch.float64))
    updated = objective.update_anchors(anchors, Passive(passive, partners), rate)
    fresh = [estimate_twin(twin, score, passive.numpy(), partners.numpy()) for score in positives.numpy()]
    expected = np.stack([twin.average(old[0].numpy(), fresh[0], rate), fresh[1]])
    np.testing.assert_allclose(updated.estimates.numpy(), expected, rtol=1e-12)
    assert updated.known.tolist() == [1.0, 1.0]

    scales = (0.0 if absent == "positives" else 1.3, 0.0 if absent == "negatives" else 0.8)
    weights = [torch.full((n,), scale / n, dtype=torch.float64) for n, scale in zip((2, 3), scales, strict=True)]
    active = Active(positives, negatives, *weights)
    pool = PassiveAnchors(given, partners, summary if objective.summary_count else ())
    slopes = objective.active_slopes(active, updated, pool, rate)
    value = twin.summarize(given.estimates.numpy(), 5, 20)
    step = TwinStep(
        positives.numpy(),
        negatives.numpy(),
        passive.numpy(),
        given.estimates.numpy(),
        partners.numpy(),
        scales,
        value,
    )
    first, second = slopes_twin(twin, step, expected, rate)
    np.testing.assert_allclose(slopes.positives.numpy(), first, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(slopes.negatives.numpy(), second, rtol=1e-10, atol=1e-14)
    assert np.abs([*first, *second]).max() > 1e-3


@every_case
def test_a_passive_positive_without_an_estimate_takes_no_part(case: str) -> None:
    objective, _ = CASES[case]
    active, passive = random_anchors(objective)
    unknown = passive._replace(anchors=passive.anchors._replace(known=torch.zeros_like(passive.anchors.known)))
    slopes = objective.active_slopes(active, passive.anchors, unknown, 0.5)
    assert not slopes.negatives.any()
    assert slopes.positives.all()


# -------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize(
    "objective",
    [PartialAUCLoss(temperature=1e9), TwoWayPartialAUCLoss(temperature=1e9, positive_temperature=1e9)],
    ids=lambda objective: objective.name,
)
def test_a_large_temperature_gives_the_pairwise_gradient(objective: CompositionalObjective) -> None:
    active, passive = random_anchors(objective)
    slopes = objective.active_slopes(active, passive.anchors, passive, 0.5)
    expected = PairwiseSigmoid().active_slopes(active, passive.partners)
    torch.testing.assert_close(slopes.positives, expected.positives, rtol=1e-7, atol=0)
    torch.testing.assert_close(slopes.negatives, expected.negatives, rtol=1e-7, atol=0)


def test_a_false_positive_rate_of_1_gives_the_pairwise_gradient() -> None:
    objective = PartialAUCTopLoss(max_fpr=1.0)
    active, passive = random_anchors(objective)
    slopes = objective.active_slopes(active, passive.anchors, passive, 0.5)
    expected = PairwiseSigmoid().active_slopes(active, passive.partners)
    torch.testing.assert_close((slopes.positives, slopes.negatives), (expected.positives, expected.negatives))


def test_a_small_scale_gives_the_metrics() -> None:
    """ψ is then the indicator of a misordered pair, and the losses are one less the metrics (no scores are tied)."""
    positives, negatives = random_normal(5, seed=1), random_normal(40, seed=2) - 1
    labels, scores = np.repeat([1, 0], [5, 40]), torch.cat([positives, negatives]).numpy()
    share = torch.full((5,), 1 / 5, dtype=torch.float64)
    active = Active(positives, negatives, share, torch.full((40,), 1 / 40, dtype=torch.float64))

    def exact_loss(objective: CompositionalObjective) -> float:
        anchors = estimate_anchors(objective, positives, negatives)
        summary = objective.summarize_pool(anchors.estimates, ClassCounts(5, 40))
        return float(objective.monitored_loss(active, anchors, PassiveAnchors(anchors, negatives, summary)))

    # A tenth of 40 negatives: the mean over the 4 highest ones is the area under the curve up to 0.1, over 0.1.
    tops = np.sort(negatives.numpy())[::-1][:4]
    wins = np.mean(positives.numpy()[:, None] > tops)
    assert exact_loss(PartialAUCTopLoss(max_fpr=0.1, scale=1e-6)) == pytest.approx(1 - wins, abs=1e-9)
    precision = parse_metric("ap").measure(labels, scores).value
    # A positive is compared with itself too: its loss is 1/2 where the metric counts it whole.
    gaps = positives[:, None] - positives[None]
    above = (gaps < 0).double().sum(1) + 0.5
    false_alarms = (positives[:, None] < negatives[None]).double().sum(1)
    smooth = float((above / (above + false_alarms)).mean())
    assert exact_loss(AveragePrecisionLoss(scale=1e-6)) == pytest.approx(1 - smooth, abs=1e-9)
    assert abs(smooth - precision) < 0.2
    for top in (0, 3):
        best = sum(1 / np.log2(1 + rank) for rank in range(1, (top or 5) + 1))
        gained = parse_metric(f"ndcg@{top}").measure(labels, scores).value
        objective = NDCGLoss(scale=1e-6, top=top, steepness=1e3, smallest_rank=1.0)
        assert exact_loss(objective) == pytest.approx(5 / best - gained, abs=1e-9)


# ------------------------------------------------------------------------------------------- whole rounds by the twin


class Drawn:
    """Which rows and which places of the pool the library draws: integers, and nothing that depends on a model."""

    def __init__(self) -> None:
        self.clients = small_federation()
        recipe = small_recipe("cycp-partial-auc")
        self.setting = Setting(recipe.seed, 3, recipe.batch, self.clients.census, "clients")
        self._draws = Draws(self.clients, self.setting, "classes", needs_places=True)

    def draw_rows(self, client: int, phase: Phase) -> tuple[Array, Array]:
        drawn = self._draws.draw_cohort((client,), phase)
        assert drawn.places is not None
        rows = np.concatenate([self.clients.inputs.numpy(), np.ones((len(self.clients.inputs), 1))], axis=1)
        return rows[drawn.rows[0]], drawn.places[0][:, :2]

    def draw_positions(self, sizes: list[int], finished: Round) -> tuple[Array, Array]:
        numbered = Passive(*(torch.arange(size, dtype=torch.float64) for size in sizes))
        passive = draw_passive_scores(self.setting, numbered, finished.cohort, finished.phase)
        return passive.positives.numpy().astype(int), passive.negatives.numpy().astype(int)


def run_twin(rounds: list[Round], twin: Twin, rate: float) -> list[tuple[Array, Array, Array]]:
    """Weights and pool after each of the rounds, of which only phases and cohorts are used."""
    drawn, counts = Drawn(), (np.array(POSITIVES), np.array(NEGATIVES))
    holding = np.count_nonzero(counts[0] + counts[1])
    w = np.concatenate([p.detach().numpy().ravel() for p in linear_scorer().parameters()])
    known: dict[tuple[int, int], Array] = {}
    pool: tuple[list[tuple[float, Array]], Array] = ([], np.zeros(0))
    recent: tuple[list[tuple[float, Array | None]], list[float]] = ([], [])
    result, summary = [], twin.summarize(np.zeros((1, 2)), counts[0].sum(), counts[1].sum())
    for finished in rounds:
        phase, ends = finished.phase, []
        if not phase.scoring:
            places = drawn.draw_positions([len(pool[0]), len(pool[1])], finished)
        for m, client in enumerate(finished.cohort.clients):
            rows, own = drawn.draw_rows(client, phase)
            scales = tuple(holding / np.count_nonzero(held) if held[client] else 0.0 for held in counts)
            local = w.copy()
            if not phase.scoring:
                # The passive scores of all local steps; their estimates are updated once, before the first step.
                chosen = [pool[0][place] for place in places[0][m].ravel()]
                passive_positives, passive_negatives = np.array([s for s, _ in chosen]), pool[1][places[1][m].ravel()]
                passive_estimates = np.stack(
                    [
                        twin.average(old, estimate_twin(twin, score, passive_positives, passive_negatives), rate)
                        for score, old in chosen
                    ]
                )
                refresh_rate = twin.refresh_rate(rate, 3, len(passive_negatives))
            for step in range(phase.local_steps):
                x = rows[step]
                scores = x @ local
                if not phase.scoring:
                    given = TwinStep(
                        scores[:2],
                        scores[2:],
                        passive_positives,
                        passive_estimates,
                        passive_negatives,
                        (scales[0], scales[1]),
                        summary,
                    )
                    updated = []
                    for score, place in zip(scores[:2], own[step], strict=True):
                        fresh = estimate_twin(twin, score, given.passive_positives, given.passive_negatives)
                        old = known.get((client, int(place)))
                        updated.append(fresh if old is None else twin.average(old, fresh, rate))
                    first, second = slopes_twin(twin, given, np.stack(updated), refresh_rate)
                    known |= {(client, int(place)): u for place, u in zip(own[step], updated, strict=True)}
                    local = local - float(phase.learning_rate) * np.concatenate([first, second]) @ x
                if counts[0][client]:
                    estimates = [known.get((client, int(place))) for place in own[step]]
                    recent[0].extend(zip(scores[:2], estimates, strict=True))
                if counts[1][client]:
                    recent[1].extend(scores[2:])
            ends.append(local)
        if not phase.scoring:
            w = np.mean(ends, axis=0)
        if phase.round % 3 == 2:
            positives, negatives = np.array([score for score, _ in recent[0]]), np.array(recent[1])
            complete = [
                (score, estimate_twin(twin, score, positives, negatives) if u is None else u) for score, u in recent[0]
            ]
            pool, recent = (complete, negatives), ([], [])
            us = np.stack([u for _, u in complete])
            summary = twin.summarize(us, counts[0].sum(), counts[1].sum())
        table = np.array([[score, *u] for score, u in pool[0]])
        result.append((w, table, pool[1]))
    return result


@every_case
def test_two_cycles_are_the_algorithm(case: str) -> None:
    objective, twin = CASES[case]
    rounds = run_rounds(small_recipe("cycp-partial-auc", objective=objective, estimate_rate=0.4, weighting="clients"))
    assert [r.phase.scoring for r in rounds] == [True] * 3 + [False] * 6
    for finished, (w, positives, negatives) in zip(rounds, run_twin(rounds, twin, 0.4), strict=True):
        server = finished.state.server
        np.testing.assert_allclose(server.shared.weights.numpy(), w, rtol=0, atol=1e-11)
        if len(positives):
            packed = server.private.pool.positives.numpy()
            np.testing.assert_allclose(packed[:, :-1], positives, rtol=0, atol=1e-11)
            assert (packed[:, -1] == 1).all()
            np.testing.assert_allclose(server.private.pool.negatives.numpy(), negatives, rtol=0, atol=1e-11)
    assert not np.allclose(rounds[-1].state.server.shared.weights, rounds[2].state.server.shared.weights, atol=1e-3)


def test_estimates_stay_within_the_losses_that_they_are_means_of() -> None:
    """ψ is in (0, 1): λ u is in [0, 1], thresholds and means are in [0, 1]. Learning is far too fast on purpose."""
    for objective, _ in CASES.values():
        recipe = small_recipe("cycp-partial-auc", objective=objective, cycles=6, learning_rate=30.0)
        training, _, start = assemble_small(recipe)
        list(training.rounds(start))
        temperature = getattr(training.algorithm.objective, "temperature", 1.0)
        states = training.engine.client_states()
        # A client without positives writes too, but nobody reads it.
        rows = torch.cat([state[: POSITIVES[client]] for client, state in states.items()])
        assert rows.shape[0] == sum(POSITIVES)
        assert float(rows[:, :-1].min()) >= 0
        assert temperature * float(rows[:, :-1].max()) <= 1 + 1e-9
        # Every positive has been drawn by now.
        assert (rows[:, -1] == 1).all()


@pytest.mark.parametrize("wrapper", [Momentum(beta=0.6), FedProx(mu=0.7), PersonalHead()], ids=lambda w: w.name)
def test_wrapped_runs_are_the_same_on_both_engines_and_differ_from_plain_ones(wrapper: Wrapper) -> None:
    outcomes = []
    for settings in ({"engine": "loop", "wrappers": (wrapper,)}, {"engine": "batched", "wrappers": (wrapper,)}, {}):
        training, _, start = assemble_small(small_recipe("cycp-average-precision", **settings), two_layers())
        *_, last = training.rounds(start)
        states = [algorithm_estimates(state) for _, state in sorted(training.engine.client_states().items())]
        outcomes.append((last.state.server.shared.weights, torch.stack(states)))
    for loop, batched in zip(*outcomes[:2], strict=True):
        torch.testing.assert_close(batched, loop, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(outcomes[0][0], outcomes[2][0], atol=1e-4)


def two_layers() -> nn.Module:
    module = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    rng = np.random.default_rng(5)
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(rng.normal(0, 0.7, parameter.shape))
    return module


def algorithm_estimates(state: Tree) -> Tensor:
    """The estimates in a client's state, which a wrapper may have wrapped."""
    estimates: Tensor = state if isinstance(state, Tensor) else state.inner
    return estimates


def test_without_momentum_the_wrapped_run_is_the_plain_one() -> None:
    plain, wrapped = (
        run_rounds(small_recipe("cycp-partial-auc", wrappers=wrappers), two_layers())[-1].state.server
        for wrappers in ((), (Momentum(beta=0.0),))
    )
    torch.testing.assert_close(wrapped.shared.weights, plain.shared.weights)


def test_the_window_pool_is_the_last_cycle_length_rounds() -> None:
    rounds, exchanges = record_exchanges(small_recipe("cycp-partial-auc", cycles=2, pool="window"))
    for number, finished in enumerate(rounds[3:], 3):
        window = exchanges[number - 2 : number + 1]
        # 2 local steps with 3 negatives and 2 positives each.
        for side, (held, count) in enumerate(((POSITIVES, 4), (NEGATIVES, 6))):
            holders = sum(held[client] > 0 for exchange in window for client in exchange.cohort.clients)
            assert len(finished.state.server.private.pool[side]) == count * holders


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_client_with_more_positives_than_places_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^most_positives is 4, but a client holds 5 positives, for each of which "):
        assemble_small(small_recipe("cycp-partial-auc", most_positives=4))
    run_rounds(small_recipe("cycp-partial-auc", most_positives=5))


@pytest.mark.parametrize("method", METHODS)
def test_histograms_privacy_and_secure_sums_are_refused_with_the_reason(method: str) -> None:
    with pytest.raises(ValueError, match=r"^pool is 'histogram', but a pair counts by the estimate of its positive"):
        small_recipe(method, pool="histogram")
    coins = CyclicPoisson(rate=0.7, groups=3, assignment="random")
    remedy = "use cycp-pairwise with --algorithm.pool histogram"
    with pytest.raises(ValueError, match=rf"^{method} shares the raw scores of rows .* does not protect; {remedy}"):
        assemble_small(small_recipe(method, epsilon=8.0, delta=1e-3, participation=coins))
    with pytest.raises(ValueError, match=rf"^{method} shares the raw scores of each client .* not hide; {remedy}"):
        assemble_small(small_recipe(method, transforms=(SecureSum(minimum_cohort=2),)))
    with pytest.raises(ValueError, match="uploads the scores of single rows, which noise on gradients does not hide"):
        assemble_small(small_recipe(method, wrappers="example-dp"))


def test_other_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match="objective is 'sigmoid', which the algorithm compositional-pairwise cannot"):
        CompositionalPairwise(objective=PairwiseSigmoid())  # type: ignore[arg-type]
