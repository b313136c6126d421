"""The records, their trees, and the reduction that the server does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.algorithms import find_algorithms
from fedauc.interfaces import BatchSize, Model, Setting
from fedauc.objectives import find_objectives
from fedauc.objectives.compositional import CompositionalObjective
from fedauc.objectives.kinds import GapObjective, PairObjective, PointObjective, mean_last
from fedauc.objectives.logistic import Logistic
from fedauc.objectives.minimax import Minimax
from fedauc.objectives.one_vs_rest import OneVsRestLoss
from fedauc.trees import (
    Tree,
    find_only_node,
    is_empty,
    list_nodes,
    replace_only_node,
    tree_at,
    tree_leaves,
    tree_map,
    tree_stack,
)
from small_federations import HOLDING, same_bits, small_federation


class Pair(NamedTuple):
    """A record with a leaf and a subtree."""

    first: Tensor
    rest: Tree


def make_pair(value: float) -> Pair:
    return Pair(torch.tensor([value]), (torch.tensor([[value, value + 1]]), (), Pair(torch.tensor(value), ())))


def test_batch_total_is_both_classes() -> None:
    assert BatchSize(2, 3).total_rows == 5


def test_clients_of_a_setting_are_those_that_hold_data() -> None:
    assert Setting(0, 3, BatchSize(1, 1), small_federation().census, "clients").client_count == HOLDING


def test_tree_map_keeps_the_structure_and_reaches_every_leaf() -> None:
    doubled = tree_map(lambda leaf: 2 * leaf, make_pair(3.0))
    assert type(doubled) is Pair
    assert type(doubled.rest[2]) is Pair
    assert [leaf.tolist() for leaf in tree_leaves(doubled)] == [[6.0], [[6.0, 8.0]], 6.0]
    assert tree_map(torch.neg, ()) == ()


def test_tree_map_takes_trees_side_by_side_and_refuses_another_shape() -> None:
    assert same_bits(tree_map(torch.add, make_pair(1.0), make_pair(2.0)).rest[2], Pair(torch.tensor(3.0), ()))
    with pytest.raises(ValueError, match="zip"):
        tree_map(torch.add, (torch.ones(1), torch.ones(1)), (torch.ones(1),))


def test_stacking_and_picking_are_inverse() -> None:
    trees = [make_pair(float(value)) for value in range(3)]
    stacked = tree_stack(trees)
    assert [leaf.shape[0] for leaf in tree_leaves(stacked)] == [3, 3, 3]
    assert all(same_bits(tree_at(stacked, index), tree) for index, tree in enumerate(trees))


def test_only_the_empty_tuple_is_empty() -> None:
    assert is_empty(())
    assert not is_empty(torch.zeros(0))
    assert not is_empty(make_pair(0.0))


def test_mean_of_nothing_is_zero() -> None:
    assert mean_last(torch.ones(2, 0)).tolist() == [0, 0]
    assert mean_last(torch.tensor([[1.0, 3.0]])).tolist() == [2.0]


class Cube(GapObjective):
    """A surrogate that knows no derivative."""

    name = "cube"

    def pair_loss(self, gap: Tensor) -> Tensor:
        return gap**3


class Quartic(PointObjective):
    """A row loss that knows no derivative."""

    name = "quartic"

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores - labels) ** 4


def test_slopes_come_by_autograd_where_an_objective_gives_none() -> None:
    gap = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(Cube().pair_slope(gap), 3 * gap**2, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        Quartic().example_slope(gap, torch.ones_like(gap)), 4 * (gap - 1) ** 3, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("score", ["identity", "sigmoid"])
def test_the_link_gives_scores_and_their_derivative(score: str) -> None:
    raw = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    objective: PointObjective | GapObjective = Logistic() if score == "identity" else Cube(score="sigmoid")
    scores = objective.to_scores(raw)
    slope = objective.to_output_slopes(scores, torch.ones_like(scores))
    expected = raw.numpy() if score == "identity" else 1 / (1 + np.exp(-raw.numpy()))
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    ahead = (raw + 1e-6).numpy() if score == "identity" else 1 / (1 + np.exp(-(raw.numpy() + 1e-6)))
    # A forward difference of 1e-6 is right to about 1e-6.
    np.testing.assert_allclose(slope, (ahead - expected) / 1e-6, atol=1e-6)


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(ValueError, match="score is 'relu'; use 'identity' or 'sigmoid'"):
        Cube(score="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(find_algorithms()))
def test_bad_weight_decay_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"weight_decay is -0\.1; it must be a finite number of at least 0"):
        find_algorithms()[name](weight_decay=-0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="weight_decay is nan"):
        find_algorithms()[name](weight_decay=float("nan"))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(find_algorithms()))
def test_an_objective_of_another_kind_is_refused(name: str) -> None:
    kind = find_algorithms()[name]
    # Each algorithm takes one of the five kinds of objective: that of its default. Local pairs take scores alone.
    pairs = GapObjective if name == "local-pairs" else PairObjective
    families = (PointObjective, pairs, CompositionalObjective, Minimax, OneVsRestLoss)
    (family,) = (choice for choice in families if isinstance(kind().objective, choice))  # type: ignore[call-arg]
    for objective in (member() for member in find_objectives().values()):
        if isinstance(objective, family):
            assert kind(objective=objective).objective is objective
        else:
            with pytest.raises(
                ValueError,
                match=f"^objective is '{objective.name}', which the algorithm {name} cannot use; use one of: ",
            ):
                kind(objective=objective)


def test_a_tree_with_no_model_or_with_several_needs_methods_of_its_own() -> None:
    first, second = (Model(torch.full((2,), value), torch.zeros(0)) for value in (1.0, 2.0))
    assert find_only_node(Pair(torch.zeros(1), (first,)), Model) is first
    assert replace_only_node(Pair(torch.zeros(1), (first,)), second).rest == (second,)
    assert list_nodes(Pair(torch.zeros(1), (first, second)), Model) == [first, second]
    for tree, count in ((Pair(torch.zeros(1), ()), 0), (Pair(torch.zeros(1), (first, second)), 2)):
        with pytest.raises(
            ValueError, match=f"a Pair contains {count} records of the kind Model; it must be 1: define"
        ):
            replace_only_node(tree, first)
