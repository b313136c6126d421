"""Uniform participation: what it fills in, that it is uniform, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from fedauc.interfaces import Roster
from fedauc.participation.uniform import Uniform

RARE = 1e-6
"""The chi-square test fails below this p-value. The seed is fixed, so it passes for ever or fails for ever."""

# 26 clients of which the first holds nothing: N = 25.
SIZES = np.array([0] + [4] * 25)


@pytest.mark.parametrize(
    ("participation", "labels", "cycle_length", "per_round"),
    [
        # No labels: ten rounds a cycle, ceil(25 / 10) = 3 clients each.
        (Uniform(), None, 10, 3),
        # Four labels: four rounds a cycle, ceil(25 / 4) = 7 clients each.
        (Uniform(), np.arange(26) % 4, 4, 7),
        (Uniform(groups=5), np.arange(26) % 4, 5, 5),
        (Uniform(per_round=6), np.arange(26) % 4, 4, 6),
        # A cycle may have more rounds than there are clients: one client each.
        (Uniform(groups=40), None, 40, 1),
        (Uniform(per_round=25, groups=1), None, 1, 25),
    ],
)
def test_open_parameters_match_a_cyclic_schedule(
    participation: Uniform, labels: np.ndarray | None, cycle_length: int, per_round: int
) -> None:
    schedule = participation.bind(Roster(SIZES, labels), 0)
    assert schedule.cycle_length == cycle_length
    assert {len(schedule.cohort(round).clients) for round in range(20)} == {per_round}


def test_fewer_than_ten_clients_make_shorter_cycles() -> None:
    assert Uniform().bind(Roster(np.array([4, 4, 4, 0])), 0).cycle_length == 3


def test_there_is_one_group_of_all_clients_with_data() -> None:
    (group,) = Uniform().bind(Roster(SIZES), 0).groups
    assert group.tolist() == list(range(1, 26))


def test_every_subset_is_equally_likely() -> None:
    # 3 of 8: 56 subsets, 50 draws expected of each.
    schedule = Uniform(per_round=3).bind(Roster(np.full(8, 4)), 0)
    counts = Counter(schedule.cohort(round).clients for round in range(50 * 56))
    assert len(counts) == 56
    assert stats.chisquare(list(counts.values())).pvalue > RARE


@pytest.mark.parametrize("name", ["per_round", "groups"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} is {value}; it must be a whole number of at least 1: raise {name}$"
    ):
        Uniform(**{name: value})


def test_more_than_all_clients_are_refused() -> None:
    message = r"^per_round is 26; it must be at most the 25 non-empty clients: lower per_round$"
    with pytest.raises(ValueError, match=message):
        Uniform(per_round=26).bind(Roster(SIZES), 0)
