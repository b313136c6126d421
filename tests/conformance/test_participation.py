"""What every participation keeps. A new file in the folder fails here until it has an example."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fedauc.interfaces import Participation, Roster
from fedauc.participation import find_participations
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.full import Full
from fedauc.participation.trace import Trace
from fedauc.participation.uniform import Uniform
from fedauc.testing._expectations import check_configuration
from fedauc.testing.participation import (
    CLIENTS,
    LABELS,
    ROUNDS,
    SIZES,
    check_cohorts,
    check_groups,
    check_purity,
    list_cohorts,
)

PLAIN = Roster(SIZES)
LABELLED = Roster(SIZES, LABELS)
# In round r the clients c with (c + r) divisible by 4 are available, empty ones among them; nobody in round 5.
RECORDED = tuple((r, c) for r in range(ROUNDS) for c in range(CLIENTS) if (c + r) % 4 == 0 and r != 5)

EXAMPLES: dict[str, dict[str, Participation]] = {
    "cyclic": {
        "default": Cyclic(),
        "whole groups": Cyclic(groups=4, assignment="random"),
        "draws": Cyclic(groups=3, per_round=4),
        "sparse draws": Cyclic(groups=1, per_round=2, assignment="random"),
        "reshuffled": Cyclic(groups=5, per_round=3, assignment="random", order="reshuffled"),
        "given": Cyclic(given=(tuple(range(12)), tuple(range(12, 30))), per_round=3),
    },
    "cyclic-poisson": {
        "default": CyclicPoisson(),
        "half": CyclicPoisson(rate=0.5, groups=4, assignment="random"),
        "everybody": CyclicPoisson(rate=1.0),
    },
    "uniform": {"default": Uniform(), "few": Uniform(per_round=2), "cycle": Uniform(groups=9)},
    "full": {"default": Full()},
    "trace": {
        "alone": Trace(rows=RECORDED, cycle_length=6),
        "repeated": Trace(rows=RECORDED[:20], cycle_length=6, repeat=True),
        "due": Trace(rows=RECORDED, schedule=Cyclic(groups=3, per_round=4)),
    },
}
CASES = [pytest.param(p, id=f"{name}-{case}") for name, cases in EXAMPLES.items() for case, p in cases.items()]
DRAWING = [
    case
    for case in CASES
    if "draws" in str(case.id) or case.id in ("cyclic-reshuffled", "uniform-few", "cyclic-poisson-half")
]

everyone = pytest.mark.parametrize("participation", CASES)
rosters = pytest.mark.parametrize("clients", [PLAIN, LABELLED], ids=["plain", "labelled"])


def test_every_member_has_an_example_of_its_own_type() -> None:
    members = find_participations()
    assert set(members) == set(EXAMPLES)
    assert all(type(example) is members[name] for name, cases in EXAMPLES.items() for example in cases.values())


@everyone
@rosters
def test_cohorts_are_valid(participation: Participation, clients: Roster) -> None:
    check_cohorts(participation, clients)


@everyone
@rosters
def test_weights_are_equal(participation: Participation, clients: Roster) -> None:
    for cohort in list_cohorts(participation.bind(clients, 0)):
        assert len(set(cohort.weights)) <= 1


@everyone
@rosters
def test_groups_split_the_clients_that_hold_data(participation: Participation, clients: Roster) -> None:
    check_groups(participation, clients)


@everyone
@rosters
def test_cohorts_are_a_pure_function_of_seed_and_round(participation: Participation, clients: Roster) -> None:
    check_purity(participation, clients)


@everyone
def test_a_cohort_names_its_round_by_a_plain_integer(participation: Participation) -> None:
    cohort = participation.bind(PLAIN, 3).cohort(np.int64(ROUNDS - 1))  # type: ignore[arg-type]
    assert type(cohort.round) is int


@pytest.mark.parametrize("participation", DRAWING)
def test_seeds_differ(participation: Participation) -> None:
    # 24 draws of at least 1 of 9 agree by chance with probability below 9**-24.
    assert list_cohorts(participation.bind(PLAIN, 0)) != list_cohorts(participation.bind(PLAIN, 1))


@everyone
def test_negative_rounds_are_refused_in_one_line(participation: Participation) -> None:
    schedule = participation.bind(PLAIN, 0)
    with pytest.raises(ValueError, match=r"^round is -1; it must be at least 0: rounds count from 0$"):
        schedule.cohort(-1)


@everyone
def test_clients_without_any_data_are_refused_in_one_line(participation: Participation) -> None:
    with pytest.raises(ValueError, match=r"^all 30 clients are empty; at least 1 must hold data: give it rows$"):
        participation.bind(Roster(np.zeros(CLIENTS, dtype=int)), 0)


@everyone
def test_the_configuration_is_frozen_and_survives_json(participation: Participation) -> None:
    check_configuration(participation)


@everyone
def test_schedules_pickle(participation: Participation) -> None:
    schedule = participation.bind(LABELLED, 0)
    assert list_cohorts(pickle.loads(pickle.dumps(schedule))) == list_cohorts(schedule)
