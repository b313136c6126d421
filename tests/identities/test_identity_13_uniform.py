"""Identity 13, first part: cyclic participation with one group is uniform sampling, cohort by cohort."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedauc.interfaces import Roster
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.uniform import Uniform

# Every seventh of 60 clients is empty: 9 of them, so N = 51 and indices differ from positions.
SIZES = np.where(np.arange(60) % 7 == 0, 0, 5)
N = 51

ONE_GROUP: dict[str, tuple[Roster, Cyclic]] = {
    "random": (Roster(SIZES), Cyclic(groups=1, assignment="random")),
    "metadata": (Roster(SIZES, np.full(60, "all")), Cyclic(assignment="metadata")),
    "given": (Roster(SIZES), Cyclic(given=(tuple(reversed(range(60))),))),
    "reshuffled": (Roster(SIZES), Cyclic(groups=1, order="reshuffled")),
}


# 6 of 51 takes the sparse path of the draw (6 * 8 <= 51), 7 and 50 the dense one, 51 no draw at all.
@pytest.mark.parametrize("per_round", [1, 6, 7, 50, N])
@pytest.mark.parametrize("kind", ONE_GROUP)
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_one_group_is_uniform_sampling(kind: str, per_round: int, seed: int) -> None:
    clients, schedule = ONE_GROUP[kind]
    cyclic = replace(schedule, per_round=per_round).bind(clients, seed)
    uniform = Uniform(per_round=per_round, groups=1).bind(clients, seed)
    assert cyclic.cycle_length == uniform.cycle_length == 1
    assert [g.tolist() for g in cyclic.groups] == [g.tolist() for g in uniform.groups]
    assert [cyclic.cohort(r) for r in range(20)] == [uniform.cohort(r) for r in range(20)]


def test_two_groups_are_not_uniform_sampling() -> None:
    clients = Roster(SIZES)
    cyclic = Cyclic(groups=2, per_round=5).bind(clients, 0)
    uniform = Uniform(per_round=5, groups=2).bind(clients, 0)
    assert [cyclic.cohort(r) for r in range(20)] != [uniform.cohort(r) for r in range(20)]
