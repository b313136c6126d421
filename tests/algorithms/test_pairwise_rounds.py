"""CyCp-Pairwise over two cycles against a numpy twin, and which rounds' scores a round draws from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import keys
from fedauc.algorithms._pool import draw_passive_scores
from fedauc.engines.draws import Draws
from fedauc.interfaces import Cohort, Phase, Setting
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.kinds import GapObjective, Passive
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.objectives.squared_hinge import SquaredHinge
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.trace import Trace
from fedauc.training import Round
from small_federations import (
    FEATURES,
    GROUPS,
    NEGATIVES,
    POSITIVES,
    linear_scorer,
    record_exchanges,
    run_rounds,
    small_federation,
    small_recipe,
)

Array = np.ndarray

# ------------------------------------------------------------------------------------------- the twin: numpy only


class Surrogate(NamedTuple):
    """A surrogate of the gap and its derivative."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]


SIGMOID = Surrogate(lambda t: 1 / (1 + np.exp(t)), lambda t: -np.exp(t) / (1 + np.exp(t)) ** 2)
HINGE = Surrogate(lambda t: np.maximum(1 - t, 0) ** 2, lambda t: -2 * np.maximum(1 - t, 0))


class Visit(NamedTuple):
    """A client's visit: its rows of each step with a last column of ones, and its passive scores `[I, B]`."""

    positives: Array
    negatives: Array
    scales: tuple[float, float]
    passive_positives: Array
    passive_negatives: Array


def scales_twin(counts: Sequence[Array], client: int, weighting: str) -> tuple[float, float]:
    """How much a client's class means count, by the three rules."""
    holding = np.count_nonzero(counts[0] + counts[1])
    result = []
    for held in counts:
        rules = {
            "clients": holding / np.count_nonzero(held) if held[client] else 0.0,
            "pooled": holding * held[client] / held.sum(),
            "paper": float(held[client] > 0),
        }
        result.append(rules[weighting])
    return result[0], result[1]


def visit_twin(start: Array, visit: Visit, psi: Surrogate, learning_rate: float) -> tuple[Array, Array, Array, float]:
    """I local steps: the client's weights, its scores by class, and the loss before its first step."""
    w, first, second, values = start.copy(), [], [], []
    for rows, others, alike, unlike in zip(
        visit.positives, visit.negatives, visit.passive_positives, visit.passive_negatives, strict=True
    ):
        gradient, value = np.zeros_like(w), np.zeros(())
        first.append(rows @ w)
        second.append(others @ w)
        for x in rows:
            for passive in unlike:
                share = visit.scales[0] / len(rows) / len(unlike)
                gradient += share * psi.slope(x @ w - passive) * x
                value += share * psi.value(x @ w - passive) / 2
        for x in others:
            for passive in alike:
                share = visit.scales[1] / len(others) / len(alike)
                gradient -= share * psi.slope(passive - x @ w) * x
                value += share * psi.value(passive - x @ w) / 2
        w = w - learning_rate * gradient
        values.append(value)
    return w, np.array(first), np.array(second), float(values[0])


def pool_twin(entries: list[tuple[int, Array]], held: Array, offset: float | None) -> Array:
    """The scores of holders; with an offset, resampled so that each counts by its client's rows."""
    holding = [(client, scores) for client, scores in entries if held[client]]
    flat = np.concatenate([scores.ravel() for _, scores in holding])
    if offset is None:
        return flat
    weights = np.concatenate([np.full(scores.size, float(held[client])) for client, scores in holding])
    edges = np.cumsum(weights) / weights.sum() * len(flat)
    return np.array([flat[next(j for j, edge in enumerate(edges) if edge > k + offset)] for k in range(len(flat))])


# ------------------------------------------------------------------------------------- the draws, read from the library


class Drawn:
    """Which rows and which places of the pool the library draws: integers, and nothing that depends on a model."""

    def __init__(self, weighting: str) -> None:
        self.clients = small_federation()
        recipe = small_recipe("cycp-pairwise")
        self.setting = Setting(recipe.seed, 3, recipe.batch, self.clients.census, weighting)
        self._draws = Draws(self.clients, self.setting, "classes")

    def draw_rows(self, client: int, phase: Phase) -> tuple[Array, Array]:
        index = self._draws.draw_visit(client, phase).rows
        rows = np.concatenate([self.clients.inputs.numpy(), np.ones((len(self.clients.inputs), 1))], axis=1)[index]
        return rows[:, :2], rows[:, 2:]

    def draw_positions(self, sizes: tuple[int, int], cohort: Cohort, phase: Phase) -> tuple[Array, Array]:
        # A pool whose scores are their own places shows which places are drawn.
        numbered = Passive(*(torch.arange(size, dtype=torch.float64) for size in sizes))
        passive = draw_passive_scores(self.setting, numbered, cohort, phase)
        return passive.positives.numpy().astype(int), passive.negatives.numpy().astype(int)

    def resample_offset(self, phase: Phase, side: int) -> float | None:
        if self.setting.weighting != "pooled":
            return None
        return float(keys.random_words(1, self.setting.seed, "resample", phase.round, side)[0]) / 2**64


def run_twin(rounds: list[Round], psi: Surrogate, weighting: str) -> list[tuple[Array, tuple[Array, Array], float]]:
    """Weights, pool and mean value after each of the rounds, whose phases and cohorts alone are used."""
    algorithm = Drawn(weighting)
    counts = (np.array(POSITIVES), np.array(NEGATIVES))
    w = np.concatenate([p.detach().numpy().ravel() for p in linear_scorer().parameters()])
    pool = (np.zeros(0), np.zeros(0))
    collected: tuple[list[tuple[int, Array]], list[tuple[int, Array]]] = ([], [])
    result = []
    for phase, cohort in ((r.phase, r.cohort) for r in rounds):
        ends, values = [], []
        if not phase.scoring:
            places = algorithm.draw_positions((len(pool[0]), len(pool[1])), cohort, phase)
        for m, client in enumerate(cohort.clients):
            rows = algorithm.draw_rows(client, phase)
            if phase.scoring:
                scores = (rows[0] @ w, rows[1] @ w)
            else:
                passive = (pool[0][places[0][m]], pool[1][places[1][m]])
                visit = Visit(*rows, scales_twin(counts, client, weighting), *passive)
                end, *scores, value = visit_twin(w, visit, psi, float(phase.learning_rate))  # type: ignore[assignment]
                ends.append(end)
                values.append(value)
            for side in range(2):
                collected[side].append((client, scores[side]))
        if not phase.scoring:
            w = np.mean(ends, axis=0)
        if phase.round % 3 == 2:
            pool = (
                pool_twin(collected[0], counts[0], algorithm.resample_offset(phase, 0)),
                pool_twin(collected[1], counts[1], algorithm.resample_offset(phase, 1)),
            )
            collected = ([], [])
        result.append((w, pool, float(np.mean(values)) if values else np.nan))
    return result


# ------------------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
@pytest.mark.parametrize(
    ("objective", "psi"), [(PairwiseSigmoid(), SIGMOID), (SquaredHinge(), HINGE)], ids=["sigmoid", "squared-hinge"]
)
def test_two_cycles_are_the_papers_algorithm(objective: GapObjective, psi: Surrogate, weighting: str) -> None:
    rounds = run_rounds(small_recipe("cycp-pairwise", objective=objective, weighting=weighting))
    # A scoring cycle and two learning cycles of K = 3 rounds.
    assert [r.phase.scoring for r in rounds] == [True] * 3 + [False] * 6
    for finished, (w, pool, value) in zip(rounds, run_twin(rounds, psi, weighting), strict=True):
        server = finished.state.server
        np.testing.assert_allclose(server.shared.weights.numpy(), w, rtol=0, atol=1e-12)
        for side in range(2):
            np.testing.assert_allclose(server.private.pool[side].numpy(), pool[side], rtol=0, atol=1e-12)
        assert finished.loss_value == (None if finished.phase.scoring else pytest.approx(value, abs=1e-12))
    assert not np.allclose(rounds[-1].state.server.shared.weights, rounds[2].state.server.shared.weights, atol=1e-3)


def test_a_cycle_draws_from_the_cycle_before_it_and_nothing_newer() -> None:
    # Draws are without replacement: 8 steps of 2 exhaust the pool's positives, so that what is sent shows all of it.
    rounds, exchanges = record_exchanges(
        small_recipe("cycp-pairwise", cycles=3, local_steps=8, positives=2, negatives=2)
    )
    for cycle in range(1, 4):
        earlier = [e for e in exchanges if e.download.phase.cycle == cycle - 1]
        for side, held in enumerate((POSITIVES, NEGATIVES)):
            emitted = {
                score
                for e in earlier
                for position, client in enumerate(e.cohort.clients)
                if held[client]
                for score in e.upload.pool[side][position].flatten().tolist()
            }
            sent = {
                score
                for e in exchanges
                if e.download.phase.cycle == cycle
                for score in e.download.per_client[side].flatten().tolist()
            }
            assert sent
            assert sent <= emitted
    pools = [r.state.server.private.pool.positives for r in rounds]
    assert all(pools[r] is pools[r - 1] for r in range(1, len(rounds)) if r % 3 != 2)
    # Of 7 clients, 5 hold each class; K M I B = 5 * 8 * 2 scores enter.
    assert [len(pool) for pool in pools[2::3]] == [80] * 4


def test_the_window_pool_is_the_last_cycle_length_rounds() -> None:
    # Pooled weighting would resample the pool.
    rounds, exchanges = record_exchanges(small_recipe("rs-pairwise", cycles=3, weighting="clients"))
    assert len(rounds) == len(exchanges) == 12
    for number, finished in enumerate(rounds):
        window = exchanges[max(0, number - 2) : number + 1]
        for side, held in enumerate((POSITIVES, NEGATIVES)):
            parts = [
                e.upload.pool[side][position].flatten()
                for e in window
                for position, client in enumerate(e.cohort.clients)
                if held[client]
            ]
            torch.testing.assert_close(finished.state.server.private.pool[side], torch.cat(parts), rtol=0, atol=0)


def test_a_class_that_nobody_had_in_a_cycle_keeps_its_old_scores() -> None:
    # Everyone comes to the scoring cycle; later only client 1, which holds no positives, and then nobody.
    scoring = [(r, c) for r in range(3) for c, group in enumerate(GROUPS) if group == r]
    trace = Trace(rows=(*scoring, (3, 1), (8, 1)), schedule=Cyclic(groups=3, assignment="metadata"))
    rounds = run_rounds(small_recipe("cycp-pairwise", participation=trace))
    first, second, third = (rounds[r].state.server.private.pool for r in (2, 5, 8))
    assert torch.equal(second.positives, first.positives)
    assert not torch.equal(second.negatives[:6], first.negatives[:6])
    # One client's 2 steps of 3 negatives.
    assert len(second.negatives) == 6
    assert torch.equal(third.positives, first.positives)
    assert torch.equal(third.negatives, second.negatives)


class Embedding(nn.Module):
    """Two linear scores per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 2, dtype=torch.float64)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(rows)
        return result


@pytest.mark.parametrize("came", [(), ((0, 1),), ((1, 3),)], ids=["no-pool", "no-positives", "no-negatives"])
@pytest.mark.parametrize("kind", ["scores", "embeddings"])
def test_learning_goes_on_when_the_first_pool_lacks_a_class(came: tuple[tuple[int, int], ...], kind: str) -> None:
    everyone = [(r, c) for r in range(3, 9) for c, group in enumerate(GROUPS) if group == r % 3]
    trace = Trace(rows=(*came, *everyone), schedule=Cyclic(groups=3, assignment="metadata"))
    settings: dict[str, Any] = {"objective": Contrastive()} if kind == "embeddings" else {}
    module = Embedding() if kind == "embeddings" else linear_scorer()
    rounds = run_rounds(small_recipe("cycp-pairwise", participation=trace, **settings), module)
    start, half, end = (rounds[r].state.server.shared.weights for r in (0, 5, 8))
    # A client with pairs to form learns; without any pool nobody has, until the cycle ends.
    # A mean of equal weights over 3 clients may still round.
    assert torch.allclose(start, half, rtol=0, atol=1e-12) == (came == ())
    assert not torch.allclose(half, end, rtol=0, atol=1e-6)
