"""The PL theorems on a small scale: the bowl is the objective, the plan is the theorem's, and the slopes come out.

Every run is keyed. The bounds of the statistical tests are set from the spread over seeds: seeds 0 to 29 were run once,
and "spread" is where 99.8 % of 4,000 draws of five of them lie, over both methods.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedauc.experiments.assembly import assemble_training
from fedauc.models.linear import Linear
from paper import theory, theory_figure, theory_groups
from paper.theory import COHORTS, METHODS, Curve, Findings, Problem, Trial, repeat_trial, solve_rows

SMALL = Problem(groups=2, shards=4, rows=3, features=2)
ROOT = Path(__file__).parents[2]
LABELS = [f"M = {size}" for size in COHORTS]
FEW, MANY = 1, 8
QUICK = Trial(travel=2.4)
"""Half the travel: the gap falls sixteenfold over the three stages that count."""


@pytest.fixture(scope="module", params=METHODS)
def measured(request: pytest.FixtureRequest) -> list[Curve]:
    """Five seeds with one client a round and with eight."""
    return [repeat_trial(Problem(), QUICK, request.param, size, range(5)) for size in (FEW, MANY)]


def power_law(exponent: float, size: int) -> Curve:
    """Three seeds whose gap is exactly steps^(1/exponent) / size, up to a factor of their own."""
    steps = 100 * 2.0 ** np.arange(5)
    gaps = np.array([[0.5], [1.0], [1.5]]) * steps ** (1 / exponent) / size
    return Curve(np.sqrt(steps), steps, gaps)


def pairwise_loss(problem: Problem, weights: np.ndarray) -> float:
    """The mean of (1 - h + h')² over all pairs of rows, whoever holds them."""
    up, down = (rows.reshape(-1, problem.features) @ weights for rows in problem.draw_rows())
    return float(np.square(1 - up[:, None] + down[None]).mean())


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.3, -0.7), (2.0, 1.0)])
def test_the_bowl_is_the_loss_above_its_least_value(weights: tuple[float, float]) -> None:
    found = solve_rows(SMALL.draw_rows())
    least = pairwise_loss(SMALL, found.optimum)
    assert found.gap(np.array(weights)) == pytest.approx(pairwise_loss(SMALL, np.array(weights)) - least, rel=1e-12)
    assert found.gap(np.array(weights)) > 0


@pytest.mark.parametrize("per_group", [1, 2, 4])
def test_every_cohort_works_on_the_same_rows(per_group: int) -> None:
    clients = SMALL.partition_clients(per_group)
    assert len(clients) == 2 * per_group
    assert clients.census.positives.tolist() == clients.census.negatives.tolist() == [3 * 4 // per_group] * len(clients)
    positives, negatives = SMALL.draw_rows()
    for group in range(2):
        mine = range(group * per_group, (group + 1) * per_group)
        held = np.concatenate([clients.inputs.numpy()[clients.positives(client)] for client in mine])
        np.testing.assert_array_equal(held, positives[group].reshape(-1, 2))
        held = np.concatenate([clients.inputs.numpy()[clients.negatives(client)] for client in mine])
        np.testing.assert_array_equal(held, negatives[group].reshape(-1, 2))


def test_a_cohort_that_does_not_divide_the_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="per_group is 3; it must divide the 4 shards of a group"):
        SMALL.partition_clients(3)


@pytest.mark.parametrize("per_round", COHORTS)
def test_the_plan_is_the_theorems(per_round: int) -> None:
    """η_s E_s K I_s is 4.8 in every stage, for every M, and I_s ∝ 1/√(Mη_s) up to whole first visits (6, 4, 3, 2)."""
    recipe = Trial().recipe("cycp-minimax", 4, per_round, seed=0)
    stages = assemble_training(
        recipe, Linear().build((4,), seed=0), Problem().partition_clients(per_round)
    ).training.plan.stages
    assert [stage.learning_rate for stage in stages] == pytest.approx([0.1 / 4**index for index in range(4)])
    for cycles, learning_rate, local_steps in stages:
        assert learning_rate * cycles * 4 * local_steps == pytest.approx(4.8, rel=1e-12)
        # 4 instead of 6/√2 = 4.24, and 2 instead of 2.12.
        assert local_steps == pytest.approx(6 * np.sqrt(0.1 / (per_round * learning_rate)), rel=0.06)


def test_a_travel_of_part_of_a_cycle_is_refused() -> None:
    """Half of 4.8 would be a cycle and a half for two clients, whose visits have four steps."""
    with pytest.raises(ValueError, match=r"travel is 2\.4, which is 1\.5 cycles of 4 visits of 4 steps"):
        QUICK.recipe("cycp-minimax", 4, 2, seed=0)


@pytest.mark.parametrize("exponent", [-0.5, -1.0, -2.0])
def test_a_power_law_is_found_exactly(exponent: float) -> None:
    curves = [power_law(exponent, size) for size in COHORTS]
    assert theory.mean_slope(curves, "steps") == pytest.approx(exponent)
    # Rounds are √steps here.
    assert theory.mean_slope(curves, "rounds") == pytest.approx(exponent / 2)
    # At one gap ε, cost = (Mε)^exponent.
    assert theory.speed_up(curves, "steps") == pytest.approx(exponent)


def test_the_interval_is_the_spread_of_the_seeds() -> None:
    """Seeds that differ by a factor alone have one slope, whichever are drawn; their levels differ."""
    curves = [power_law(-1.0, size) for size in COHORTS]
    low, high = theory.bootstrap_interval(lambda drawn: theory.mean_slope(drawn, "steps"), curves)
    assert (low, high) == (pytest.approx(-1), pytest.approx(-1))
    low, high = theory.bootstrap_interval(lambda drawn: float(drawn[0].gaps.mean(0)[0]), curves)
    # Factors ½, 1, 3/2: the least and the largest mean of three draws with replacement each have a chance of 1/27,
    # which is above 2.5 %.
    assert (low, high) == (pytest.approx(0.5 / 100), pytest.approx(1.5 / 100))


def test_the_plans_own_slopes_approach_the_theorems_as_stages_are_added() -> None:
    """Stage s costs 2^s local steps, so that all up to s cost 2^(s+1) - 1: the -1 is what a short run shows."""
    off = []
    for stages in (8, 16):
        steps = 2.0 ** np.arange(4, stages + 1) - 1
        plain, trial = Curve(steps, steps, np.ones((1, stages - 3))), Trial(decay=0.5, stages=stages, settled=3)
        off.append(theory.mean_slope(theory.planned_curves([plain], trial, [1]), "steps") + 1)
    assert off[0] < off[1] < 0
    assert off[1] == pytest.approx(0, abs=0.01)


def test_the_figure_and_the_record_hold_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "RESAMPLES", 20)
    curves = {name: [power_law(-1.0, size) for size in COHORTS] for name in METHODS}
    found = Findings(curves, {name: curves[name][2:3] for name in METHODS})
    trial = Trial(stages=9, settled=4)
    record = json.loads(json.dumps(theory.make_record(Problem(), trial, found)))
    assert record["seeds"] == 3
    for name in METHODS:
        assert record["slopes"][name]["local steps to ε"]["measured"] == -1
        assert record["slopes"][name]["rounds to ε"]["theorem"] == -0.5
        means = [np.mean(one["gaps"], axis=0)[0] for one in record["curves"]["main"][name]]
        assert means == pytest.approx([0.01 / size for size in COHORTS])
    assert len(list(theory.markdown_table(found, trial))) == 2 + 5 * len(METHODS)
    theory_figure.save_figure(found, trial, tmp_path / "theory.png")
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "RESAMPLES", 20)
    curves = {name: [power_law(-1.0, size) for size in COHORTS] for name in METHODS}
    trial = Trial(stages=9, settled=4)
    made = theory.make_record(Problem(), trial, Findings(curves, {name: curves[name][2:3] for name in METHODS}))
    theory.write_record(made, tmp_path / "theory.json")
    found, again = theory.read_record(tmp_path / "theory.json")
    assert again == trial
    for name in METHODS:
        for written, back in zip(curves[name], found.main[name], strict=True):
            for field in Curve._fields:
                # Five digits are kept.
                np.testing.assert_allclose(getattr(back, field), getattr(written, field), rtol=5e-5)


@pytest.fixture(scope="module")
def kept() -> tuple[Findings, Trial]:
    """The record that docs/theory.md tells of."""
    return theory.read_record(ROOT / "paper/records/theory.json")


@pytest.fixture(scope="module")
def table(kept: tuple[Findings, Trial]) -> list[str]:
    return list(theory.markdown_table(*kept))


@pytest.fixture(scope="module")
def panels(kept: tuple[Findings, Trial]) -> dict[tuple[str, str], dict[str, float]]:
    """Of each solid line in the figure, the words beside it and the slope it is drawn with, by method and column."""
    axes = iter(theory_figure.plot_rates(*kept).axes)
    return {
        (name, column): {
            one.get_label(): float(np.polyfit(np.log(one.get_xdata()), np.log(one.get_ydata()), 1)[0])
            for one in axis.lines
            if one.get_linestyle() == "-" and not one.get_label().startswith("_")
        }
        for name in METHODS
        for column, axis in zip(("rounds", "steps", "cohorts"), axes, strict=False)
    }


def test_the_page_has_the_records_table(table: list[str]) -> None:
    assert "\n".join(table) in (ROOT / "docs/theory.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_groups() -> None:
    gaps = theory_groups.read_gaps(ROOT / "paper/records/theory-groups.json")
    assert "\n".join(theory_groups.markdown_table(gaps)) in (ROOT / "docs/theory.md").read_text(encoding="utf-8")
    for by_order in gaps.values():
        for measured in by_order.values():
            assert len(measured.gaps) == 6


def test_a_power_law_in_the_number_of_groups_is_found_exactly() -> None:
    """Gaps of (K / rounds)^2 need rounds ∝ K for any gap."""
    counts = np.array(theory_groups.GROUPS, dtype=float)
    rounds = counts[:, None] * np.array([10.0, 20.0])
    measured = theory_groups.Gaps(rounds, np.repeat(((counts[:, None] / rounds) ** 2)[None], 3, axis=0))
    growth = theory_groups.measure_growth(measured)
    assert growth.exponent == pytest.approx(1)
    assert growth.exponent_interval == pytest.approx([1, 1])
    assert growth.rounds == pytest.approx(counts / np.sqrt(growth.gap))


@pytest.mark.parametrize("name", METHODS)
def test_the_lines_drawn_have_the_tables_slopes(
    name: str, table: list[str], panels: dict[tuple[str, str], dict[str, float]]
) -> None:
    rows = [row.split(" | ") for row in table if row.startswith(f"| {name} | ")]
    measured = {row[1]: row[4].split(" [")[0] for row in rows}
    own = {row[1]: row[5].removesuffix(" |").split(", ") for row in rows}
    control = {"M = 4, I fixed": measured["rounds to ε, I fixed"]}
    expected = {
        "rounds": dict(zip(LABELS, own["rounds to ε"], strict=True)) | control,
        "steps": dict(zip(LABELS, own["local steps to ε"], strict=True)),
        "cohorts": {what: measured[f"{what} against M"] for what in ("local steps", "rounds")},
    }
    for column, slopes in expected.items():
        drawn = panels[name, column]
        assert {what: f"{value:.2f}" for what, value in zip(slopes, drawn.values(), strict=True)} == slopes
        for (what, value), label in zip(slopes.items(), drawn, strict=True):
            assert label.startswith(f"{what}: ")
            assert value in label


def test_rounds_grow_as_one_over_the_root_of_the_gap(measured: list[Curve]) -> None:
    """The plan's own slope is -0.51 to -0.58: -1/2 and the first stage's rounds. With I fixed it is -1.02."""
    assert theory.mean_slope(theory.planned_curves(measured, QUICK, (FEW, MANY)), "rounds") == pytest.approx(
        -0.5, abs=0.1
    )
    # Spread: -0.77 to -0.35. As many rounds as local steps would be -1, and a gap that stalls steeper still.
    assert -0.8 < theory.mean_slope(measured, "rounds") < -0.33


def test_local_steps_grow_as_one_over_the_gap(measured: list[Curve]) -> None:
    """The plan's own slope is -1.02."""
    assert theory.mean_slope(theory.planned_curves(measured, QUICK, (FEW, MANY)), "steps") == pytest.approx(
        -1, abs=0.05
    )
    # Spread: -1.36 to -0.71.
    assert -1.4 < theory.mean_slope(measured, "steps") < -0.7


def test_eight_clients_leave_an_eighth_of_the_gap_after_as_many_local_steps(measured: list[Curve]) -> None:
    """Linear speed-up: the gap at a stage's end is M^-1."""
    few, many = measured
    np.testing.assert_array_equal(many.steps, few.steps)
    exponent = np.log(many.gaps.mean(0) / few.gaps.mean(0)).mean() / np.log(MANY / FEW)
    # Spread: -1.55 to -0.56. Without a speed-up it is 0.
    assert -1.6 < exponent < -0.5
