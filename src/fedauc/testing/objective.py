"""The suite of an objective: its slopes are the derivatives of its loss, for any leading dimensions and any scores."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedauc import keys
from fedauc.fields import list_fields
from fedauc.interfaces import Objective
from fedauc.objectives.compositional import Anchors, ClassCounts, CompositionalObjective, PassiveAnchors
from fedauc.objectives.kinds import Active, GapObjective, PairObjective, Passive, PointObjective
from fedauc.objectives.minimax import Duals, Minimax
from fedauc.objectives.one_vs_rest import ClassRows, OneVsRestLoss
from fedauc.testing._expectations import check_configuration, expect, expect_close, expect_refused
from fedauc.trees import tree_at, tree_map

EXTREMES = [-1e4, -100.0, -21.0, 0.0, 21.0, 100.0, 1e4]
"""e^100 overflows float32 and e^1e4 overflows float64; at 21, float64 still resolves e^-t beside t."""

PRECISIONS = (torch.float32, torch.float64)

MISSING_PARTS = ("none", "active positives", "passive positives", "passive negatives", "passive")
"""What may be absent when a batch meets a pool."""


def check_objective(objective: Objective) -> None:
    """Check an objective: its configuration, its derivatives, stacks of clients, and extreme scores."""
    known = (PairObjective, PointObjective, CompositionalObjective, Minimax, OneVsRestLoss)
    kinds = ", ".join(kind.__name__ for kind in known)
    expect(isinstance(objective, known), f"{type(objective).__name__} derives from none of {kinds}")
    check_configuration(objective, Objective)
    check_score_choice(objective)
    check_number_fields(objective)
    expect(objective.batch_kind in ("classes", "rows"), f"batch_kind is {objective.batch_kind!r}; use classes or rows")
    if isinstance(objective, GapObjective):
        check_gap_slope(objective)
    if isinstance(objective, PairObjective):
        for absent in MISSING_PARTS:
            check_pair_slopes(objective, absent)
        check_pair_stack(objective)
    if isinstance(objective, CompositionalObjective):
        check_anchor_slopes(objective)
        check_absent_partners(objective)
        check_anchor_stack(objective)
    if isinstance(objective, PointObjective):
        check_point_slope(objective)
    if isinstance(objective, Minimax):
        check_saddle_slopes(objective)
        check_saddle_stack(objective)
    if isinstance(objective, OneVsRestLoss):
        check_class_slopes(objective)
        check_class_stack(objective)
    for dtype in PRECISIONS:
        check_extreme_scores(objective, dtype)


def check_score_choice(objective: Objective) -> None:
    """An unknown `score` is refused in one line."""
    expect_refused(lambda: dataclasses.replace(objective, score="softmax"), "score is 'softmax'; use ")  # type: ignore[arg-type]


def check_number_fields(objective: Objective) -> None:
    """What is not a number is refused by every field that takes one, and infinity where the field does not allow it."""
    for known in list_fields(type(objective)):
        if known.type not in (float, float | None):
            continue
        infinite = () if known.description.at_most == math.inf else (math.inf, -math.inf)
        for value in (math.nan, *infinite, "1.0", True):
            settings: dict[str, Any] = {known.name: value}
            start = f"{known.name} is {value!r}; it must be a"
            expect_refused(functools.partial(dataclasses.replace, objective, **settings), start)


# ------------------------------------------------------------------------------------------------------ losses of pairs


def sample_gaps() -> Tensor:
    """Gaps on both sides of every kink; odd steps, so that none falls on one."""
    return torch.arange(-7.31, 7.31, 0.37, dtype=torch.float64)


def check_gap_slope(objective: GapObjective) -> None:
    """`pair_slope` is the derivative of `pair_loss`."""
    gaps = sample_gaps().requires_grad_()
    (derivative,) = torch.autograd.grad(objective.pair_loss(gaps).sum(), gaps)
    expect_close(objective.pair_slope(gaps), derivative, "pair_slope is not the derivative of pair_loss", 1e-12, 1e-14)
    expect(torch.autograd.gradcheck(objective.pair_loss, (gaps,)), "autograd's derivative of pair_loss is wrong")


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    """Keyed normal numbers."""
    return torch.from_numpy(keys.numpy_generator("suite", seed, *shape).normal(size=shape))


def random_pairs(objective: PairObjective, lead: tuple[int, ...] = ()) -> tuple[Active, Passive]:
    """3 + 4 active and 5 + 6 passive scores, or embeddings of size 2 where the objective takes them."""
    tail = (2,) if objective.takes_embeddings else ()
    positives, negatives, first, second = (random_normal(*lead, n, *tail, seed=n) for n in (3, 4, 5, 6))
    weights = random_normal(*lead, 3, seed=7).abs(), random_normal(*lead, 4, seed=8).abs()
    return Active(positives, negatives, *weights), Passive(first, second)


def loss_and_slopes(objective: PairObjective, active: Active, passive: Passive) -> tuple[Tensor, Active]:
    """The monitored value and the derivative."""
    return objective.monitored_loss(active, passive), objective.active_slopes(active, passive)


def check_pair_slopes(objective: PairObjective, absent: str) -> None:
    """Each pair is seen from both its ends, so the value holds a half of what the derivative belongs to."""
    active, passive = random_pairs(objective)
    if absent == "active positives":
        active = active._replace(positive_weights=torch.zeros_like(active.positive_weights))
    none = [side[:0] if absent in ("passive", f"passive {name}") else side for name, side in passive._asdict().items()]
    ends = [active.positives.requires_grad_(), active.negatives.requires_grad_()]
    value, slopes = loss_and_slopes(objective, active, Passive(*none))
    expected = torch.autograd.grad(2 * value, ends)
    sentence = f"active_slopes is not the derivative of twice monitored_loss (absent: {absent})"
    expect_close((slopes.positives, slopes.negatives), expected, sentence, 1e-12, 1e-14)
    expect(value.item() >= 0, f"monitored_loss is {value.item()}, which is negative (absent: {absent})")
    expect((value.item() == 0) == (absent == "passive"), "monitored_loss must be 0 exactly if the pool is empty")


def check_pair_stack(objective: PairObjective) -> None:
    """A stack of clients, and `vmap` over them, give what each client gives alone."""
    active, passive = random_pairs(objective, lead=(5,))
    stacked = loss_and_slopes(objective, active, passive)
    mapped = torch.func.vmap(functools.partial(loss_and_slopes, objective))(active, passive)
    for client in range(5):
        alone = loss_and_slopes(objective, tree_at(active, client), tree_at(passive, client))
        for how, result in (("a stack of clients", stacked), ("vmap over clients", mapped)):
            expect_close(tree_at(result, client), alone, f"{how} does not give what each client gives", 1e-7, 1e-7)


# ----------------------------------------------------------------------------------- losses with estimates per positive


def random_anchors(objective: CompositionalObjective, lead: tuple[int, ...] = ()) -> tuple[Active, PassiveAnchors]:
    """5 active positives and 20 active negatives with weights of sum 1, and the same rows as the whole pool."""
    positives, negatives = random_normal(*lead, 5, seed=3), random_normal(*lead, 20, seed=4) - 1
    shares = [torch.full_like(side, 1 / side.shape[-1]) for side in (positives, negatives)]
    anchors = estimate_anchors(objective, positives, negatives)
    return Active(positives, negatives, *shares), PassiveAnchors(
        anchors, negatives, summarize_anchors(objective, anchors)
    )


def estimate_anchors(objective: CompositionalObjective, positives: Tensor, negatives: Tensor) -> Anchors:
    """All positives, with estimates from all rows."""
    nothing = positives.new_zeros(*positives.shape, objective.estimate_count)
    return objective.update_anchors(Anchors(positives, nothing, nothing[..., 0]), Passive(positives, negatives), 1.0)


def summarize_anchors(objective: CompositionalObjective, anchors: Anchors) -> Any:
    """What clients are told of all positives, the same for every client of a stack; 5 positives, 20 negatives."""
    if not objective.summary_count:
        return ()
    flat = anchors.estimates.detach().reshape(-1, objective.estimate_count)
    summary = objective.summarize_pool(flat, ClassCounts(5, 20))
    return summary.expand(*anchors.scores.shape[:-1], objective.summary_count)


def anchor_loss_and_slopes(
    objective: CompositionalObjective, active: Active, passive: PassiveAnchors
) -> tuple[Tensor, Active]:
    """The monitored value and the derivative, where the passive anchors are the active ones too."""
    value = objective.monitored_loss(active, passive.anchors, passive)
    return value, objective.active_slopes(active, passive.anchors, passive, 1.0)


def check_anchor_slopes(objective: CompositionalObjective) -> None:
    """With exact estimates and the whole pool, G1 + G2 is the derivative of the loss through all its inner means."""
    active, passive = random_anchors(objective)
    value, slopes = anchor_loss_and_slopes(objective, active, passive)
    ends = [active.positives.clone().requires_grad_(), active.negatives.clone().requires_grad_()]
    anchors = estimate_anchors(objective, *ends)
    moving = PassiveAnchors(anchors, ends[1], passive.summary)
    loss = objective.monitored_loss(active._replace(positives=ends[0], negatives=ends[1]), anchors, moving)
    expect_close(loss.detach(), value, "monitored_loss depends on more than scores and estimates", 1e-12, 1e-14)
    sentence = "active_slopes is not the derivative of monitored_loss, with exact estimates and the whole pool"
    expect_close((slopes.positives, slopes.negatives), torch.autograd.grad(loss, ends), sentence, 1e-9, 1e-12)
    expect(value.item() > 0, f"monitored_loss is {value.item()}; it must be above 0 where rows overlap")


def check_absent_partners(objective: CompositionalObjective) -> None:
    """Without passive scores of a class that is compared, nothing is learned or estimated, and nothing fails."""
    active, passive = random_anchors(objective)
    empty = passive._replace(negatives=passive.negatives[:0])
    value, slopes = anchor_loss_and_slopes(objective, active, empty)
    nothing = all(not bool(part.any()) for part in (value, slopes.positives, slopes.negatives))
    expect(nothing, "the loss and its slopes must be 0 without passive negatives")
    unchanged = objective.update_anchors(passive.anchors, empty.partners, 0.5)
    expect(torch.equal(unchanged.estimates, passive.anchors.estimates), "estimates must stay without passive negatives")


def check_anchor_stack(objective: CompositionalObjective) -> None:
    """A stack of clients, and `vmap` over them, give what each client gives alone."""
    active, passive = random_anchors(objective, lead=(3,))
    stacked = anchor_loss_and_slopes(objective, active, passive)
    mapped = torch.func.vmap(functools.partial(anchor_loss_and_slopes, objective))(active, passive)
    for client in range(3):
        alone = anchor_loss_and_slopes(objective, tree_at(active, client), tree_at(passive, client))
        for how, result in (("a stack of clients", stacked), ("vmap over clients", mapped)):
            expect_close(tree_at(result, client), alone, f"{how} does not give what each client gives", 1e-7, 1e-7)


# --------------------------------------------------------------------------------------------------- losses of classes


class ClassStep(NamedTuple):
    """Active scores of 7 rows of three classes, their weights, passive scores of 8 rows, and the classes' shares."""

    scores: Tensor
    weights: Tensor
    passive: Tensor
    shares: Tensor


def random_classes(*lead: int) -> ClassStep:
    """A step with 3, 2 and 2 active rows, and 4, 1 and 3 passive ones."""
    scores, passive = random_normal(*lead, 7, 3, seed=1), random_normal(*lead, 8, 3, seed=2)
    shares = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).expand(*lead, 3)
    return ClassStep(scores, random_normal(*lead, 7, seed=3).abs(), passive, shares)


def class_loss_and_slopes(objective: OneVsRestLoss, step: ClassStep) -> tuple[Tensor, Tensor]:
    """The monitored value and the derivative."""
    rows, passive = ClassRows(step.scores, (3, 2, 2)), ClassRows(step.passive, (4, 1, 3))
    value = objective.monitored_loss(rows, step.weights, passive, step.shares)
    return value, objective.active_slopes(rows, step.weights, passive, step.shares)


def check_class_slopes(objective: OneVsRestLoss) -> None:
    """Each pair is seen from both its ends, so the value holds a half of what the derivative belongs to."""
    step = random_classes()
    step.scores.requires_grad_()
    value, slopes = class_loss_and_slopes(objective, step)
    (expected,) = torch.autograd.grad(2 * value, step.scores)
    expect_close(slopes, expected, "active_slopes is not the derivative of twice monitored_loss", 1e-12, 1e-14)
    expect(value.item() > 0, f"monitored_loss is {value.item()}; it must be above 0 where rows overlap")


def check_class_stack(objective: OneVsRestLoss) -> None:
    """A stack of clients, and `vmap` over them, give what each client gives alone."""
    step = random_classes(3)
    stacked = class_loss_and_slopes(objective, step)
    mapped = torch.func.vmap(functools.partial(class_loss_and_slopes, objective))(step)
    for client in range(3):
        alone = class_loss_and_slopes(objective, tree_at(step, client))
        for how, result in (("a stack of clients", stacked), ("vmap over clients", mapped)):
            expect_close(tree_at(result, client), alone, f"{how} does not give what each client gives", 1e-7, 1e-7)


# --------------------------------------------------------------------------------------------------- losses of examples


def random_scores(*lead: int) -> tuple[Tensor, Tensor]:
    """Scores and labels of 7 examples, the first 3 positive."""
    return random_normal(*lead, 7), (torch.arange(7) < 3).long().expand(*lead, 7)


def check_point_slope(objective: PointObjective) -> None:
    """`example_slope` is the derivative of `example_loss`, and each client of a stack gets its own."""
    scores, labels = random_scores(2)
    if objective.takes_classes:
        scores = random_normal(2, 7, 3)
    scores.requires_grad_()
    loss = objective.example_loss(scores, labels)
    (derivative,) = torch.autograd.grad(loss.sum(), scores)
    sentence = "example_slope is not the derivative of example_loss"
    expect_close(objective.example_slope(scores, labels), derivative, sentence, 1e-12, 1e-14)
    alone = objective.example_loss(scores[1], labels[1])
    expect_close(loss[1], alone, "a stack of clients does not give what each client gives", 1e-7, 1e-7)


# ------------------------------------------------------------------------------------------------------ saddle problems


def random_saddle(*lead: int) -> tuple[Tensor, Tensor, Tensor, Duals]:
    """Scores, labels and weights of 7 examples, the first 3 positive, and duals."""
    scores, labels = random_scores(*lead)
    return scores, labels, random_normal(*lead, 7, seed=1).abs(), Duals(*random_normal(3, *lead, seed=2))


def check_saddle_slopes(objective: Minimax) -> None:
    """`saddle_slopes` are the derivatives of `saddle_value` with respect to scores and duals."""
    scores, labels, weights, duals = random_saddle(4)
    points = [leaf.requires_grad_() for leaf in (scores, *duals)]
    total = objective.saddle_value(scores, labels, weights, duals).sum()
    slope, moves = objective.saddle_slopes(scores, labels, weights, duals)
    expected = torch.autograd.grad(total, points)
    expect_close((slope, *moves), expected, "saddle_slopes are not the derivatives of saddle_value", 1e-12, 1e-13)


def check_saddle_stack(objective: Minimax) -> None:
    """A stack of clients, and `vmap` over them, give what each client gives alone."""
    batch = random_saddle(4)
    for method in (objective.saddle_value, objective.saddle_slopes, objective.monitored_loss):
        stacked, mapped = method(*batch), torch.func.vmap(method)(*batch)
        for client in range(4):
            alone = method(*tree_at(batch, client))
            for result in (stacked, mapped):
                sentence = "a stack of clients does not give what each client gives"
                expect_close(tree_at(result, client), alone, sentence, 1e-7, 1e-7)


# ------------------------------------------------------------------------------------------------------- extreme scores


def check_extreme_scores(objective: Objective, dtype: torch.dtype) -> None:
    """Losses and slopes stay finite and of their type where scores are huge, and losses are never negative."""
    scores = torch.tensor(EXTREMES, dtype=dtype)
    losses, slopes = list[Tensor](), list[Tensor]()
    if isinstance(objective, GapObjective):
        losses, slopes = [objective.pair_loss(scores)], [objective.pair_slope(scores)]
        expect(losses[0].dtype == slopes[0].dtype == dtype, f"pair_loss or pair_slope leaves {dtype}")
    if isinstance(objective, PairObjective):
        active, passive = random_pairs(objective)
        far = Passive(*tree_map(lambda leaf: (1e4 * leaf.sign()).to(dtype), passive))
        value, ends = loss_and_slopes(objective, tree_map(lambda leaf: leaf.to(dtype), active), far)
        losses, slopes = [*losses, value], [*slopes, ends.positives, ends.negatives]
    if isinstance(objective, CompositionalObjective):
        near, pool = tree_map(lambda leaf: leaf.to(dtype), random_anchors(objective))
        far = pool._replace(
            anchors=pool.anchors._replace(scores=1e4 * pool.anchors.scores.sign()),
            negatives=1e4 * pool.negatives.sign(),
        )
        anchors = objective.update_anchors(pool.anchors, far.partners, 0.5)
        ends = objective.active_slopes(near, anchors, far, 0.5)
        losses, slopes = [objective.monitored_loss(near, anchors, far)], [ends.positives, ends.negatives]
    if isinstance(objective, OneVsRestLoss):
        near = ClassStep(*(part.to(dtype) for part in random_classes()))
        value, class_slopes = class_loss_and_slopes(objective, near._replace(passive=1e4 * near.passive.sign()))
        losses, slopes = [value], [class_slopes]
    if isinstance(objective, PointObjective):
        points = torch.stack([scores, scores.flip(0)], dim=-1) if objective.takes_classes else scores
        for label in (0, 1):
            labels = torch.full(scores.shape, label)
            losses.append(objective.example_loss(points, labels))
            slopes.append(objective.example_slope(points, labels))
    if isinstance(objective, Minimax):
        _, labels, weights, duals = random_saddle()
        batch = scores, labels, weights.to(dtype), Duals(*(1e4 * dual.sign().to(dtype) for dual in duals))
        slope, moves = objective.saddle_slopes(*batch)
        losses, slopes = [objective.monitored_loss(*batch)], [objective.saddle_value(*batch), slope, *moves]
        expect(all(result.dtype == dtype for result in (*losses, *slopes)), f"the saddle problem leaves {dtype}")
    finite = all(bool(result.isfinite().all()) for result in (*losses, *slopes))
    expect(finite, f"a loss or slope is not finite at scores of up to 1e4 in {dtype}")
    expect(all(bool((loss >= 0).all()) for loss in losses), f"a loss is negative at scores of up to 1e4 in {dtype}")
