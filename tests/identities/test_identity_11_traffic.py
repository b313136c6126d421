"""Identity 11: what travels, float by float, and how large the pool of passive scores is.

Per visit and direction: minimax d + 3, and d + 2 down once per stage and client if there is a proximal term; pairwise
d + I(B₁ + B₂), its scoring visits d down and I(B₁ + B₂) up; FedAvg d; SCAFFOLD 2d; CODASCA 2(d + 3). The pool holds
K·M·I·B scores per class. The twin counts from who came, in which stage, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import nn

from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Participation
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.full import Full
from fedauc.participation.trace import Trace
from fedauc.participation.uniform import Uniform
from fedauc.stages import Geometric
from fedauc.training import Round
from identities.identity_runs import gaussian_clients, linear_module, make_clients, run_recipe

FEATURES, CLIENTS = 4, 6
STEPS, B1, B2 = 3, 2, 5
"""Local steps, positives and negatives per step: all different, so that no two can be mixed up."""

CYCLES = 5
STAGES = [0, 1, 1, 2, 2]
"""The stage of each cycle under Geometric(initial=1, decay=0.5, scale=2): 1, 2, and the 2 that are left of 4."""

GROUPS = ((0, 1, 2), (3, 4, 5))
PARTICIPATIONS: dict[str, tuple[Participation, int, int]] = {
    "full groups": (Cyclic(given=GROUPS), 2, 3),
    "two of three": (Cyclic(given=GROUPS, per_round=2), 2, 2),
    "uniform": (Uniform(per_round=2, groups=3), 3, 2),
    "full": (Full(), 1, CLIENTS),
}
"""Who takes part, K and M."""

who = pytest.mark.parametrize(
    ("participation", "length", "per_round"), PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys()
)


def linear_model() -> nn.Module:
    return linear_module(np.linspace(-0.2, 0.2, FEATURES))


def normalised_model() -> nn.Module:
    """BatchNorm (4 weights, 4 shifts; 4 means, 4 variances and a count travel as well), then 4 weights and a bias."""
    scorer = nn.Linear(FEATURES, 1)
    nn.init.constant_(scorer.weight, 0.1)
    return nn.Sequential(nn.BatchNorm1d(FEATURES), scorer).double()


MODULES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "linear": (linear_model, 4, 4),
    "batch norm": (normalised_model, 13 + 9, 13),
}
"""Each with its d, the floats that make a model, and v of them, the weights: statistics have no variate and no pull."""

sized = pytest.mark.parametrize(("module", "d", "v"), MODULES.values(), ids=MODULES.keys())


class Count(NamedTuple):
    """Totals after a round."""

    visits: int
    down: int
    up: int


def run_method(method: str, participation: Participation, module: nn.Module, **changes: Any) -> list[Round]:
    settings: dict[str, Any] = {
        "participation": participation,
        "stages": Geometric(initial=1, decay=0.5, scale=2),
        "cycles": CYCLES,
        "learning_rate": 0.01,
        "local_steps": STEPS,
        "positives": B1,
        "negatives": B2,
        "dtype": "float64",
    }
    recipe = Recipe.of(method, **{**settings, **changes})
    return run_recipe(recipe, module, make_clients(gaussian_clients([(4, 7)] * CLIENTS, FEATURES, seed=11)))


def count_traffic(rounds: list[Round]) -> list[Count]:
    return [Count(r.traffic.visits, r.traffic.floats_down, r.traffic.floats_up) for r in rounds]


def cohorts_of(rounds: list[Round]) -> list[tuple[int, ...]]:
    return [finished.cohort.clients for finished in rounds]


def traffic_twin(came: Sequence[Sequence[int]], each_way: int, stages: Sequence[int], reference: int) -> list[Count]:
    """The twin: so many floats each way per visit, and a reference down at a client's first visit of a stage."""
    visits = extra = 0
    sent: set[tuple[int, int]] = set()
    counts = []
    for cohort, stage in zip(came, stages, strict=True):
        for client in cohort:
            visits += 1
            extra += 0 if (stage, client) in sent else reference
            sent.add((stage, client))
        counts.append(Count(visits, visits * each_way + extra, visits * each_way))
    return counts


@who
@sized
@pytest.mark.parametrize(
    ("method", "changes", "each_way", "anchored"),
    [
        ("cycp-minimax", {}, lambda d, v: d + 3, False),
        ("cycp-minimax", {"prox": 0.5}, lambda d, v: d + 3, True),
        ("codasca", {}, lambda d, v: (d + 3) + (v + 3), False),
        ("codasca", {"prox": 0.5}, lambda d, v: (d + 3) + (v + 3), True),
        ("cycp-fedavg", {}, lambda d, v: d, False),
        ("a-fedavg", {}, lambda d, v: d, False),
        ("scaffold", {}, lambda d, v: d + v, False),
        ("a-scaffold", {}, lambda d, v: d + v, False),
        ("focus", {}, lambda d, v: d, False),
    ],
    ids=["minimax", "minimax prox", "codasca", "codasca prox", "fedavg", "a-fedavg", "scaffold", "a-scaffold", "focus"],
)
def test_every_round_costs_what_the_records_hold(
    participation: Participation,
    length: int,
    per_round: int,
    module: Callable[[], nn.Module],
    d: int,
    v: int,
    method: str,
    changes: dict[str, float],
    each_way: Callable[[int, int], int],
    anchored: bool,
) -> None:
    rounds = run_method(method, participation, module(), **changes)
    stages = np.repeat(STAGES, length).tolist()
    assert count_traffic(rounds) == traffic_twin(cohorts_of(rounds), each_way(d, v), stages, v + 2 if anchored else 0)
    assert rounds[-1].traffic.visits == CYCLES * length * per_round


def test_a_stages_reference_is_sent_again_in_the_next_stage_only() -> None:
    """Full groups: every client comes once a cycle, and there are 3 stages, so 3 references of d + 2 each."""
    free, pulled = (run_method("cycp-minimax", Cyclic(given=GROUPS), linear_model(), prox=prox) for prox in (0.0, 0.5))
    extra = pulled[-1].traffic.floats_down - free[-1].traffic.floats_down
    assert extra == 3 * CLIENTS * (FEATURES + 2)
    assert pulled[-1].traffic.floats_up == free[-1].traffic.floats_up


def pairwise_traffic_twin(came: Sequence[Sequence[int]], d: int, scoring: Sequence[bool]) -> list[Count]:
    """The twin of the pairwise methods: scoring visits send no scores down and no model up."""
    visits = learning = 0
    counts = []
    for cohort, scores in zip(came, scoring, strict=True):
        visits += len(cohort)
        learning += 0 if scores else len(cohort)
        passing = STEPS * (B1 + B2)
        counts.append(Count(visits, visits * d + learning * passing, learning * d + visits * passing))
    return counts


@who
@pytest.mark.parametrize("pool", ["cycle", "window"])
@pytest.mark.parametrize(
    ("stage_output", "opens"),
    [("last", [1, 0, 0, 0, 0, 0]), ("cycle_mean", [1, 0, 1, 0, 0, 1, 0, 0]), ("round_mean", [1, 0, 1, 0, 0, 1, 0, 0])],
    ids=["last", "cycle mean", "round mean"],
)
def test_pairwise_rounds_cost_a_model_and_the_scores(
    participation: Participation,
    length: int,
    per_round: int,
    pool: str,
    stage_output: str,
    opens: list[int],
) -> None:
    """One cycle of scoring opens the run; a stage that starts from an averaged model scores again (1 marks a cycle)."""
    rounds = run_method("cycp-pairwise", participation, normalised_model(), pool=pool, stage_output=stage_output)
    scoring = np.repeat(opens, length).astype(bool).tolist()
    assert count_traffic(rounds) == pairwise_traffic_twin(cohorts_of(rounds), 13 + 9, scoring)
    assert rounds[-1].traffic.visits == len(opens) * length * per_round


@pytest.mark.parametrize(("dtype", "width"), [("float64", 8), ("float32", 4)])
@pytest.mark.parametrize("method", ["cycp-minimax", "cycp-pairwise", "scaffold"])
def test_bytes_are_floats_times_their_width(method: str, dtype: str, width: int) -> None:
    traffic = run_method(method, Cyclic(given=GROUPS), linear_model(), dtype=dtype)[-1].traffic
    assert traffic.floats_down > 0
    assert (traffic.bytes_down, traffic.bytes_up) == (width * traffic.floats_down, width * traffic.floats_up)


def test_an_absent_client_costs_nothing() -> None:
    """Of groups (0, 1, 2) and (3, 4, 5), clients 0 and 2 come in round 0 and nobody in round 1, over and over."""
    absent = Trace(rows=((0, 0), (0, 2), (1, 0)), schedule=Cyclic(given=GROUPS), repeat=True)
    rounds = run_method("cycp-minimax", absent, linear_model())
    assert cohorts_of(rounds) == [(0, 2), ()] * CYCLES
    assert count_traffic(rounds) == traffic_twin(cohorts_of(rounds), FEATURES + 3, np.repeat(STAGES, 2).tolist(), 0)
    assert rounds[-1].traffic.rounds == 2 * CYCLES
    # One of the first group and three of the second, every cycle.
    assert rounds[-1].traffic.absences == 4 * CYCLES


def pool_sizes(rounds: list[Round]) -> list[tuple[int, int]]:
    pools = [finished.state.server.private.pool for finished in rounds]
    return [(len(pool.positives), len(pool.negatives)) for pool in pools]


def per_class(visits: int) -> tuple[int, int]:
    return visits * STEPS * B1, visits * STEPS * B2


@who
def test_a_cycles_pool_holds_every_score_of_the_cycle(
    participation: Participation, length: int, per_round: int
) -> None:
    sizes = pool_sizes(run_method("cycp-pairwise", participation, linear_model()))
    # Empty until the scoring cycle ends, then whole: K·M·I·B per class, replaced at every cycle's end.
    assert sizes[: length - 1] == [(0, 0)] * (length - 1)
    assert set(sizes[length - 1 :]) == {per_class(length * per_round)}


@who
def test_a_window_holds_the_last_rounds_of_a_cycles_length(
    participation: Participation, length: int, per_round: int
) -> None:
    sizes = pool_sizes(run_method("rs-pairwise", participation, linear_model()))
    assert sizes == [per_class(min(number, length) * per_round) for number in range(1, len(sizes) + 1)]


@pytest.mark.parametrize(
    ("method", "participation", "visits"),
    [
        ("cycp-pairwise", Cyclic(groups=3, per_round=2), 3 * 2),
        ("rs-pairwise", Uniform(per_round=2, groups=3), 3 * 2),
        ("fedxl1", Full(), CLIENTS),
    ],
    ids=["cycp-pairwise", "rs-pairwise", "fedxl1"],
)
def test_each_methods_pool_is_that_of_one_cycle(method: str, participation: Participation, visits: int) -> None:
    rounds = run_method(method, participation, linear_model())
    ends = [size for size, finished in zip(pool_sizes(rounds), rounds, strict=True) if finished.phase.ends_cycle]
    assert ends == [per_class(visits)] * (CYCLES + 1)


def test_the_pool_leaves_out_a_class_that_a_client_lacks() -> None:
    """Two of six clients hold no positive: their slots travel, for shapes are fixed, but never enter the pool."""
    federation = make_clients(gaussian_clients([(4, 7)] * 4 + [(0, 7)] * 2, FEATURES, seed=11))
    recipe = Recipe.of("fedxl1", cycles=2, local_steps=STEPS, positives=B1, negatives=B2, dtype="float64")
    rounds = run_recipe(recipe, linear_model(), federation)
    assert pool_sizes(rounds) == [(4 * STEPS * B1, 6 * STEPS * B2)] * 3
    assert count_traffic(rounds) == pairwise_traffic_twin(cohorts_of(rounds), FEATURES, [True, False, False])
