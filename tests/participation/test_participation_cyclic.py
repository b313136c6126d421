"""Cyclic participation: groups, turns, draws, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedauc.interfaces import Roster, Schedule
from fedauc.participation.cyclic import Cyclic

RARE = 1e-6
"""Chi-square tests fail below this p-value. Seeds are fixed, so they pass for ever or fail for ever."""


def make_roster(total: int, groups: Any = None, empty: tuple[int, ...] = ()) -> Roster:
    sizes = np.full(total, 4)
    sizes[list(empty)] = 0
    return Roster(sizes, None if groups is None else np.asarray(groups))


def group_lists(schedule: Schedule) -> list[list[int]]:
    return [group.tolist() for group in schedule.groups]


# -------------------------------------------------------------------------------------------------------- groups


def test_labels_make_groups_in_sorted_order() -> None:
    schedule = Cyclic().bind(make_roster(5, ["ny", "ca", "ny", "tx", "ca"], empty=(4,)), 0)
    assert group_lists(schedule) == [[1], [0, 2], [3]]
    assert schedule.cycle_length == 3


def test_numeric_labels_sort_as_numbers() -> None:
    # As text "10" would come before "9".
    assert group_lists(Cyclic(assignment="metadata", groups=2).bind(make_roster(3, [10, 9, 10]), 0)) == [[1], [0, 2]]


# 23 clients in 5 parts: three of 5 and two of 4, since 23 = 3 * 5 + 2 * 4.
@pytest.mark.parametrize(("total", "count", "sizes"), [(23, 5, {4: 2, 5: 3}), (20, 4, {5: 4}), (7, 7, {1: 7})])
def test_random_groups_are_nearly_equal(total: int, count: int, sizes: dict[int, int]) -> None:
    schedule = Cyclic(groups=count, assignment="random").bind(make_roster(total), 0)
    assert Counter(map(len, schedule.groups)) == sizes
    assert sorted(np.concatenate(schedule.groups)) == list(range(total))


def test_random_groups_depend_on_the_seed_and_ignore_labels() -> None:
    clients = make_roster(40, np.arange(40) % 2)
    first, second = (group_lists(Cyclic(groups=4, assignment="random").bind(clients, seed)) for seed in (0, 1))
    assert first != second
    assert len(first) == 4


def test_random_groups_put_any_two_clients_together_equally_often() -> None:
    # 6 clients in 3 pairs: client 0 meets each of the 5 others with chance 1/5; 2000 seeds, 400 meetings expected each.
    mates = Counter[int]()
    for seed in range(2000):
        group = next(g for g in group_lists(Cyclic(groups=3).bind(make_roster(6), seed)) if 0 in g)
        mates[max(group)] += 1
    assert stats.chisquare([mates[client] for client in range(1, 6)]).pvalue > RARE


# Ten groups, or one per client where fewer than ten hold data (12 clients of which 4 are empty leave 8).
@pytest.mark.parametrize(("total", "empty", "expected"), [(30, (), 10), (12, (0, 1, 2, 3), 8), (1, (), 1)])
def test_without_labels_the_default_is_ten_random_groups(total: int, empty: tuple[int, ...], expected: int) -> None:
    assert Cyclic().bind(make_roster(total, empty=empty), 0).cycle_length == expected


def test_given_groups_drop_empty_clients_and_sort() -> None:
    assert group_lists(Cyclic(given=((3, 0), (2, 1))).bind(make_roster(4, empty=(0,)), 0)) == [[3], [1, 2]]


def test_given_accepts_lists_and_numpy_integers() -> None:
    loose: Any = [np.array([0, 1]), [2]]
    assert Cyclic(given=loose) == Cyclic(given=((0, 1), (2,)))


# --------------------------------------------------------------------------------------------------------- turns


@pytest.mark.parametrize("order", ["fixed", "reshuffled"])
@pytest.mark.parametrize("cycle", [0, 1, 1000])
def test_whole_groups_visit_every_client_once_per_cycle(order: Any, cycle: int) -> None:
    schedule = Cyclic(groups=4, order=order).bind(make_roster(23, empty=(5,)), 0)
    rounds = range(cycle * 4, cycle * 4 + 4)
    visited = [client for round in rounds for client in schedule.cohort(round).clients]
    assert sorted(visited) == [client for client in range(23) if client != 5]


def test_per_round_equal_to_the_group_size_is_the_whole_group() -> None:
    uncounted, counted = (
        Cyclic(groups=4).bind(make_roster(20), 0),
        Cyclic(groups=4, per_round=5).bind(make_roster(20), 0),
    )
    assert [uncounted.cohort(r) for r in range(8)] == [counted.cohort(r) for r in range(8)]


def test_fixed_order_visits_group_r_mod_k() -> None:
    schedule = Cyclic(groups=3).bind(make_roster(12), 0)
    assert [list(schedule.cohort(r).clients) for r in range(9)] == group_lists(schedule) * 3


def test_reshuffled_order_changes_from_cycle_to_cycle() -> None:
    schedule = Cyclic(groups=6, per_round=1, order="reshuffled").bind(make_roster(6), 0)
    orders = {tuple(schedule.cohort(6 * cycle + position).clients[0] for position in range(6)) for cycle in range(10)}
    # Ten of 720 orders: all distinct up to rare repeats, and this seed has none.
    assert len(orders) == 10


def test_reshuffled_order_is_uniform_over_permutations() -> None:
    schedule = Cyclic(groups=3, order="reshuffled").bind(make_roster(3), 0)
    counts = Counter(
        tuple(schedule.cohort(3 * cycle + position).clients for position in range(3)) for cycle in range(1200)
    )
    # 3! = 6 orders, 200 expected of each.
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > RARE


# --------------------------------------------------------------------------------------------------------- draws


# 3 of 8 takes the dense path of the draw and 2 of 16 the sparse one: 56 and 120 subsets, 50 draws expected of each.
@pytest.mark.parametrize(("size", "per_round", "subsets"), [(8, 3, 56), (16, 2, 120)])
def test_draws_are_uniform_over_the_subsets_of_the_group(size: int, per_round: int, subsets: int) -> None:
    schedule = Cyclic(groups=2, per_round=per_round).bind(make_roster(2 * size), 0)
    counts = Counter(schedule.cohort(2 * cycle).clients for cycle in range(50 * subsets))
    # Subsets never seen would count zero; with 50 expected each, all are seen.
    assert len(counts) == subsets
    assert stats.chisquare(list(counts.values())).pvalue > RARE


def test_draws_of_successive_cycles_are_independent() -> None:
    # 1 of 4 in 800 consecutive pairs of cycles: 16 combinations, 50 expected of each.
    schedule = Cyclic(groups=2, per_round=1).bind(make_roster(8), 0)
    drawn = [schedule.cohort(2 * cycle).clients[0] for cycle in range(1600)]
    counts = Counter(zip(drawn[::2], drawn[1::2], strict=True))
    assert len(counts) == 16
    assert stats.chisquare(list(counts.values())).pvalue > RARE


def test_cohorts_are_golden() -> None:
    # Written down once: a change here changes who takes part in every published run.
    schedule = Cyclic(groups=3, per_round=2, order="reshuffled").bind(make_roster(12), 0)
    assert group_lists(schedule) == [[0, 4, 10, 11], [3, 5, 6, 8], [1, 2, 7, 9]]
    assert [schedule.cohort(r).clients for r in range(4)] == [(3, 8), (2, 9), (0, 10), (3, 5)]


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"groups": 0}, "groups is 0; it must be a whole number of at least 1: raise groups"),
        ({"groups": 2.5}, "groups is 2.5; it must be a whole number of at least 1: give groups as a plain number"),
        ({"per_round": 0}, "per_round is 0; it must be a whole number of at least 1: raise per_round"),
        (
            {"per_round": True},
            "per_round is True; it must be a whole number of at least 1: give per_round as a plain number",
        ),
        ({"assignment": "labels"}, "assignment is 'labels'; use 'auto', 'metadata', 'random' or 'given'"),
        ({"order": "random"}, "order is 'random'; use 'fixed' or 'reshuffled'"),
        ({"assignment": "given"}, "assignment is 'given' but given is empty: list each group's clients"),
        (
            {"assignment": "random", "given": ((0,),)},
            "assignment is 'random' but given lists groups: use 'given', or drop given",
        ),
        ({"groups": 2, "given": ((0,),)}, "groups is 2 but given lists 1 groups: drop groups"),
        ({"given": ((0.5,),)}, "given is ((0.5,),); it must hold rows of integers: change given"),
    ],
)
def test_parameters_are_checked_alone(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cyclic(**parameters)
    assert str(caught.value) == message


HALVES = ["a", "a", "a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("parameters", "clients", "message"),
    [
        (
            {"groups": 6},
            make_roster(6, empty=(1,)),
            "groups is 6; it must be at most the 5 non-empty clients: lower groups",
        ),
        (
            {"per_round": 3},
            make_roster(6, HALVES, empty=(4,)),
            "per_round is 3; it must be at most the 2 non-empty clients of the smallest group: lower per_round, "
            "or use fewer groups",
        ),
        (
            {"groups": 3, "assignment": "metadata"},
            make_roster(6),
            "clients carry no group label; use assignment='random' with groups=K, or give a group column",
        ),
        (
            {"groups": 3},
            make_roster(6, HALVES),
            "groups is 3; the clients carry 2 group labels: use groups=2, or assignment='random' to ignore the labels",
        ),
        (
            {},
            make_roster(6, HALVES, empty=(3, 4, 5)),
            "group 'b' has no client with data; it must have at least 1: drop the group",
        ),
        ({}, make_roster(6, [1, 2]), "group labels have shape (2,); give one to each of 6 clients"),
        ({}, make_roster(3, [1.0, np.nan, 2.0]), "client 1 has no group label (nan); label every client"),
        (
            {},
            make_roster(3, np.array(["a", None, "b"], dtype=object)),
            "group labels mix NoneType, str, which have no order: label every client in one type",
        ),
        (
            {"given": ((0, 1), (2,))},
            make_roster(5, empty=(3,)),
            "given leaves out non-empty client 4: put each in a group",
        ),
        (
            {"given": ((0,),)},
            make_roster(9),
            "given leaves out non-empty clients 1, 2, 3, 4, 5 and 3 more: put each in a group",
        ),
        (
            {"given": ((0, 1), (1, 2))},
            make_roster(3),
            "given lists client 1 more than once: put each client in one group",
        ),
        (
            {"given": ((0, 1), (3, 2))},
            make_roster(3),
            "given lists client 3; clients run from 0 to 2: correct the index",
        ),
        (
            {"given": ((0, 1), (-1, 2))},
            make_roster(3),
            "given lists client -1; clients run from 0 to 2: correct the index",
        ),
        (
            {"given": ((0, 1), (2,))},
            make_roster(3, empty=(2,)),
            "group 1 has no client with data; it must have at least 1: drop the group",
        ),
    ],
)
def test_parameters_are_checked_against_the_clients(parameters: dict[str, Any], clients: Roster, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cyclic(**parameters).bind(clients, 0)
    assert str(caught.value) == message
