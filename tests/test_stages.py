"""Stage rules fill the budget with the paper's lengths and steps; a plan's phases agree with each other."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from fedauc.interfaces import BatchSize, Phase
from fedauc.stages import (
    Budget,
    Constant,
    Geometric,
    Milestones,
    Plan,
    Stage,
    StageRule,
    Theory,
    find_stage_rules,
)
from fedauc.testing._expectations import check_configuration
from fedauc.testing.stage_rule import check_stages

BATCH = BatchSize(2, 3)

RULES: list[StageRule] = [
    Constant(),
    Geometric(initial=1),
    Geometric(initial=3, decay=0.3, scale=1.0),
    Geometric(initial=2, decay=0.5, scale=1.5, local_steps="adaptive"),
    Milestones(),
    Milestones(at=(0.1, 0.2, 0.9), decay=0.5),
    Theory(),
    Theory(mu=1.0, ell=4.0),
]


def make_budget(cycles: int = 20, learning_rate: float = 0.1, local_steps: int = 4) -> Budget:
    """K = 8 rounds per cycle, M = 6 clients per round."""
    return Budget(cycles, learning_rate, local_steps, cycle_length=8, per_round=6)


def test_rules_are_found_by_their_names() -> None:
    assert {name: rule.name for name, rule in find_stage_rules().items()} == {name: name for name in find_stage_rules()}
    assert set(find_stage_rules().values()) == {type(rule) for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("cycles", [1, 2, 3, 7, 100])
def test_stages_fill_the_budget_exactly(rule: StageRule, cycles: int) -> None:
    check_stages(rule, cycles)
    stages = rule.divide_budget(make_budget(cycles))
    assert all(earlier.learning_rate >= later.learning_rate for earlier, later in pairwise(stages))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_configuration_is_frozen_and_survives_json(rule: StageRule) -> None:
    check_configuration(rule)


def test_constant_is_one_stage() -> None:
    assert Constant().divide_budget(make_budget(20)) == [Stage(20, 0.1, 4)]


@pytest.mark.parametrize(("initial", "decay", "scale"), [(2, 0.5, 2.0), (3, 0.1, 3.0), (1, 0.7, 1.0), (5, 1.0, 1.5)])
def test_geometric_lengths_and_steps_are_powers(initial: int, decay: float, scale: float) -> None:
    stages = Geometric(initial=initial, decay=decay, scale=scale).divide_budget(make_budget(cycles=60))
    expected = [round(initial * scale**s) for s in range(len(stages))]
    # The last stage is cut to what is left of the 60 cycles.
    assert [stage.cycles for stage in stages[:-1]] == expected[:-1]
    assert stages[-1].cycles == 60 - sum(expected[:-1]) <= expected[-1]
    np.testing.assert_allclose(
        [stage.learning_rate for stage in stages], 0.1 * decay ** np.arange(len(stages)), rtol=1e-12
    )
    assert {stage.local_steps for stage in stages} == {4}


def test_reciprocal_factors_keep_step_times_length_constant() -> None:
    # 2 + 8 + 32 cycles: no stage is cut.
    products = [
        s.learning_rate * s.cycles
        for s in Geometric(initial=2, decay=0.25, scale=4).divide_budget(make_budget(cycles=42))
    ]
    np.testing.assert_allclose(products, [0.2] * 3, rtol=1e-12)


def test_adaptive_local_steps_grow_as_one_over_the_root_of_the_step() -> None:
    rule = Geometric(initial=1, decay=0.25, scale=2.0, local_steps="adaptive")
    # sqrt(1/0.25) = 2 per stage, from I = 4.
    assert [stage.local_steps for stage in rule.divide_budget(make_budget(cycles=15))] == [4, 8, 16, 32]
    odd = Geometric(initial=1, decay=0.5, scale=1.0, local_steps="adaptive").divide_budget(
        make_budget(cycles=6, local_steps=3)
    )
    expected = [round(3 * math.sqrt(0.1 / stage.learning_rate)) for stage in odd]
    assert [stage.local_steps for stage in odd] == expected == [3, 4, 6, 8, 12, 17]


def test_milestones_fall_at_their_shares() -> None:
    stages = Milestones(at=(0.25, 0.5), decay=0.5).divide_budget(make_budget(cycles=8))
    assert stages == [Stage(2, 0.1, 4), Stage(2, 0.05, 4), Stage(4, 0.025, 4)]


def test_a_milestone_stretch_without_cycles_vanishes_but_still_decays() -> None:
    # Of 4 cycles, shares of 0.3 and 0.5 both reach into the second: the step falls twice after it.
    stages = Milestones(at=(0.3, 0.5), decay=0.1).divide_budget(make_budget(cycles=4))
    assert [stage.cycles for stage in stages] == [2, 2]
    np.testing.assert_allclose([stage.learning_rate for stage in stages], [0.1, 0.001], rtol=1e-12)


def test_even_one_cycle_runs_at_the_full_step() -> None:
    assert Milestones().divide_budget(make_budget(cycles=1)) == [Stage(1, 0.1, 4)]


def theory_twin(budget: Budget, mu: float, ell: float, count: int) -> list[tuple[int, float, int]]:
    """The theorem: c, step, T, I and E of each stage, with μ₂ = 2."""
    dual = 2.0
    smooth = ell + ell**2 / dual
    hat = smooth + 2 * ell
    c = (mu / hat) / (5 + mu / hat)
    s = np.arange(count)
    step = budget.learning_rate * np.exp(-c * s)
    iterations = 212 / (budget.learning_rate * min(ell, dual)) * np.exp(c * s)
    local = np.maximum(1, np.rint(1 / (budget.cycle_length * np.sqrt(budget.per_round * step))))
    cycles = np.maximum(1, np.rint(iterations / (budget.cycle_length * local)))
    return list(zip(cycles.astype(int).tolist(), step.tolist(), local.astype(int).tolist(), strict=True))


# ell below and above μ₂ = 2 takes both sides of the minimum; a step of 1e-5 makes I = 1/(8 sqrt(6e-5)) = 16 > 1.
@pytest.mark.parametrize(("mu", "ell"), [(0.1, 1.0), (3.0, 3.0), (0.5, 8.0)])
@pytest.mark.parametrize("learning_rate", [0.1, 1e-5])
def test_theory_is_the_theorem(mu: float, ell: float, learning_rate: float) -> None:
    budget = make_budget(cycles=10**9, learning_rate=learning_rate)
    rule = Theory(mu=mu, ell=ell)
    generator = rule.generate_stages(budget)
    stages = [next(generator) for _ in range(40)]
    for stage, (cycles, step, local) in zip(stages, theory_twin(budget, mu, ell, 40), strict=True):
        assert (stage.cycles, stage.local_steps) == (cycles, local)
        assert stage.learning_rate == pytest.approx(step, rel=1e-12)
    assert rule.proximal_weight == 2 * ell
    assert (stages[0].local_steps > 1) == (learning_rate == 1e-5)


# --------------------------------------------------------------------------------------------------------------- plans


def random_plan(seed: int) -> tuple[Plan, list[Stage], int, list[bool]]:
    """1 to 4 stages of 1 to 5 cycles of 1 to 6 rounds, each perhaps opening with a scoring cycle."""
    rng = np.random.default_rng(seed)
    stages = [Stage(int(rng.integers(1, 6)), 0.5**s, int(rng.integers(1, 9))) for s in range(int(rng.integers(1, 5)))]
    length, scoring = int(rng.integers(1, 7)), [bool(rng.integers(2)) for _ in stages]
    return Plan(stages, length, BATCH, scoring), stages, length, scoring


def phases_twin(stages: list[Stage], length: int, scoring: list[bool]) -> list[Phase]:
    """Round after round, by counting."""
    expected: list[Phase] = []
    cycle = learned = 0
    for index, (stage, opens) in enumerate(zip(stages, scoring, strict=True)):
        for inside in range(stage.cycles + opens):
            learned += not (opens and inside == 0)
            for position in range(length):
                ends_cycle = position == length - 1
                expected.append(
                    Phase(
                        round=len(expected),
                        cycle=cycle,
                        stage=index,
                        learning_rate=stage.learning_rate,
                        local_steps=stage.local_steps,
                        batch=BATCH,
                        scoring=opens and inside == 0,
                        starts_stage=inside == 0 and position == 0,
                        ends_cycle=ends_cycle,
                        ends_stage=ends_cycle and inside == stage.cycles + opens - 1,
                        learning_cycles=learned,
                    )
                )
            cycle += 1
    return expected


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_its_stages_counted_out(seed: int) -> None:
    plan, stages, length, scoring = random_plan(seed)
    expected = phases_twin(stages, length, scoring)
    assert plan.total_rounds == len(expected)
    assert plan.stages == stages
    # From the end, as a resumed run would ask.
    assert [plan.phase(number) for number in reversed(range(plan.total_rounds))] == expected[::-1]


@pytest.mark.parametrize("seed", range(40))
def test_flags_of_a_plan_agree(seed: int) -> None:
    plan, stages, length, scoring = random_plan(seed)
    phases = [plan.phase(number) for number in range(plan.total_rounds)]
    assert sum(p.starts_stage for p in phases) == sum(p.ends_stage for p in phases) == len(stages)
    assert phases[0].starts_stage
    assert phases[-1].ends_stage
    assert all(
        later.starts_stage == earlier.ends_stage == (later.stage == earlier.stage + 1)
        for earlier, later in pairwise(phases)
    )
    assert all(later.cycle - earlier.cycle == earlier.ends_cycle for earlier, later in pairwise(phases))
    assert all(p.ends_cycle for p in phases if p.ends_stage)
    assert not any(p.scoring and p.ends_stage for p in phases)
    assert sum(p.scoring for p in phases) == length * sum(scoring)
    assert sum(not p.scoring for p in phases) == length * sum(stage.cycles for stage in stages)


# ------------------------------------------------------------------------------------------------------ bad parameters


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (Geometric, {"initial": 0}, "initial is 0; "),
        (Geometric, {"decay": 0.0}, "decay is 0.0; "),
        (Geometric, {"decay": 1.5}, "decay is 1.5; "),
        (Geometric, {"decay": math.nan}, "decay is nan; "),
        (Geometric, {"scale": 0.5}, "scale is 0.5; "),
        (Geometric, {"scale": math.inf}, "scale is inf; "),
        (Geometric, {"scale": math.nan}, "scale is nan; "),
        (Geometric, {"local_steps": "many"}, "local_steps is 'many'; "),
        (Milestones, {"at": (0.5, 0.5)}, r"at is \(0.5, 0.5\); "),
        (Milestones, {"at": (0.0, 0.5)}, r"at is \(0.0, 0.5\); "),
        (Milestones, {"at": (0.5, 1.0)}, r"at is \(0.5, 1.0\); "),
        (Milestones, {"at": (0.7, 0.2)}, r"at is \(0.7, 0.2\); "),
        (Milestones, {"at": (math.nan,)}, r"at is \(nan,\); "),
        (Milestones, {"decay": -0.1}, "decay is -0.1; "),
        (Theory, {"mu": 0.0}, "mu is 0.0; "),
        (Theory, {"mu": 2.0}, r"mu is 2.0; .*ell \(1.0\)"),
        (Theory, {"mu": math.nan}, "mu is nan; "),
        (Theory, {"ell": math.inf}, "ell is inf; "),
    ],
)
def test_a_bad_parameter_is_named_in_one_line(rule: type[StageRule], settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        rule(**settings)
    assert "\n" not in str(caught.value)
