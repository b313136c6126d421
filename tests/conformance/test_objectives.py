"""Every objective keeps the same promises; a new file in the folder is picked up here by itself.

Formulas are checked against numpy twins (value and derivative, written from the equations, no library code).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.interfaces import Objective
from fedauc.objectives import find_objectives, kinds
from fedauc.objectives.barrier_hinge import BarrierHinge
from fedauc.objectives.compositional import CompositionalObjective
from fedauc.objectives.contrastive import Contrastive
from fedauc.objectives.kinds import Active, GapObjective, PairObjective, Passive, PointObjective
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.one_vs_rest import OneVsRestLoss
from fedauc.objectives.sigmoid import PairwiseSigmoid
from fedauc.testing._expectations import check_configuration
from fedauc.testing.objective import (
    EXTREMES,
    MISSING_PARTS,
    check_absent_partners,
    check_anchor_slopes,
    check_anchor_stack,
    check_extreme_scores,
    check_gap_slope,
    check_number_fields,
    check_objective,
    check_pair_slopes,
    check_pair_stack,
    check_point_slope,
    check_score_choice,
    loss_and_slopes,
    random_normal,
    random_pairs,
    sample_gaps,
)

Array = np.ndarray

STRETCH = 1.37
"""Multiplies every numeric default, so that each formula is also checked where its parameters differ from 1."""


def number_fields(kind: type[Objective]) -> dict[str, float]:
    return {field.name: field.default for field in dataclasses.fields(kind) if isinstance(field.default, float)}


def make_objectives(base: Any) -> list[Any]:
    """Each discovered member of `base` with its defaults, and once more with every numeric default stretched."""
    kinds: list[Any] = [kind for kind in find_objectives().values() if issubclass(kind, base)]
    stretched = [kind(**{name: STRETCH * value for name, value in number_fields(kind).items()}) for kind in kinds]
    return [kind() for kind in kinds] + stretched


GAPS: list[GapObjective] = make_objectives(GapObjective)
PAIRS: list[PairObjective] = make_objectives(PairObjective)
POINTS: list[PointObjective] = make_objectives(PointObjective)
COMPOSITIONAL: list[CompositionalObjective] = make_objectives(CompositionalObjective)

every = pytest.mark.parametrize("objective", [kind() for kind in find_objectives().values()], ids=lambda o: o.name)
every_gap = pytest.mark.parametrize("objective", GAPS, ids=repr)
every_pair = pytest.mark.parametrize("objective", PAIRS, ids=repr)
every_point = pytest.mark.parametrize("objective", POINTS, ids=repr)
every_compositional = pytest.mark.parametrize("objective", COMPOSITIONAL, ids=repr)
every_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


# ---------------------------------------------------------------------------------------------------------- numpy twins


def logistic_twin(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def barrier_twin(t: Array, m: float, tau: float) -> tuple[Array, Array]:
    branches = np.stack([m - t, m - tau * (m + t), tau * (t - m)])
    return branches.max(0), np.array([-1.0, -tau, tau])[branches.argmax(0)]


GAP_TWINS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "square": lambda t, margin: ((margin - t) ** 2, -2 * (margin - t)),
    "squared-hinge": lambda t, margin: (np.where(t < margin, (margin - t) ** 2, 0), np.minimum(2 * (t - margin), 0)),
    "pairwise-logistic": lambda t, steepness: (
        np.logaddexp(0, -steepness * t),
        -steepness * logistic_twin(-steepness * t),
    ),
    "sigmoid": lambda t, scale: (
        logistic_twin(-t / scale),
        -logistic_twin(-t / scale) * logistic_twin(t / scale) / scale,
    ),
    "barrier-hinge": lambda t, margin, steepness: barrier_twin(t, margin, steepness),
    "qnorm-hinge": lambda t, margin, power: (
        np.maximum(margin - t, 0) ** power,
        -power * np.maximum(margin - t, 0) ** (power - 1),
    ),
}


def gap_twin(objective: GapObjective, t: Array) -> tuple[Array, Array]:
    assert objective.name in GAP_TWINS, f"every equation has a numpy twin: add {objective.name!r} to GAP_TWINS"
    return GAP_TWINS[objective.name](t, **{name: getattr(objective, name) for name in number_fields(type(objective))})


def contrastive_twin(u: Array, v: Array, m: float, same: bool) -> tuple[Array, Array]:
    """The loss of one pair and its derivative with respect to u; zero slope where the distance is zero."""
    distance = np.sqrt(((u - v) ** 2).sum())
    if same:
        return distance**2 / 2, u - v
    lack = max(m - distance, 0.0)
    return np.asarray(lack**2 / 2), -lack * (u - v) / distance if distance > 0 else np.zeros_like(u)


# --------------------------------------------------------------------------------------------------------------- inputs


def agrees_to_rounding(got: Tensor, twin: Array) -> None:
    """exp(-t) with t up to 100 rounded in its last place is off by 100 of them; below `tiny`, precision fades out."""
    kind = torch.finfo(got.dtype)
    torch.testing.assert_close(got, torch.from_numpy(twin).to(got.dtype), rtol=100 * kind.eps, atol=kind.tiny)


# ------------------------------------------------------------------------------------------------------ every objective


def test_every_listed_objective_is_found_under_its_name() -> None:
    members = find_objectives()
    assert set(GAP_TWINS) | {"contrastive", "logistic", "minimax"} <= set(members)
    assert all(kind.name == name for name, kind in members.items())


@every
def test_has_a_kind_this_suite_checks(objective: Objective) -> None:
    assert isinstance(objective, (PairObjective, PointObjective, CompositionalObjective, Minimax, OneVsRestLoss))


@every
def test_the_configuration_is_frozen_and_survives_json(objective: Objective) -> None:
    check_configuration(objective)


@every
def test_unknown_score_is_refused(objective: Objective) -> None:
    check_score_choice(objective)


@every
def test_what_is_not_a_finite_number_is_refused(objective: Objective) -> None:
    check_number_fields(objective)


@pytest.mark.parametrize(
    ("name", "fields", "start"),
    [
        ("square", {"margin": 0.0}, "margin is 0.0; it must be a finite number above 0: raise margin"),
        ("squared-hinge", {"margin": -1.0}, "margin is -1.0; it must be a finite number above 0: raise margin"),
        ("pairwise-logistic", {"steepness": 0}, "steepness is 0; it must be a finite number above 0: raise steepness"),
        ("sigmoid", {"scale": 0.0}, "scale is 0.0; it must be a finite number above 0: raise scale"),
        ("barrier-hinge", {"steepness": 1.0}, "steepness is 1.0; it must be a finite number above 1: raise steepness"),
        ("barrier-hinge", {"margin": 0.0}, "margin is 0.0; "),
        ("qnorm-hinge", {"power": 1}, "power is 1; it must be a number above 1 and below 9: raise power"),
        ("qnorm-hinge", {"power": 9.0}, "power is 9.0; it must be a number above 1 and below 9: lower power"),
        ("contrastive", {"margin": 0.0}, "margin is 0.0; "),
        ("contrastive", {"score": "sigmoid"}, "score is 'sigmoid'; the contrastive objective needs raw outputs: use "),
        ("logistic", {"score": "sigmoid"}, "score is 'sigmoid'; the logistic objective needs raw outputs: use "),
        ("one-vs-rest", {"score": "sigmoid"}, "score is 'sigmoid'; the one-vs-rest objective needs raw outputs: use "),
        ("minimax", {"margin": 0.0}, "margin is 0.0; "),
        ("minimax", {"prior": 1.0}, "prior is 1.0; it must be a number above 0 and below 1: lower prior"),
        ("minimax", {"prior": 0.0}, "prior is 0.0; it must be a number above 0 and below 1: raise prior"),
    ],
)
def test_bad_parameters_name_value_bound_and_remedy(name: str, fields: dict[str, Any], start: str) -> None:
    assert_refused(name, fields, start)


def assert_refused(name: str, fields: dict[str, Any], start: str) -> None:
    with pytest.raises(ValueError) as error:
        find_objectives()[name](**fields)
    assert str(error.value).startswith(start)
    assert "\n" not in str(error.value)


def test_draws() -> None:
    batch_kinds = {objective.name: objective.batch_kind for objective in [*PAIRS, *COMPOSITIONAL, *POINTS]}
    classes = {o.name: "classes" for o in [*PAIRS, *COMPOSITIONAL]}
    assert batch_kinds == classes | {o.name: "rows" for o in POINTS}
    assert (Minimax().batch_kind, Minimax(prior=0.2).batch_kind) == ("classes", "rows")


# -------------------------------------------------------------------------------------------------- surrogates of a gap


@every_gap
def test_gap_formula_agrees_with_its_twin(objective: GapObjective) -> None:
    value, slope = gap_twin(objective, sample_gaps().numpy())
    np.testing.assert_allclose(objective.pair_loss(sample_gaps()).numpy(), value, rtol=1e-13)
    np.testing.assert_allclose(objective.pair_slope(sample_gaps()).numpy(), slope, rtol=1e-13)


@every_gap
def test_gap_slope_is_the_derivative(objective: GapObjective) -> None:
    check_gap_slope(objective)


@every_gap
@every_precision
def test_gap_extremes_are_exact_and_finite(objective: GapObjective, dtype: torch.dtype) -> None:
    check_extreme_scores(objective, dtype)
    points = torch.tensor(EXTREMES, dtype=dtype)
    value, slope = objective.pair_loss(points), objective.pair_slope(points)
    for got, twin in zip((value, slope), gap_twin(objective, np.array(EXTREMES)), strict=True):
        agrees_to_rounding(got, twin)


@every_gap
def test_gap_symmetry_is_as_claimed(objective: GapObjective) -> None:
    """ψ(t) + ψ(-t) is one constant for all |t| up to the margin (for all t where there is none), or it is not."""
    points = torch.linspace(0, getattr(objective, "margin", 50.0), 101, dtype=torch.float64)
    total = objective.pair_loss(points) + objective.pair_loss(-points)
    assert bool(torch.allclose(total, total[:1], rtol=1e-14)) == getattr(objective, "symmetric", False)


def test_symmetry_constants() -> None:
    """1 for the sigmoid; 2m for the barrier hinge up to its margin, and more beyond it."""
    points = torch.tensor([0.4, 1.5, 1.6], dtype=torch.float64)
    sigmoid, barrier_hinge = PairwiseSigmoid(scale=0.3), BarrierHinge(margin=1.5, steepness=2.0)
    assert (sigmoid.pair_loss(points) + sigmoid.pair_loss(-points)).tolist() == pytest.approx([1.0, 1.0, 1.0])
    # At t = 1.6 the right wall stands τ(t - m) = 0.2 high and the middle piece, at -t, m + t = 3.1.
    assert (barrier_hinge.pair_loss(points) + barrier_hinge.pair_loss(-points)).tolist() == pytest.approx(
        [3.0, 3.0, 3.3]
    )


def test_barrier_hinge_takes_the_middle_slope_at_its_kinks() -> None:
    """Kinks of m = 1, τ = 2: t = 1 and t = -mτ/(τ - 1) = -2."""
    points = torch.tensor([-2.001, -2.0, 1.0, 1.001], dtype=torch.float64)
    assert BarrierHinge(margin=1.0, steepness=2.0).pair_slope(points).tolist() == [-2.0, -1.0, -1.0, 2.0]


# ------------------------------------------------------------------------------------------------- active meets passive


@every_pair
@pytest.mark.parametrize("absent", MISSING_PARTS)
def test_couple_derivative_is_twice_the_values(objective: PairObjective, absent: str) -> None:
    """Each pair is seen from both its ends, so the value holds a half of what the derivative belongs to."""
    check_pair_slopes(objective, absent)


@every_gap
def test_couple_value_is_half_the_pairs_summed(objective: GapObjective) -> None:
    active, passive = random_pairs(objective)
    value = objective.monitored_loss(active, passive)
    first = gap_twin(objective, active.positives.numpy()[:, None] - passive.negatives.numpy())[0].mean(1)
    second = gap_twin(objective, passive.positives.numpy() - active.negatives.numpy()[:, None])[0].mean(1)
    total = active.positive_weights.numpy() @ first + active.negative_weights.numpy() @ second
    assert value.item() == pytest.approx(total / 2, rel=1e-12)


@every_pair
def test_couple_of_a_stack_is_the_stack_of_couples(objective: PairObjective) -> None:
    check_pair_stack(objective)


@every_pair
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("block", [1, 40, 10_000])
def test_pairs_in_blocks_give_the_same(
    objective: PairObjective, lead: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, some rows at a time, and all rows in one block."""
    active, passive = random_pairs(objective, lead)
    unblocked = loss_and_slopes(objective, active, passive)
    monkeypatch.setattr(kinds, "MAX_PAIRS_AT_ONCE", 0)
    monkeypatch.setattr(kinds, "PAIRS_PER_BLOCK", block)
    torch.testing.assert_close(loss_and_slopes(objective, active, passive), unblocked, rtol=1e-12, atol=1e-14)
    if lead:
        mapped = torch.func.vmap(functools.partial(loss_and_slopes, objective))
        torch.testing.assert_close(mapped(active, passive), unblocked, rtol=1e-12, atol=1e-14)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(PairwiseSigmoid):
    """Remembers how many gaps it was given at once."""

    seen: list[int] = dataclasses.field(default_factory=list)

    def pair_loss(self, gap: Tensor) -> Tensor:
        self.seen.append(gap.numel())
        return super().pair_loss(gap)


def test_many_pairs_are_met_in_blocks_and_few_at_once() -> None:
    small_problem, large_problem = Watched(), Watched()
    for objective, rows in ((small_problem, 100), (large_problem, 600)):
        scores, weights = random_normal(2, rows), torch.ones(2, rows)
        objective.monitored_loss(Active(scores, scores, weights, weights), Passive(scores, scores))
    # 2 clients of 100 x 100 pairs on either side are below the bound; 600 x 600 are above it.
    assert small_problem.seen == [20_000, 20_000]
    assert sum(large_problem.seen) == 2 * 2 * 600 * 600
    assert max(large_problem.seen) <= kinds.PAIRS_PER_BLOCK


def test_a_compiler_sees_all_pairs_at_once() -> None:
    """It fuses them away, and unrolled blocks would only be more to compile."""
    scores, weights = random_normal(2, 600), torch.ones(2, 600)
    active, passive = Active(scores, scores, weights, weights), Passive(scores, scores)
    block_sizes: list[int] = []

    def count(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        block_sizes.append(sum("cat" in str(node.target) for node in module.graph.nodes))
        return module.forward

    compiled = torch.compile(functools.partial(loss_and_slopes, PairwiseSigmoid()), fullgraph=True, backend=count)
    torch.testing.assert_close(compiled(active, passive), loss_and_slopes(PairwiseSigmoid(), active, passive))
    assert block_sizes == [0]


@every_pair
@every_precision
def test_couple_is_finite_at_extreme_scores(objective: PairObjective, dtype: torch.dtype) -> None:
    check_extreme_scores(objective, dtype)


@pytest.mark.parametrize("margin", [0.5, 3.0], ids=["most pairs apart", "most pairs within the margin"])
def test_contrastive_agrees_with_its_twin(margin: float) -> None:
    objective = Contrastive(margin=margin)
    active, passive = random_pairs(objective)
    value, slopes = loss_and_slopes(objective, active, passive)
    total = 0.0
    for active_side, label in (("positives", 1), ("negatives", 0)):
        weights = (active.negative_weights, active.positive_weights)[label].numpy()
        for row, u in enumerate(getattr(active, active_side).numpy()):
            slope = np.zeros(2)
            for side, passive_label in ((passive.positives.numpy(), 1), (passive.negatives.numpy(), 0)):
                met = [contrastive_twin(u, v, margin, label == passive_label) for v in side]
                total += weights[row] * np.mean([loss for loss, _ in met])
                slope += weights[row] * np.mean([pull for _, pull in met], axis=0)
            np.testing.assert_allclose(getattr(slopes, active_side)[row].numpy(), slope, rtol=1e-12, atol=1e-14)
    assert value.item() == pytest.approx(total / 2, rel=1e-12)


@every_precision
def test_contrastive_is_safe_where_embeddings_coincide(dtype: torch.dtype) -> None:
    """Every distance is 0: similar pairs lose 0, dissimilar ones ½m² = ½; 2 classes' shares of 1, halved: ½."""
    same, share = torch.zeros(2, 3, dtype=dtype, requires_grad=True), torch.full((2,), 0.5, dtype=dtype)
    active, passive = Active(same, same, share, share), Passive(same.detach(), same.detach())
    value, slopes = loss_and_slopes(Contrastive(), active, passive)
    assert value.item() == 0.5
    (derivative,) = torch.autograd.grad(value, same)
    for slope in (slopes.positives, slopes.negatives, derivative):
        assert bool((slope == 0).all())


# ----------------------------------------------------------------------------------- losses with estimates per positive


@every_compositional
def test_exact_estimates_give_the_derivative_through_all_inner_means(objective: CompositionalObjective) -> None:
    for surrogate in ("sigmoid", "squared-hinge", "pairwise-logistic"):
        check_anchor_slopes(dataclasses.replace(objective, surrogate=surrogate))


@every_compositional
def test_anchors_do_without_partners_and_in_stacks(objective: CompositionalObjective) -> None:
    check_absent_partners(objective)
    check_anchor_stack(objective)


@every_compositional
@every_precision
def test_anchor_extremes_are_finite(objective: CompositionalObjective, dtype: torch.dtype) -> None:
    check_extreme_scores(dataclasses.replace(objective, surrogate="squared-hinge"), dtype)
    check_extreme_scores(objective, dtype)


# ------------------------------------------------------------------------------------------------ losses of one example


@pytest.mark.parametrize("surrogate", ["sigmoid", "squared-hinge", "pairwise-logistic"])
@pytest.mark.parametrize("scale", [1.0, STRETCH])
def test_one_vs_rest_keeps_the_promises_of_every_objective(surrogate: Any, scale: float) -> None:
    check_objective(OneVsRestLoss(surrogate=surrogate, scale=scale))


@every_point
def test_point_slope_is_the_derivative(objective: PointObjective) -> None:
    check_point_slope(objective)


@every_point
@every_precision
@pytest.mark.parametrize("label", [0, 1])
def test_point_extremes_are_exact_and_finite(objective: PointObjective, dtype: torch.dtype, label: int) -> None:
    check_extreme_scores(objective, dtype)
    scores = torch.tensor(EXTREMES, dtype=dtype)
    labels = torch.full(scores.shape, label)
    if objective.takes_classes:
        return
    value, slope = objective.example_loss(scores, labels), objective.example_slope(scores, labels)
    if objective.name == "logistic":
        sign, z = 2 * label - 1, np.array(EXTREMES)
        agrees_to_rounding(value, np.logaddexp(0, -sign * z))
        # A slope below one unit in the last place of 1 moves nothing, so its absolute error counts.
        np.testing.assert_allclose(slope, -sign * logistic_twin(-sign * z), rtol=0, atol=float(torch.finfo(dtype).eps))
