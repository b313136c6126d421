"""Full participation: everyone with data, every round, whatever the seed."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.interfaces import Cohort, Roster
from fedauc.participation.full import Full


@pytest.mark.parametrize("round", [0, 1, 10**12])
@pytest.mark.parametrize("seed", [0, 1])
def test_everyone_with_data_takes_part(round: int, seed: int) -> None:
    schedule = Full().bind(Roster(np.array([3, 0, 1, 2]), np.array(["a", "a", "b", "b"])), seed)
    # Three of the four hold data: a third each.
    assert schedule.cohort(round) == Cohort(round, (0, 2, 3), (1 / 3, 1 / 3, 1 / 3))


def test_a_cycle_is_one_round_and_one_group() -> None:
    schedule = Full().bind(Roster(np.array([3, 0, 1, 2])), 0)
    assert schedule.cycle_length == 1
    assert [group.tolist() for group in schedule.groups] == [[0, 2, 3]]
